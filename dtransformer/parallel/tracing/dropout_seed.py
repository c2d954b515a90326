"""Reproducible random numbers of layers, such as dropout masks.

They depend only on a seed, the random id of the layer, the row of the global batch and the shape of a
row. A block that is computed again in the backward pass therefore draws the same masks, and so does
every layout. `mesh/random_numbers.py` draws them.
"""

import contextlib
import types
import zlib
from collections.abc import Iterable

import tensorflow as tf

from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.trace import Scoped

_random_ids = Scoped("random_ids", types.MappingProxyType({}))


class RandomLayer:
    """Base class of everything that draws random numbers under a random id.

    A subclass has the attribute `path`, as Keras layers do.
    """

    @property
    def random_id(self) -> int:
        """Integer in [0, 2³¹) that is derived from the path. Its random numbers depend on it."""
        return zlib.crc32(self.path.encode()) & 0x7FFFFFFF


def random_layers(layers: Iterable) -> list[RandomLayer]:
    """Return the random layers in a list, then all in the `random_layers` attributes of its layers."""
    listed = [inner for layer in layers for inner in getattr(layer, "random_layers", ())]
    return [*(layer for layer in layers if isinstance(layer, RandomLayer)), *listed]


def dropout_seed(seed: tf.Tensor) -> contextlib.AbstractContextManager:
    """Derive all dropout masks inside the `with` block from `seed`.

    A training step sets a seed derived from the job's seed and the step. Two more elements are the
    index of the first local row in the global batch and the number of local rows, so masks do not
    depend on how rows are divided. On a mesh the fifth element is the coordinate of the device along
    the data axis, see `put_seed`. If a block is computed again in this context, its masks are the
    same.

    Args:
        seed: Integer tensor of shape `[2]`, `[4]` or `[5]`.
    """
    return trace.dropout_seed.set(None if seed is None else _padded(seed))


def current_dropout_seed() -> tf.Tensor:
    """Return the seed set by `dropout_seed`, or a random one from TensorFlow's global generator."""
    seed = trace.dropout_seed.get()
    if seed is not None:
        return seed
    return _padded(tf.random.uniform([2], maxval=tf.int32.max, dtype=tf.int32))


def _padded(seed):
    """Append zeros to a seed `[2]`, so that all seeds of a traced function have the same shape."""
    return tf.pad(seed, [[0, 2]]) if seed.shape[0] == 2 else seed


def use_random_ids(ids: dict[int, tf.Tensor]) -> contextlib.AbstractContextManager:
    """Replace the random ids of layers inside the `with` block.

    Args:
        ids: Dict from `id(layer)` to the new random id, a scalar int32 tensor.
    """
    return _random_ids.set(types.MappingProxyType(ids))


def replaced_random_ids() -> types.MappingProxyType:
    """Return the ids set by `use_random_ids`, a read-only dict."""
    return _random_ids.get()


def current_random_id(layer: RandomLayer) -> int | tf.Tensor:
    """Return the random id of a layer, or its replacement set by `use_random_ids`."""
    return _random_ids.get().get(id(layer), layer.random_id)
