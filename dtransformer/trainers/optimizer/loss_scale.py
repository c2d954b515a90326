"""Loss scale of float16 training."""

import keras
import tensorflow as tf


class LossScale:
    """Loss scale of an optimizer. All ranks skip steps with an overflow on any rank.

    A `keras.optimizers.LossScaleOptimizer` stores a dynamic scale, its initial value and the
    number of finite steps after which the scale doubles. An overflow halves the scale. Other
    optimizers have a constant scale, `loss_scale_factor` or 1, and never skip a step.

    Args:
        optimizer: Keras optimizer.

    Attributes:
        is_used: Boolean. Whether the scale is dynamic.
        skipped_steps: Int64 scalar variable. Number of skipped steps.
        skipped_in_a_row: Int64 scalar variable. Number of skipped steps since the last update.

    Reference:
        [Micikevicius et al., 2018, §3.2](https://arxiv.org/abs/1710.03740)
    """

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.is_used = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        self.skipped_steps = tf.Variable(0, trainable=False, dtype="int64")
        self.skipped_in_a_row = tf.Variable(0, trainable=False, dtype="int64")

    def value(self):
        """Return the scale, a float32 scalar."""
        return tf.identity(tf.convert_to_tensor(self._optimizer.scale_loss(1.0), "float32"))

    def unscale(self, gradients):
        """Return a list of gradients divided by the scale, if the optimizer has one."""
        if not self.is_used and self._optimizer.loss_scale_factor is None:
            return gradients
        scale = self.value()
        return [gradient / scale for gradient in gradients]

    def run(self, norm, update):
        """Call `update()` and adapt a dynamic scale. Skip the update if `norm` is not finite.

        Args:
            norm: Float scalar tensor. Global gradient norm, equal on all ranks.
            update: Function without arguments that changes the weights.
        """
        if not self.is_used:
            update()
            return
        is_finite = tf.math.is_finite(norm)

        def update_weights():
            update()
            return is_finite

        tf.cond(is_finite, update_weights, lambda: is_finite)
        self._adapt(is_finite)

    def _adapt(self, is_finite):
        scale = self._optimizer.dynamic_scale.value
        finite_steps = self._optimizer.step_counter.value
        skipped = tf.cast(~is_finite, "int64")
        count = (1 - skipped) * (finite_steps + 1)
        grows = count >= self._optimizer.dynamic_growth_steps
        scale.assign(tf.where(is_finite, tf.where(grows, 2.0, 1.0), 0.5) * scale)
        finite_steps.assign(tf.where(grows, tf.zeros_like(count), count))
        self.skipped_steps.assign_add(skipped)
        self.skipped_in_a_row.assign(skipped * (self.skipped_in_a_row + 1))
