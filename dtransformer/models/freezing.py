"""Weights that are not trained: chosen by patterns of their paths."""

from collections.abc import Iterable

import keras

from dtransformer import _compat
from dtransformer.models.weight_paths import matching_paths, path_in


def freeze(network: keras.Model, patterns: str | Iterable[str]) -> list[str]:
    """Freeze weights, which are then computed with and saved, but not trained.

    They have no gradients, no optimizer states, and no part in what ranks send for these. Where
    nothing before a layer is trained, no gradients go back to it: a pipeline's stages of frozen
    layers alone have no backward passes. Call it before `compile`, on all ranks.

    Args:
        network: a `keras.Model`, built.
        patterns: one or several, of the paths of weights without the network's name, such as
            `"blocks/block_[0-3]/*"`. `*` is any text, `/` included, `?` one character, `[0-3]` one
            of these, `(query|value)` one of these words.

    Returns:
        A list of the paths of the weights that match, on all stages of a pipeline.

    Raises:
        ValueError: the network is not built, or a pattern matches no weight.

    Example:

    >>> from dtransformer.models import CausalLM
    >>> network = CausalLM(50, hidden_size=8, num_heads=2, num_layers=2)
    >>> network.build()
    >>> len(freeze(network, ["embedding/*", "positions/*", "blocks/block_0/*"]))
    18
    >>> sorted({weight.path.split("/")[2] for weight in network.trainable_variables})
    ['block_1', 'final_norm']
    """
    return _set(network, patterns, False)


def unfreeze(network: keras.Model, patterns: str | Iterable[str] = "*") -> list[str]:
    """Train weights again that were frozen: the opposite of `freeze`, by default of all."""
    return _set(network, patterns, True)


def _set(network, patterns, trainable):
    paths = matching_paths(network, patterns)
    chosen = set(paths)
    for layer in _compat.flat_layers(network):
        for variable in _compat.own_trainable_variables(layer):
            if path_in(network, variable) in chosen:
                variable.trainable = trainable
    return paths
