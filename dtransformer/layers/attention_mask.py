"""Attention masks."""

import typing

import tensorflow as tf

from dtransformer import _compat
from dtransformer.errors import check_int
from dtransformer.layers.base import Layer, register
from dtransformer.parallel.ops.gpu_calls import INDEX_TYPE
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape


class Segments(typing.NamedTuple):
    """Mask of packed sequences: a position may attend only to positions of its sequence.

    Use it instead of a mask `[b, s, t]` for long sequences. Attention expands it one block at a
    time.

    Args:
        queries: Integer tensor of shape `[b, s]`, the segment id of each query, from 1, or 0 for
            padding. A boolean tensor marks the tokens of a single sequence.
        keys: Tensor of shape `[b, t]` like `queries`.
        prefix: Boolean tensor of shape `[b, t]`. All queries of a sequence may attend to its prefix
            keys, even with causal attention, as in a prefix language model
            ([Raffel et al., 2020](https://arxiv.org/abs/1910.10683), section 3.2.1). Defaults to
            `None`, no prefix.
    """

    queries: tf.Tensor
    keys: tf.Tensor
    prefix: tf.Tensor | None = None

    def block(self, queries: slice, keys: slice) -> "Segments":
        """Return the part of the mask for a slice of queries and a slice of keys."""
        prefix = None if self.prefix is None else self.prefix[:, keys]
        return Segments(self.queries[:, queries], self.keys[:, keys], prefix)


def same_segment(queries: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
    """Return a bool mask `[..., s, t]`, True where query and key have the same segment id.

    Padding (0) matches nothing.

    Args:
        queries: Integer tensor of shape `[..., s]`, segment ids, or a boolean tensor.
        keys: Tensor of shape `[..., t]` like `queries`.
    """
    # Indexing with `None` fails in DTensor if the queries are sharded.
    queries = tf.expand_dims(queries, -1)
    keys = tf.expand_dims(keys, -2)
    if keys.dtype.is_bool:
        return queries & keys
    if keys.dtype == "int32":
        queries = tf.cast(queries, INDEX_TYPE)
        keys = tf.cast(keys, INDEX_TYPE)
    return (queries == keys) & (keys != 0)


def mask_or_keras_mask(mask: tf.Tensor | Segments | None, x: tf.Tensor | None):
    """Return `mask`, or the Keras mask of `x` if `mask` is `None`."""
    return _compat.get_keras_mask(x) if mask is None else mask


def expand_mask(mask: tf.Tensor | Segments) -> tf.Tensor:
    """Return a mask as a bool tensor of shape `[b, n or 1, s or 1, t]`."""
    if isinstance(mask, Segments):
        mask = same_segment(mask.queries, mask.keys)
    mask = tf.cast(mask, "bool")
    if len(mask.shape) == 2:
        return mask[:, None, None, :]
    return mask[:, None, :, :] if len(mask.shape) == 3 else mask


def token_mask(mask: tf.Tensor | Segments | None) -> tf.Tensor | None:
    """Return a bool mask of the tokens, derived from a self-attention mask.

    In a mask `[b, s]` or `[b, 1, s]`, a token is a visible key. In a mask `[b, s, s]`, a token is a
    query that sees at least one key.

    Args:
        mask: Self-attention mask, see `attention`, or `None`.

    Returns:
        A bool tensor of shape `[b, s]`, or `None` without a mask.
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
    """Return a bool mask of the keys that queries can reach at their positions.

    Args:
        queries: Integer tensor of shape `[..., s]`, positions of the queries.
        keys: Integer tensor of shape `[t]`, positions of the keys.
        causal: Boolean, whether to hide later positions.
        window: Integer w. A query at position i sees keys j with i − w < j and, without causality,
            j < i + w ([Beltagy et al., 2020](https://arxiv.org/abs/2004.05150), section 3.1).
            `None` disables it.

    Returns:
        A bool tensor of shape `[..., s, t]`, or `None` if all keys are in reach.
    """
    queries = tf.cast(queries, INDEX_TYPE)
    keys = tf.cast(keys, INDEX_TYPE)
    queries = tf.expand_dims(queries, -1)
    keys = keys[None, :]
    near = queries >= keys if causal else None
    if window is not None:
        in_window = queries < keys + window
        if not causal:
            in_window &= keys < queries + window
        near = in_window if near is None else near & in_window
    return near


def allowed(mask: tf.Tensor | Segments | None, near: tf.Tensor | None) -> tf.Tensor | None:
    """Combine a mask with the keys in reach.

    Prefix keys in `Segments` are always in reach.

    Args:
        mask: Mask as in `attention`, or `None`.
        near: Bool tensor of shape `[s, t]` from `is_near`, or `None`.

    Returns:
        A bool tensor of shape `[b or 1, n or 1, s or 1, t]`, True where a query may attend, or
        `None` if nothing is masked.
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
    """Convert an input mask into a causal attention mask.

    Args:
        window: Integer. Number of visible positions: the query's and those before it
            ([Beltagy et al., 2020](https://arxiv.org/abs/2004.05150), section 3.1). `None` shows
            all earlier positions (default).

    Call arguments:
        input_mask: Tensor of shape `[b, s]`, 1 for tokens and 0 for padding; or the segment ids,
            from 1, of packed sequences.

    Output shape:
        `[b, s, s]`, in the compute type: 1 where position i may attend to position j ≤ i, and both
        are tokens of the same sequence.

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
