"""Masks of attention: what each position may attend to."""

import typing

import tensorflow as tf

from dtransformer import _compat
from dtransformer.errors import check_int
from dtransformer.layers.base import Layer, register
from dtransformer.parallel.ops.gpu_calls import INDEX_TYPE
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape


class Segments(typing.NamedTuple):
    """A mask by the sequences that positions are of: each may attend to its own.

    It takes the place of a mask [b, s, t] where lengths are great, and is made one block at a time.

    Args:
        queries: tensor [b, s], the number of the sequence of each query, from 1, and 0 for
            padding; or bool, where there is a token.
        keys: tensor [b, t], as the queries.
        prefix: bool tensor [b, t], the keys that all queries of their sequence may attend to,
            though attention be causal; None for none. That of a prefix language model (Raffel et
            al., 2020, arXiv 1910.10683, §3.2.1) is the beginning of each sequence.
    """

    queries: tf.Tensor
    keys: tf.Tensor
    prefix: tf.Tensor | None = None

    def block(self, queries: slice, keys: slice) -> "Segments":
        """Return what some queries and keys are of."""
        prefix = None if self.prefix is None else self.prefix[:, keys]
        return Segments(self.queries[:, queries], self.keys[:, keys], prefix)


def same_segment(queries: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
    """Return which keys are of the queries' segment: bool [..., s, t].

    Args:
        queries: tensor [..., s], the number of each position's segment, 0 for padding.
        keys: tensor [..., t], as the queries.
    """
    # Not by an index: where queries are sharded, DTensor fails.
    queries, keys = tf.expand_dims(queries, -1), tf.expand_dims(keys, -2)
    if keys.dtype.is_bool:
        return queries & keys
    if keys.dtype == "int32":
        queries, keys = tf.cast(queries, INDEX_TYPE), tf.cast(keys, INDEX_TYPE)
    return (queries == keys) & (keys != 0)


def own_or_keras_mask(mask: tf.Tensor | Segments | None, x: tf.Tensor | None):
    """Return the mask that a layer was given, or the one that Keras has left on a tensor."""
    return _compat.mask_of(x) if mask is None else mask


def expand_mask(mask: tf.Tensor | Segments) -> tf.Tensor:
    """Return a mask as bool [b, n or 1, s or 1, t]."""
    if isinstance(mask, Segments):
        mask = same_segment(mask.queries, mask.keys)
    mask = tf.cast(mask, "bool")
    if len(mask.shape) == 2:
        return mask[:, None, None, :]
    return mask[:, None, :, :] if len(mask.shape) == 3 else mask


def tokens_of_mask(mask: tf.Tensor | Segments | None) -> tf.Tensor | None:
    """Return which positions of a sequence that attends to itself are tokens: bool [b, s].

    Padding is what nothing may attend to; in a mask [b, s, s], what may attend to nothing.
    """
    if mask is None:
        return None
    if isinstance(mask, Segments):
        return tf.cast(mask.queries, "bool")
    if len(mask.shape) == 2:
        return tf.cast(mask, "bool")
    if len(mask.shape) == 4:
        mask = tf.reduce_max(tf.cast(mask, "float32"), axis=1)
    axis = 1 if mask.shape[1] == 1 else 2
    return tf.reduce_max(tf.cast(mask, "float32"), axis=axis) > 0


def is_near(
    queries: tf.Tensor, keys: tf.Tensor, causal: bool, window: int | None
) -> tf.Tensor | None:
    """Return which keys are within reach of queries by their positions, bool [..., s, t].

    Args:
        queries: int tensor [..., s], their positions.
        keys: int tensor [t].
        causal: whether a query may attend to no later position.
        window: a query may attend to positions that are less than this before its own, or, where
            it is not causal, after it; None for all (Beltagy et al., 2020, arXiv 2004.05150, §3.1).

    Returns:
        A tensor; None where all are.
    """
    queries, keys = tf.cast(queries, INDEX_TYPE), tf.cast(keys, INDEX_TYPE)
    queries, keys = tf.expand_dims(queries, -1), keys[None, :]
    near = queries >= keys if causal else None
    if window is not None:
        in_window = queries < keys + window
        if not causal:
            in_window &= keys < queries + window
        near = in_window if near is None else near & in_window
    return near


def allowed(mask: tf.Tensor | Segments | None, near: tf.Tensor | None) -> tf.Tensor | None:
    """Return where queries may attend, bool [b or 1, n or 1, s or 1, t]; None for everywhere.

    Args:
        mask: a mask, see `attention`; None for everywhere.
        near: bool [s, t], what is within reach; see `is_near`.
    """
    if near is not None:
        near = near[None, None]
        if isinstance(mask, Segments) and mask.prefix is not None:
            near |= mask.prefix[:, None, None, :]
    if mask is None or near is None:
        return near if mask is None else expand_mask(mask)
    return expand_mask(mask) & near


@register
class AttentionMask(Layer):
    """Turn an input mask into a causal attention mask.

    Args:
        window: how many positions each may attend to, its own and those before it; None for all
            (Beltagy et al., 2020, arXiv 2004.05150, §3.1).

    Call arguments:
        input_mask: tensor [b, s] of 0 and 1; 1 where there is a token. Or, where several
            sequences are packed into one, the number of its sequence, from 1.

    Output shape:
        [b, s, s]: 1 where position i may attend to position j ≤ i and both are
        tokens, of the same sequence; that is the lower triangle of m·mᵀ where there is one.

    Example:

    >>> AttentionMask()(tf.constant([[1, 1, 0]])).numpy().tolist()
    [[[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]]
    """

    def __init__(self, window: int | None = None, **kwargs):
        super().__init__(**kwargs)
        self.window = None if window is None else check_int("window", window)

    def call(self, input_mask: tf.Tensor) -> tf.Tensor:
        mask = tf.cast(same_segment(input_mask, input_mask), self.compute_dtype)
        positions = tf.range(static_or_dynamic_shape(mask)[1])
        near = is_near(positions, positions, causal=True, window=self.window)
        return tf.where(near, mask, tf.zeros_like(mask))

    def compute_output_shape(self, input_shape: tuple) -> tuple:
        return (*input_shape, input_shape[-1])
