"""Adam's update of a weight as one operation."""

import keras
import tensorflow as tf

from dtransformer import _compat


def is_adam(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether `AdamStep` computes an optimizer's update.

    This holds for `Adam` and `AdamW` without `amsgrad`, and for subclasses with the same update step.
    """
    update_step = type(optimizer).update_step
    return update_step is keras.optimizers.Adam.update_step and not optimizer.amsgrad


class AdamStep:
    """Replacement of `keras.optimizers.Adam.update_step` with one operation per float32 variable.

    Keras' method creates about 20 operations per weight. Powers of `beta_1` and `beta_2` are shared.

    Args:
        optimizer: Built Keras optimizer, see `is_adam`.

    Call arguments:
        gradient: Tensor.
        parameter: `ParameterProxy`.
        learning_rate: Scalar tensor.
    """

    def __init__(self, optimizer):
        self._optimizer = optimizer
        step = tf.cast(optimizer.iterations + 1, "float32")
        self._beta_1 = tf.constant(optimizer.beta_1, "float32")
        self._beta_2 = tf.constant(optimizer.beta_2, "float32")
        self._epsilon = tf.constant(optimizer.epsilon, "float32")
        self._beta_1_power = tf.pow(self._beta_1, step)
        self._beta_2_power = tf.pow(self._beta_2, step)

    def __call__(self, gradient, parameter, learning_rate):
        moments = _compat.adam_moments(self._optimizer, parameter)
        values = [parameter.bound, *(moment.value for moment in moments)]
        if any(value.dtype != tf.float32 for value in values):
            type(self._optimizer).update_step(self._optimizer, gradient, parameter, learning_rate)
            return
        gradient = tf.cast(gradient, "float32")
        rate = tf.cast(learning_rate, "float32")
        if all(isinstance(value, tf.Variable) for value in values):
            self._update_variables(gradient, rate, *(value.handle for value in values))
        else:
            self._update(gradient, rate, parameter, *values[1:])

    def _update_variables(self, gradient, rate, variable, first, second):
        tf.raw_ops.ResourceApplyAdam(
            var=variable,
            m=first,
            v=second,
            beta1_power=self._beta_1_power,
            beta2_power=self._beta_2_power,
            lr=rate,
            beta1=self._beta_1,
            beta2=self._beta_2,
            epsilon=self._epsilon,
            grad=gradient,
            use_locking=True,
        )

    def _update(self, gradient, rate, parameter, first, second):
        """Compute the same update for a value or a moment that is a tensor."""
        first.assign_add((gradient - first) * (1.0 - self._beta_1))
        second.assign_add((tf.square(gradient) - second) * (1.0 - self._beta_2))
        rate *= tf.sqrt(1.0 - self._beta_2_power) / (1.0 - self._beta_1_power)
        parameter.assign_sub(first * rate / (tf.sqrt(second) + self._epsilon))
