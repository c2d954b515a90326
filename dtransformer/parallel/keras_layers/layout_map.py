"""Layout maps: regular expressions of weight paths, and the mesh axes that shard the weights."""

import difflib
import re
from collections.abc import Mapping

# Mesh axis, or None, of each dimension of a weight.
Specs = tuple[str | None, ...]


def match_layouts(
    layout_map: Mapping[str, Specs], paths: list[str]
) -> tuple[dict[str, str], list[str]]:
    """Match the patterns of a layout map with the paths of weights, with `re.search`.

    A pattern that equals a path takes precedence, as in Keras.

    Args:
        layout_map: Mapping from regular expressions to specs.
        paths: List of the paths of all weights.

    Returns:
        A `(patterns, unused)` tuple: a dict of the matched paths to their patterns, and a list of
        the patterns that match no path.

    Raises:
        ValueError: If two patterns match a path.

    Example:

    >>> match_layouts({"up/kernel": (None, "model"), "norm": (None,)}, ["block/up/kernel"])
    ({'block/up/kernel': 'up/kernel'}, ['norm'])
    """
    patterns = {}
    for path in paths:
        matches = [x for x in layout_map if re.search(x, path)]
        if path in layout_map:
            matches = [path]
        if len(matches) > 1:
            raise ValueError(
                f"The weight {path} matches several patterns of `layout_map`: "
                f"{', '.join(map(repr, matches))}. Make the patterns more specific, so that each weight "
                "matches at most one."
            )
        if matches:
            patterns[path] = matches[0]
    return patterns, [pattern for pattern in layout_map if pattern not in patterns.values()]


def check_all_used(unused: list[str], paths: list[str]) -> None:
    """Raise an error if a pattern of `layout_map` matches no weight.

    Args:
        unused: List of patterns, from `match_layouts`.
        paths: List of the paths of all weights.

    Raises:
        ValueError: If the list is not empty. The message has the nearest paths.
    """
    if unused:
        literal = re.sub(r"\\.|[^\w/]+", "/", unused[0]).strip("/")
        close = sorted(paths, key=lambda path: -_similarity(literal, path))[:3]
        raise ValueError(
            f"The pattern {unused[0]!r} of `layout_map` matches no weight. The nearest paths are "
            f"{', '.join(close) or 'none: the network has no weights'}. `print(trainer.plan())` lists "
            "all paths."
        )


def _similarity(literal, path):
    """Return the similarity of a text and the most similar part of a path, from 0 to 1."""
    names = path.split("/")
    length = literal.count("/") + 1
    starts = range(max(len(names) - length, 0) + 1)
    parts = ["/".join(names[start : start + length]) for start in starts]
    return max(difflib.SequenceMatcher(None, literal, part).ratio() for part in parts)


def find_problem(specs: Specs, shape: tuple[int, ...], sizes: Mapping[str, int]) -> str:
    """Return the reason why specs cannot shard a weight, or `""`.

    Args:
        specs: Tuple with a mesh axis, or `None`, for each dimension.
        shape: Shape of the full weight.
        sizes: Mapping from mesh axes to shard counts.
    """
    if len(specs) != len(shape):
        return f"{specs} has {len(specs)} axes for {len(shape)} dimensions"
    axes = [axis for axis in specs if axis is not None]
    for axis in axes:
        if axes.count(axis) > 1:
            return f"{specs} has the mesh axis {axis!r} twice"
    for index, (axis, size) in enumerate(zip(specs, shape)):
        if axis is not None and size % sizes.get(axis, 1):
            return (
                f"dimension {index} has {size} elements, but the mesh axis {axis!r} has "
                f"{sizes[axis]} shards"
            )
    return ""
