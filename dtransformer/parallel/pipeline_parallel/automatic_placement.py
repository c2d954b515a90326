"""Automatic placement of layers: by where they are used, or spread evenly.

Pure functions of what `DependencyRecorder` has found out.
"""

from collections.abc import Hashable, Mapping, Sequence

# A layer's call: the layer, and the layers whose results it needs.
Call = tuple[Hashable, Sequence[Hashable]]


def by_use(
    calls: Sequence[Call], ends: Sequence[Hashable], given: Mapping[Hashable, int], num_chunks: int
) -> dict[Hashable, int]:
    """Return the model chunks of layers that have none, by those of the layers around them.

    A layer is put where what it needs comes from: the last of the chunks. Where it needs the
    network's inputs alone, it is put with the first layer that needs it.

    Args:
        calls: the calls of all layers, in their order.
        ends: the layers that the network's outputs come from.
        given: the chunks of layers that have one.
        num_chunks: number of chunks of the network.

    Example: an embedding, two blocks, a second embedding which only the last block needs, a head.

    >>> calls = [("in", []), ("b0", ["in"]), ("more", []), ("b1", ["b0", "more"]), ("head", ["b1"])]
    >>> by_use(calls, ["head"], {"b0": 0, "b1": 1}, 2)
    {'head': 1, 'more': 1, 'in': 0}
    """
    found = dict(given)
    for layer, needed in calls:
        chunks = [found[other] for other in needed if other in found]
        if layer not in given and chunks:
            found[layer] = max([*chunks, found.get(layer, 0)])
    users = {}
    for layer, needed in [*calls, (None, ends)]:
        for other in needed:
            users.setdefault(other, []).append(layer)
    for layer, _ in reversed(calls):
        if layer not in found:
            chunks = [found.get(user, num_chunks - 1) for user in users.get(layer, [None])]
            found[layer] = min(chunks)
    return {layer: chunk for layer, chunk in found.items() if layer not in given}


def spread(sizes: Mapping[Hashable, int], num_chunks: int) -> dict[Hashable, int]:
    """Return the model chunks of layers that follow each other, the largest chunk the smallest.

    Args:
        sizes: how much each layer has to compute, in the order of the layers.
        num_chunks: number of chunks, at most that of layers.

    Example:

    >>> spread({"in": 1, "a": 4, "b": 4, "c": 4, "out": 2}, 2)
    {'in': 0, 'a': 0, 'b': 0, 'c': 1, 'out': 1}
    """
    low, high = max(sizes.values()), sum(sizes.values())
    while low < high:
        middle = (low + high) // 2
        if len(_filled(sizes, middle)) <= num_chunks:
            high = middle
        else:
            low = middle + 1
    chunks = _filled(sizes, low)
    while len(chunks) < num_chunks:  # halve the one with the most layers
        longest = max(range(len(chunks)), key=lambda number: len(chunks[number]))
        layers, half = chunks[longest], len(chunks[longest]) // 2
        chunks[longest : longest + 1] = [layers[:half], layers[half:]]
    return {layer: number for number, layers in enumerate(chunks) for layer in layers}


def _filled(sizes, most):
    """Return lists of layers, each filled before the next one is begun."""
    chunks, size = [[]], 0
    for layer, own in sizes.items():
        if chunks[-1] and size + own > most:
            chunks.append([])
            size = 0
        chunks[-1].append(layer)
        size += own
    return chunks
