"""Masks of dropout, and the seed that they are derived from, so that they can be drawn again."""

import contextlib
import types
import zlib
from collections.abc import Iterable, Sequence

import tensorflow as tf

from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.scoped import Scoped

_PHILOX = 1
"""Id of the Philox algorithm in TensorFlow's random operations."""

_seed = Scoped("dropout_seed")
_layer_ids = Scoped("dropout_layer_ids", types.MappingProxyType({}))


class DrawsMasks:
    """A layer that draws masks, by its number; for layers inside of others, that find it by this type.

    A subclass has a Keras layer's `path`.
    """

    @property
    def number(self) -> int:
        """What tells the layer's masks from those of others: a number made of its path."""
        return zlib.crc32(self.path.encode()) & 0x7FFFFFFF


def mask_drawers(layers: Iterable) -> list[DrawsMasks]:
    """Return what draws masks of some layers: they themselves, and what is in their `mask_drawers`."""
    inner = [one for layer in layers for one in getattr(layer, "mask_drawers", ())]
    return [*(layer for layer in layers if isinstance(layer, DrawsMasks)), *inner]


def dropout_seed(seed: tf.Tensor) -> contextlib.AbstractContextManager:
    """Derive every dropout mask inside the `with` block from `seed`.

    A training step opens it with a seed made of the job's seed, the step, the
    micro-batch and the data shard; computing a block again inside it gives the same
    masks again.

    Args:
        seed: int tensor [2].
    """
    return _seed.set(seed)


def current_dropout_seed() -> tf.Tensor:
    """Return the seed of `dropout_seed`; outside of it one of TensorFlow's global generator."""
    seed = _seed.get()
    if seed is not None:
        return seed
    return tf.random.uniform([2], maxval=tf.int32.max, dtype=tf.int32)


def dropout_numbers(numbers: dict[int, tf.Tensor]) -> contextlib.AbstractContextManager:
    """Let layers inside the `with` block draw their masks by other numbers than their own.

    Args:
        numbers: dict of the id of a layer and its number, an int32 scalar.
    """
    return _layer_ids.set(types.MappingProxyType(numbers))


def current_dropout_numbers() -> types.MappingProxyType:
    """Return the numbers that `dropout_numbers` has set, by the layers' ids."""
    return _layer_ids.get()


def layer_number(layer: DrawsMasks) -> int | tf.Tensor:
    """Return the number that a layer's masks are drawn by, here."""
    return _layer_ids.get().get(id(layer), layer.number)


def kept_elements(
    shape: Sequence, rate: float, seed: tf.Tensor, number: int | tf.Tensor = 0, part: int = 0
) -> tf.Tensor:
    """Return which elements are kept: a bool tensor, False with the probability `rate`, to 2⁻¹⁷.

    Each element has 16 random bits; on a mesh, which takes no word for two elements, a word.

    Args:
        shape: list of ints, or scalars where a dimension is not known.
        rate: the probability, in [0, 1).
        seed: int tensor [2].
        number: int in [0, 2³¹), or an int32 scalar: masks of one seed differ by it.
        part: int in [0, 2³¹): masks of one number differ by it.
    """
    threshold, offset = min(round(rate * 2**16), 2**16 - 1), part * 2**32
    if trace.is_on_mesh():
        words = _random_words(shape, seed, number, offset)
        return words >= tf.constant(threshold * 2**16, "uint32")
    *rows, length = shape or [1]
    half = (length + 1) // 2
    words = _random_words([*rows, half], seed, number, offset)
    bits = tf.reshape(tf.bitcast(words, "uint16"), [*rows, 2 * half])[..., :length]
    return tf.reshape(bits, shape) >= tf.constant(threshold, "uint16")


def random_floats(shape: Sequence, seed: tf.Tensor, number: int | tf.Tensor = 0) -> tf.Tensor:
    """Return random numbers in [0, 1), float32, that follow from a seed and a number.

    Args:
        shape: list of ints, or scalars where a dimension is not known.
        seed: int tensor [2].
        number: as of `kept_elements`.
    """
    # Of a word's last bits, as TensorFlow's own are; XLA's would be of the first.
    words = tf.bitwise.bitwise_and(_random_words(shape, seed, number), 2**23 - 1)
    return tf.cast(words, "float32") * 2.0**-23


def _random_words(shape, seed, number, offset=0):
    """Return random uint32.

    They are those of Philox, whose key is the seed and whose counter begins with the number (Salmon
    et al., 2011, "Parallel random numbers: as easy as 1, 2, 3"): those of other numbers are
    independent. `tf.random.stateless_uniform` would mix the seed first, by 46 operations a mask.
    """
    # Of int64, which sums have kernels for on GPUs.
    key = tf.reduce_sum(tf.cast(seed, "int64") * [2**32, 1], keepdims=True)
    # An operation counts up the low word of the counter, which is its first.
    if isinstance(number, int):
        counter = tf.constant([0, number + offset], "uint64")
    else:
        counter = tf.cast(tf.stack([0, tf.cast(number, "int64") + offset]), "uint64")
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=tf.convert_to_tensor(shape, "int32"),
        key=tf.cast(key, "uint64"),
        counter=counter,
        alg=_PHILOX,
        dtype="uint32",
    )
