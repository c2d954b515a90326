"""Reproducible random numbers of layers, such as dropout masks.

They depend only on a seed, the random id of the layer and the shape. A block that is computed again
in the backward pass therefore draws the same masks.
"""

import contextlib
import math
import types
import zlib
from collections.abc import Iterable, Sequence

import tensorflow as tf

from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.trace import Scoped

_PHILOX = 1
"""Id of the Philox algorithm in TensorFlow's random operations."""

_THRESHOLDS = 2**62
"""Offset of the random numbers that select thresholds. Parts of masks have smaller offsets."""

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

    A training step sets a seed derived from the job's seed, the step, the micro-batch and the data
    shard. If a block is computed again in this context, its masks are the same.

    Args:
        seed: Integer tensor of shape `[2]`.
    """
    return trace.dropout_seed.set(seed)


def current_dropout_seed() -> tf.Tensor:
    """Return the seed set by `dropout_seed`, or a random one from TensorFlow's global generator."""
    seed = trace.dropout_seed.get()
    if seed is not None:
        return seed
    return tf.random.uniform([2], maxval=tf.int32.max, dtype=tf.int32)


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


def kept_elements(
    shape: Sequence, rate: float, seed: tf.Tensor, random_id: int | tf.Tensor = 0, part: int = 0
) -> tf.Tensor:
    """Return a dropout mask: a boolean tensor that is `False` with probability `rate`.

    Each element compares 8 random bits with a threshold. The 256 possible thresholds are too coarse
    for most rates, so each column of the last dimension draws one of the two thresholds next to
    `rate`. This makes the probability exact to 2⁻³². On a mesh an element uses 32 bits, because
    DTensor cannot split a word between elements.

    Args:
        shape: List of integers, or of scalar tensors for unknown dimensions.
        rate: Float in [0, 1). Probability of dropping an element.
        seed: Integer tensor of shape `[2]`.
        random_id: Integer in [0, 2³¹) or scalar int32 tensor. Masks with the same seed but
            different ids are independent. Defaults to `0`.
        part: Integer in [0, 2³⁰). Masks with different parts are independent. Defaults to `0`.
    """
    offset = part * 2**32
    lower = math.floor(rate * 2**8)
    if trace.is_on_mesh() or lower == 2**8 - 1:
        threshold = min(round(rate * 2**32), 2**32 - 1)
        return _random_words(shape, seed, random_id, offset) >= tf.constant(threshold, "uint32")
    *rows, length = shape or [1]
    num_words = (length + 3) // 4
    words = _random_words([*rows, num_words], seed, random_id, offset)
    bits = tf.reshape(tf.bitcast(words, "uint8"), [*rows, 4 * num_words])[..., :length]
    fraction = min(round((rate * 2**8 - lower) * 2**32), 2**32 - 1)
    draws = _random_words([length], seed, random_id, offset + _THRESHOLDS)
    takes_upper = draws < tf.constant(fraction, "uint32")
    thresholds = tf.cast(takes_upper, "uint8") + tf.constant(lower, "uint8")
    return tf.reshape(bits >= thresholds, shape)


def random_floats(shape: Sequence, seed: tf.Tensor, random_id: int | tf.Tensor = 0) -> tf.Tensor:
    """Return float32 random numbers in [0, 1).

    Args:
        shape: List of integers, or of scalar tensors for unknown dimensions.
        seed: Integer tensor of shape `[2]`.
        random_id: See `kept_elements`. Defaults to `0`.
    """
    # TensorFlow also uses the low bits of a word. XLA uses the high bits.
    words = tf.bitwise.bitwise_and(_random_words(shape, seed, random_id), 2**23 - 1)
    return tf.cast(words, "float32") * 2.0**-23


def _random_words(shape, seed, random_id, offset=0):
    """Return random uint32 numbers from the Philox generator.

    The seed is the key and the id is part of the initial counter, so that numbers with different
    ids are independent. `tf.random.stateless_uniform` would first hash the seed, which takes 46
    operations per mask.

    Reference:
        Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3"
    """
    # GPUs have kernels for sums of int64, but not of uint64.
    key = tf.reduce_sum(tf.cast(seed, "int64") * [2**32, 1], keepdims=True)
    # The operation increments the low word of the counter, which comes first.
    if isinstance(random_id, int):
        counter = tf.constant([0, random_id + offset], "uint64")
    else:
        counter = tf.cast(tf.stack([0, tf.cast(random_id, "int64") + offset]), "uint64")
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=tf.convert_to_tensor(shape, "int32"),
        key=tf.cast(key, "uint64"),
        counter=counter,
        alg=_PHILOX,
        dtype="uint32",
    )
