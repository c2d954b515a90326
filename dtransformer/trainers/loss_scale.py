"""The scale of the loss in float16, so that small gradients do not vanish.

Reference: Micikevicius et al., 2018, "Mixed Precision Training", arXiv 1710.03740, §3.2.
"""

import keras
import tensorflow as tf


class LossScale:
    """How a step is scaled, and skipped by all ranks where one of them overflows.

    Args:
        optimizer: a Keras optimizer. A `keras.optimizers.LossScaleOptimizer` keeps the
            scale, and says how it starts and after how many good steps it grows; with any
            other one the scale is 1, and no step is skipped.
    """

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.is_used = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        self.skipped_steps = tf.Variable(0, trainable=False, dtype="int64")

    def value(self):
        """Return the scale, a float32 scalar."""
        return tf.identity(tf.convert_to_tensor(self._optimizer.scale_loss(1.0), "float32"))

    def run(self, norm, update):
        """Call `update()`; where the scale is used only if the gradients are finite.

        Args:
            norm: norm of all gradients, equal on all ranks.
            update: a function without arguments; it changes the weights.
        """
        if not self.is_used:
            update()
            return
        scale, good_steps = self._optimizer.dynamic_scale.value, self._optimizer.step_counter.value

        def go_on():
            update()
            grows = good_steps + 1 >= self._optimizer.dynamic_growth_steps
            scale.assign(tf.where(grows, 2.0, 1.0) * scale)
            good_steps.assign(tf.where(grows, tf.zeros_like(good_steps), good_steps + 1))
            return tf.constant(0)

        def skip():
            scale.assign(0.5 * scale)
            good_steps.assign(tf.zeros_like(good_steps))
            self.skipped_steps.assign_add(1)
            return tf.constant(0)

        tf.cond(tf.math.is_finite(norm), go_on, skip)
