"""Gradient norms of layers: groups of weights whose squared norms are summed."""

import itertools
import re

import tensorflow as tf

from dtransformer.parallel.collectives.objects import all_gather_json

LAYER_NORM = "gradient_norm/"  # Prefix of a layer's name in the logs.
_BLOCK = re.compile(r"(\w+_)?(block|layer)_\d+")


class GradientNorms:
    """Gradient norms of all layers of a network, with the layers of all pipeline stages.

    Args:
        paths: List of the paths of this rank's weights, one for each planned shard.

    Attributes:
        names: List of the names of all layers, equal on all ranks; see `layer_name`. A first part
            that all names have in common, the name of the network, is left out.
    """

    def __init__(self, paths: list[str]):
        local = [layer_name(path) for path in paths]
        names = itertools.chain(*all_gather_json(local, "gradient_norms"))
        self.names = list(dict.fromkeys(names))
        self._indices = [self.names.index(name) for name in local]
        first, *others = {name.partition("/")[0] for name in self.names} or {""}
        if not others and all("/" in name for name in self.names):
            self.names = [name.removeprefix(f"{first}/") for name in self.names]

    def sums(self, squares: tf.Tensor, positions: list[int]) -> tf.Tensor:
        """Return the sum of the squared norms of each layer, float32 [layers].

        Args:
            squares: Float32 tensor. Squared norms of the shards at `positions`.
            positions: List of positions of planned shards.
        """
        indices = tf.constant([self._indices[i] for i in positions], "int32")
        return tf.math.unsorted_segment_sum(squares, indices, len(self.names))

    def norms(self, sums: tf.Tensor) -> dict[str, tf.Tensor]:
        """Return the norm of each layer by name, from sums over all stages."""
        return dict(zip(self.names, tf.unstack(tf.sqrt(sums))))


def layer_name(path: str) -> str:
    """Return the name of a weight's layer: its block, or its innermost layer outside of blocks.

    Example:

    >>> layer_name("lm/blocks/block_3/attention/query_kernel"), layer_name("lm/embedding/table")
    ('lm/blocks/block_3', 'lm/embedding')
    """
    layers = path.split("/")[:-1] or [path]
    for depth, layer in enumerate(layers, start=1):
        if _BLOCK.fullmatch(layer):
            return "/".join(layers[:depth])
    return "/".join(layers)
