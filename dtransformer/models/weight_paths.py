"""Weights of a network by patterns of their paths."""

import fnmatch
import re
from collections.abc import Iterable

import keras

from dtransformer.parallel.object_collectives import all_gather_json


def path_in(network: keras.Model, part: keras.Variable | keras.layers.Layer) -> str:
    """Return the path of a variable, or a layer, without the network's name."""
    return part.path.removeprefix(f"{network.name}/")


def matching_paths(network: keras.Model, patterns: str | Iterable[str]) -> list[str]:
    """Return the paths of the weights that match one of several patterns.

    In a pipeline those of all stages are found; all ranks have to call.

    Args:
        network: a `keras.Model`, built.
        patterns: one or several, of paths without the network's name. `*` is any text, `/`
            included, `?` one character, `[0-3]` one of these, `(query|value)` one of these words.

    Raises:
        ValueError: the network is not built, or a pattern matches no weight; tells some paths.
    """
    if not network.built:
        raise ValueError("the network has no weights yet: build it, or call it on a batch")
    own = [path_in(network, variable) for variable in network.variables]
    everywhere = all_gather_json(own, "weight_paths")
    paths = list(dict.fromkeys(path for of_rank in everywhere for path in of_rank))
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    found = set()
    for pattern in patterns:
        matches = _expression(pattern).fullmatch
        new = [path for path in paths if matches(path)]
        if not new:
            some = ", ".join(paths[:: max(len(paths) // 5, 1)])
            raise ValueError(f"the pattern {pattern!r} matches no weight; there are {some}")
        found.update(new)
    return [path for path in paths if path in found]


def _expression(pattern):
    """Return the regular expression of a pattern."""
    text = fnmatch.translate(pattern)
    for sign in "(|)":
        text = text.replace("\\" + sign, sign)
    return re.compile(text)
