"""What each position may attend to."""

import tensorflow as tf

from dtransformer.layers.base import Layer, check_size, register
from dtransformer.parallel.shapes import static_or_dynamic_shape


def same_segment(queries: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
    """Return which keys are of the queries' segment: bool [b, s, t].

    Args:
        queries: tensor [b, s], the number of each position's segment, 0 for padding.
        keys: tensor [b, t], as the queries.
    """
    if keys.dtype.is_bool:
        return queries[:, :, None] & keys[:, None, :]
    return (queries[:, :, None] == keys[:, None, :]) & (keys[:, None, :] != 0)


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
        self.window = None if window is None else check_size("window", window)

    def call(self, input_mask: tf.Tensor) -> tf.Tensor:
        mask = tf.cast(same_segment(input_mask, input_mask), self.compute_dtype)
        length = static_or_dynamic_shape(mask)[1]
        positions = tf.range(length)
        is_seen = positions[:, None] >= positions[None, :]
        if self.window is not None:
            is_seen &= positions[:, None] < positions[None, :] + self.window
        return tf.where(is_seen, mask, tf.zeros_like(mask))

    def compute_output_shape(self, input_shape: tuple) -> tuple:
        return (*input_shape, input_shape[-1])

    def get_config(self) -> dict:
        return {**super().get_config(), "window": self.window}
