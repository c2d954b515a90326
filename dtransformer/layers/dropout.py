"""Dropout without state: masks are a function of a seed, the layer and the rank."""

import zlib
from collections.abc import Callable

import tensorflow as tf

from dtransformer.layers.base import Layer, check_rate, register
from dtransformer.parallel.custom_gradient import custom_gradient
from dtransformer.parallel.dropout_mask import kept_elements
from dtransformer.parallel.dropout_seed import current_dropout_seed, layer_number
from dtransformer.parallel.recompute import seed_after
from dtransformer.parallel.shapes import static_or_dynamic_shape


@register
class Dropout(Layer):
    """Set a random part of the inputs to zero and scale the others up.

    Inside `dropout_seed` the mask depends on that seed and on the layer's path
    only; outside of it, it is drawn from TensorFlow's global generator.

    Reference: Srivastava et al., 2014, "Dropout: a simple way to prevent neural
    networks from overfitting".

    Args:
        rate: the share that is set to zero, in [0, 1).

    Call arguments:
        inputs: tensor of any shape.
        training: whether to drop anything at all.

    Example:

    >>> Dropout(0.5)(tf.ones((2, 3)), training=False).shape
    TensorShape([2, 3])
    """

    def __init__(self, rate: float, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.rate = check_rate("rate", rate)

    @property
    def number(self) -> int:
        """What tells the layer's masks from those of others: a number made of its path."""
        return zlib.crc32(self.path.encode()) & 0x7FFFFFFF

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        drop = self.by_blocks(training)
        return inputs if drop is None else drop(inputs)

    def by_blocks(self, training: bool) -> Callable | None:
        """Return how to drop elements of one block after the other; None for nothing to drop.

        Returns:
            A function of a block, a tensor; its number, an int; and a tensor that is known before the
            mask is drawn, or None: else masks may be drawn, and kept, long before they are used.
        """
        if not training or self.rate == 0:
            return None
        seed, number = current_dropout_seed(), layer_number(self)

        def drop(x, block=0, known=None):
            own = seed if known is None else seed_after(seed, known)
            return _drop(x, self.rate, own, number, block)

        return drop

    def compute_output_shape(self, input_shape: tuple) -> tuple:
        return input_shape

    def get_config(self) -> dict:
        return {**super().get_config(), "rate": self.rate}


def _drop(x, rate, seed, number, block):
    @custom_gradient
    def drop(x):
        is_kept = kept_elements(static_or_dynamic_shape(x), rate, seed, number, block)
        scale = tf.cast(1 / (1 - rate), x.dtype)

        def mask(x):  # by a selection: the backward pass keeps a byte an element, not a number
            return tf.where(is_kept, x * scale, tf.zeros([], x.dtype))

        return mask(x), mask

    return drop(x)
