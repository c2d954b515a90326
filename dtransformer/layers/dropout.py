"""Stateless dropout: masks are a function of a seed, the layer and the row of the batch."""

import dataclasses

import tensorflow as tf

from dtransformer.layers.base import StreamLayer, check_rate, register
from dtransformer.parallel.mesh.random_numbers import kept_elements
from dtransformer.parallel.ops.custom_gradient import custom_gradient, delay_seed
from dtransformer.parallel.tracing.dropout_seed import (
    RandomLayer,
    current_dropout_seed,
    current_random_id,
)
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape


@register
class Dropout(RandomLayer, StreamLayer):
    """Set a random fraction of the inputs to zero and scale up the rest.

    Inside `dropout_seed` the mask of a row depends only on that seed, the layer's path and the index
    of the row in the global batch, so it is the same on every layout. Outside of it, the seed is
    drawn from TensorFlow's global generator.

    Reference: Srivastava et al., 2014, "Dropout: a simple way to prevent neural networks from
    overfitting"

    Args:
        rate: Float in [0, 1). Fraction of elements to drop.

    Call arguments:
        inputs: Tensor of any shape. The first dimension is the rows of a batch.
        training: Boolean, whether to apply dropout. Defaults to `False`.

    Output shape:
        Same as the inputs.

    Example:

    >>> Dropout(0.5)(tf.ones((2, 3)), training=False).shape
    TensorShape([2, 3])
    """

    def __init__(self, rate: float, **kwargs):
        super().__init__(**kwargs)
        self.rate = check_rate("rate", rate)

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        masks = self.masks(training)
        if masks is None:
            return inputs
        mask = masks.draw_mask(static_or_dynamic_shape(inputs))
        return masks.drop(inputs, mask)

    def masks(self, training: bool) -> "DropoutMasks | None":
        """Return the masks for inputs that are computed in parts, or `None` without dropout."""
        if not training or self.rate == 0:
            return None
        return DropoutMasks(self.rate, current_dropout_seed(), current_random_id(self))


@dataclasses.dataclass(frozen=True)
class DropoutMasks:
    """Dropout masks of the parts of a layer's input. Equal arguments give equal masks.

    Args:
        rate: Float. Fraction of elements to drop.
        seed: Integer tensor, see `dropout_seed`.
        random_id: Integer that identifies the layer.
    """

    rate: float
    seed: tf.Tensor
    random_id: int | tf.Tensor

    def after(self, tensor: tf.Tensor) -> "DropoutMasks":
        """Return equal masks that are drawn after the computation of a tensor.

        Without this dependency TensorFlow may draw a mask, and store it, long before its use.

        Args:
            tensor: Tensor that must be computed before the masks.
        """
        return dataclasses.replace(self, seed=delay_seed(self.seed, tensor))

    def draw_mask(self, shape: list, part: int = 0) -> tf.Tensor:
        """Return a boolean mask of the elements to keep.

        Args:
            shape: List of the part's dimensions, integers or scalar tensors. The first one is the
                rows of a batch.
            part: Integer. Index of the part. Defaults to `0`.
        """
        return kept_elements(shape, self.rate, self.seed, self.random_id, part)

    def drop(self, x: tf.Tensor, is_kept: tf.Tensor) -> tf.Tensor:
        """Return x with dropped elements set to 0 and the others scaled by 1 / (1 − rate).

        Args:
            x: Floating-point tensor.
            is_kept: Mask from `draw_mask`.
        """

        @custom_gradient
        def drop(x):
            scale = tf.cast(1 / (1 - self.rate), x.dtype)

            # A selection stores one byte per element for the backward pass, a product one float.
            def mask(x):
                return tf.where(is_kept, x * scale, tf.zeros([], x.dtype))

            return mask(x), mask

        return drop(x)
