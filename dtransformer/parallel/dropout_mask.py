"""Which elements dropout keeps: a function of a seed and a number, with eight bits an element.

The random bits are those of Philox, whose key is the seed and whose counter begins with the number
(Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3"): masks of other numbers are
independent. `tf.random.stateless_uniform` would mix the seed first, by 46 operations a mask.
"""

import math
from collections.abc import Sequence

import tensorflow as tf

from dtransformer.parallel import trace

_LEVELS = 256  # of a byte
_PHILOX = 1  # as TensorFlow's operations number their algorithms
_COLUMNS = 2**32  # added to a mask's number for its columns' thresholds


def kept_elements(
    shape: Sequence,
    rate: float,
    seed: tf.Tensor,
    number: int | tf.Tensor = 0,
    part: int = 0,
) -> tf.Tensor:
    """Return which elements are kept: a bool tensor, False with the probability `rate`.

    An element is kept where its byte is at least 256 · rate. Where that is no whole number
    each column has the one below or the one above as its threshold, at random, so that the
    probability is `rate` all the same. On a mesh, where words cannot be taken for bytes, a
    quarter of the columns has the first byte of each word, and so on. Where columns are not four
    times as many, and for rates that the last byte cannot tell from 1, each element has a float of
    its own.

    Args:
        shape: list of ints, or scalars where a dimension is not known.
        rate: the probability, in [0, 1).
        seed: int32 tensor [2].
        number: int in [0, 2³¹), or an int32 scalar: masks of one seed differ by it.
        part: int in [0, 2³¹): masks of one number differ by it.
    """
    whole, fraction = divmod(rate * _LEVELS, 1)
    offset = part * 2 * _COLUMNS
    has_words = not trace.is_on_mesh() or (shape and shape[-1] % 4 == 0)
    if whole >= _LEVELS - 1 or not has_words:
        return random_floats(shape, seed, number, offset) >= rate
    threshold = tf.constant(int(whole), "uint8")
    if fraction:
        columns = random_floats(shape[-1:], seed, number, offset + _COLUMNS)
        threshold += tf.cast(columns < fraction, "uint8")
    if trace.is_on_mesh():
        return _kept_by_quarters(shape, threshold, seed, number, offset)
    return _random_bytes(shape, seed, number, offset) >= threshold


def random_floats(
    shape: Sequence, seed: tf.Tensor, number: int | tf.Tensor = 0, offset: int = 0
) -> tf.Tensor:
    """Return random numbers in [0, 1), float32, that follow from a seed and a number.

    Args:
        shape: list of ints, or scalars where a dimension is not known.
        seed: int32 tensor [2].
        number: as of `kept_elements`.
        offset: int that is added to the number.
    """
    # Of a word's last bits, as TensorFlow's own are; XLA's would be of the first.
    words = _random_words(tf.convert_to_tensor(shape, "int32"), seed, number, offset)
    return tf.cast(tf.bitwise.bitwise_and(words, 2**23 - 1), "float32") * 2.0**-23


def _kept_by_quarters(shape, threshold, seed, number, offset):
    """Compare the bytes of words [..., columns / 4], one after the other, each where it is."""
    words = _random_words([*shape[:-1], shape[-1] // 4], seed, number, offset)
    thresholds, kept = tf.broadcast_to(tf.cast(threshold, "float32"), shape[-1:]), []
    for place, least in enumerate(tf.split(thresholds, 4)):
        one = 1 << 8 * place
        least = tf.cast(least * one, "uint32")  # exact: 8 bits
        kept.append(tf.bitwise.bitwise_and(words, (_LEVELS - 1) * one) >= least)
    return tf.concat(kept, axis=-1)


def _random_bytes(shape, seed, number, offset):
    is_known = all(isinstance(size, int) for size in shape)
    size = math.prod(shape) if is_known else tf.reduce_prod(tf.stack(shape))
    words = _random_words([-(-size // 4)], seed, number, offset)
    flat = tf.reshape(tf.bitcast(words, "uint8"), [-1])
    if not is_known or size % 4:
        flat = flat[:size]
    return tf.reshape(flat, shape)


def _random_words(shape, seed, number, offset):
    """Return random uint32."""
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=shape, dtype="uint32", **_philox(seed, number, offset)
    )


def _philox(seed, number, offset):
    """Return the arguments of TensorFlow's random operations: key, counter and algorithm."""
    # Of int64, which sums have kernels for on GPUs.
    key = tf.reduce_sum(tf.cast(seed, "int64") * [2**32, 1], keepdims=True)
    # An operation counts up the low word of the counter, which is its first.
    if isinstance(number, int):
        counter = tf.constant([0, number + offset], "uint64")
    else:
        counter = tf.cast(tf.stack([0, tf.cast(number, "int64") + offset]), "uint64")
    return {"key": tf.cast(key, "uint64"), "counter": counter, "alg": _PHILOX}
