"""Which elements dropout keeps: a function of a seed, drawn with eight bits an element."""

import math
from collections.abc import Sequence

import tensorflow as tf

from dtransformer.parallel import trace

_LEVELS = 256  # of a byte


def kept_elements(shape: Sequence, rate: float, seed: tf.Tensor) -> tf.Tensor:
    """Return which elements are kept: a bool tensor, False with the probability `rate`.

    An element is kept where its byte is at least 256 · rate. Where that is no whole number
    each column has the one below or the one above as its threshold, at random, so that the
    probability is `rate` all the same. On a mesh, where words cannot be taken for bytes, and
    for rates that the last byte cannot tell from 1, each element has a float of its own.

    Args:
        shape: list of ints, or scalars where a dimension is not known.
        rate: the probability, in [0, 1).
        seed: int32 tensor [2].
    """
    whole, fraction = divmod(rate * _LEVELS, 1)
    if trace.is_on_mesh() or whole >= _LEVELS - 1:
        return tf.random.stateless_uniform(shape, seed, alg="philox") >= rate
    threshold = tf.constant(int(whole), "uint8")
    if fraction:
        columns = tf.random.stateless_uniform(shape[-1:], seed + 1, alg="philox")
        threshold += tf.cast(columns < fraction, "uint8")
    return _random_bytes(shape, seed) >= threshold


def _random_bytes(shape, seed):
    is_known = all(isinstance(size, int) for size in shape)
    number = math.prod(shape) if is_known else tf.reduce_prod(tf.stack(shape))
    words = tf.random.stateless_uniform(
        [-(-number // 4)], seed, minval=None, maxval=None, dtype="uint32", alg="philox"
    )
    flat = tf.reshape(tf.bitcast(words, "uint8"), [-1])
    if not is_known or number % 4:
        flat = flat[:number]
    return tf.reshape(flat, shape)
