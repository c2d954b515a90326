"""Layers whose gradient norms are logged: groups of weights."""

import itertools
import posixpath
import re

from dtransformer.parallel.collectives.objects import all_gather_json

LAYER_NORM = "gradient_norm/"  # Prefix of a layer's name in the logs.
# A path up to its block, or else up to its last slash.
_LAYER = re.compile(r".*?(block|layer)_\d+(?=/)|.*(?=/)")


def group_by_layer(paths: list[str]) -> tuple[list[str], list[int]]:
    """Return the layers of all pipeline stages, and the layer of each weight of this rank.

    All ranks call it.

    Args:
        paths: List of the paths of this rank's weights.

    Returns:
        A `(names, indices)` tuple. `names` are the names of all layers, equal on all ranks, without
        the folders that they have in common. `indices` has the position in `names` of each path's
        layer.
    """
    local = [layer_name(path) for path in paths]
    names = list(dict.fromkeys(itertools.chain(*all_gather_json(local, "gradient_norms"))))
    common = posixpath.commonpath(names or [""]) + "/"
    return [name.removeprefix(common) for name in names], [names.index(name) for name in local]


def layer_name(path: str) -> str:
    """Return the path of a weight's layer: its block, or its innermost layer outside of blocks.

    Example:

    >>> layer_name("lm/blocks/block_3/attention/query_kernel"), layer_name("lm/embedding/table")
    ('lm/blocks/block_3', 'lm/embedding')
    """
    match = _LAYER.match(path)
    return match[0] if match else path
