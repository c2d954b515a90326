"""Warm-ups: what learning-rate schedules share, and the checks of their arguments."""

import math
import numbers

import keras
import tensorflow as tf
from keras import ops

from dtransformer.errors import InputError


class WarmupSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """What the schedules share: two arguments and the linear rise."""

    def __init__(self, peak_learning_rate: float, warmup_steps: int):
        super().__init__()
        self.peak_learning_rate = rate("peak_learning_rate", peak_learning_rate)
        if self.peak_learning_rate == 0.0:
            raise InputError(
                f"peak_learning_rate must be greater than 0, received {peak_learning_rate!r}"
            )
        self.warmup_steps = count("warmup_steps", warmup_steps)

    def warmup(self, step: tf.Tensor) -> tf.Tensor:
        """Return the factor of the peak: rising to 1 at step `warmup_steps - 1`, then 1."""
        return ops.minimum((step + 1.0) / max(self.warmup_steps, 1), 1.0)

    def get_config(self) -> dict:
        return {"peak_learning_rate": self.peak_learning_rate, "warmup_steps": self.warmup_steps}


class WarmupDecay(WarmupSchedule):
    """A warm-up followed by a decay that ends at `total_steps`."""

    def __init__(
        self,
        peak_learning_rate: float,
        warmup_steps: int,
        total_steps: int,
        final_learning_rate: float = 0.0,
    ):
        super().__init__(peak_learning_rate, warmup_steps)
        self.total_steps = count("total_steps", total_steps)
        self.final_learning_rate = rate("final_learning_rate", final_learning_rate)
        if self.total_steps <= self.warmup_steps:
            raise InputError(
                "total_steps counts the warm-up too and must be greater than warmup_steps, "
                f"received total_steps={total_steps!r} and warmup_steps={warmup_steps!r}"
            )
        if self.final_learning_rate > self.peak_learning_rate:
            raise InputError(
                "final_learning_rate must not exceed peak_learning_rate, received "
                f"final_learning_rate={final_learning_rate!r} and "
                f"peak_learning_rate={peak_learning_rate!r}"
            )

    def progress(self, step: tf.Tensor) -> tf.Tensor:
        """Return how much of the decay is done: 0 up to `warmup_steps`, 1 from `total_steps`."""
        done = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return ops.clip(done, 0.0, 1.0)

    def between(self, factor: tf.Tensor) -> tf.Tensor:
        """Return the final rate where `factor` is 0, the peak where it is 1."""
        span = self.peak_learning_rate - self.final_learning_rate
        return self.final_learning_rate + span * factor

    def get_config(self) -> dict:
        return {
            **super().get_config(),
            "total_steps": self.total_steps,
            "final_learning_rate": self.final_learning_rate,
        }


def as_float(step: tf.Tensor | int) -> tf.Tensor:
    """Return a step as a float32 tensor."""
    return ops.cast(ops.convert_to_tensor(step), "float32")


def rate(name: str, value: object) -> float:
    """Return a rate, checked: finite, at least 0."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise InputError(f"{name} must be a finite number, at least 0, received {value!r}")
    return float(value)


def count(name: str, value: object) -> int:
    """Return a number of steps, checked: an integer of at least 0."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 0:
        raise InputError(f"{name} must be an integer, at least 0, received {value!r}")
    return int(value)
