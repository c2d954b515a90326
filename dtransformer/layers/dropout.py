"""Dropout without state: masks are a function of a seed, the layer and the rank."""

import dataclasses

import tensorflow as tf

from dtransformer.layers.base import StreamLayer, check_rate, register
from dtransformer.parallel.ops.custom_gradient import custom_gradient, seed_after
from dtransformer.parallel.tracing.dropout_seed import (
    DrawsMasks,
    current_dropout_seed,
    kept_elements,
    layer_number,
)
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape


@register
class Dropout(DrawsMasks, StreamLayer):
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
        self.rate = check_rate("rate", rate)

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        masks = self.masks(training)
        return inputs if masks is None else masks.drop(inputs, masks.kept(inputs))

    def masks(self, training: bool) -> "DropoutMasks | None":
        """Return how to drop elements of inputs that come in parts; None for nothing to drop."""
        if not training or self.rate == 0:
            return None
        return DropoutMasks(self.rate, current_dropout_seed(), layer_number(self))


@dataclasses.dataclass(frozen=True)
class DropoutMasks:
    """The masks of a layer's parts, which may be drawn again.

    Args:
        rate: the share that is set to zero.
        seed: int tensor [2].
        number: the layer's number.
    """

    rate: float
    seed: tf.Tensor
    number: int | tf.Tensor

    def kept(
        self, x: tf.Tensor, part: int = 0, width: int | None = None, known: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Return which elements of a part are kept, a bool tensor.

        Args:
            x: tensor of the part's shape.
            part: its number.
            width: the part's last dimension; that of x by default.
            known: a tensor that is known before the mask is drawn; None for none: a mask may be
                drawn, and kept, long before it is used.
        """
        seed = self.seed if known is None else seed_after(self.seed, known)
        shape = static_or_dynamic_shape(x)
        if width is not None:
            shape = [*shape[:-1], width]
        return kept_elements(shape, self.rate, seed, self.number, part)

    def drop(self, x: tf.Tensor, is_kept: tf.Tensor) -> tf.Tensor:
        """Return x without what is not kept, the rest scaled up."""

        @custom_gradient
        def drop(x):
            scale = tf.cast(1 / (1 - self.rate), x.dtype)

            def mask(x):  # by a selection: the backward pass keeps a byte an element, not a number
                return tf.where(is_kept, x * scale, tf.zeros([], x.dtype))

            return mask(x), mask

        return drop(x)
