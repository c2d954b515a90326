"""Learning-rate schedules with linear warmup.

`step` is the number of completed updates, `optimizer.iterations`, so it is 0 in the first update.
Every schedule warms up as `peak * (step + 1) / warmup_steps`: the first update already has a rate
above 0, and the last step of the warmup, `warmup_steps - 1`, has the peak. `warmup_steps=0` starts
at the peak. A schedule takes `step` as an integer or an integer tensor and returns a float32 tensor
of the same shape.
"""

import inspect
import math
import numbers

import keras
import tensorflow as tf
from keras import ops

from dtransformer.errors import InputError, check_int, raise_as_input_error, short_repr, suggest

register = keras.saving.register_keras_serializable("dtransformer")


class WarmupSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Base class of schedules with linear warmup.

    Subclasses override `after_warmup(step)`.
    """

    def __init__(self, peak_learning_rate: float, warmup_steps: int):
        super().__init__()
        self.peak_learning_rate = rate("peak_learning_rate", peak_learning_rate)
        if self.peak_learning_rate == 0.0:
            raise InputError(
                f"`peak_learning_rate` must be greater than 0, received {peak_learning_rate!r}."
            )
        self.warmup_steps = check_int("warmup_steps", warmup_steps, 0)

    def warmup(self, step: tf.Tensor) -> tf.Tensor:
        """Return the warmup factor: it rises to 1 at step `warmup_steps - 1` and stays there."""
        return ops.minimum((step + 1.0) / max(self.warmup_steps, 1), 1.0)

    def after_warmup(self, step: tf.Tensor) -> tf.Tensor | float:
        """Return the learning rate of a float32 step without the warmup factor."""
        return self.peak_learning_rate

    def __call__(self, step):
        step = ops.cast(ops.convert_to_tensor(step), "float32")
        return self.warmup(step) * self.after_warmup(step)

    def get_config(self) -> dict:
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}


class WarmupDecay(WarmupSchedule):
    """Base class of schedules that decay to a final rate at step `total_steps`.

    Subclasses override `decay_curve(done)`.
    """

    def __init__(
        self,
        peak_learning_rate: float,
        warmup_steps: int,
        total_steps: int,
        final_learning_rate: float = 0.0,
    ):
        super().__init__(peak_learning_rate, warmup_steps)
        self.total_steps = check_int("total_steps", total_steps, 0)
        self.final_learning_rate = rate("final_learning_rate", final_learning_rate)
        if self.total_steps <= self.warmup_steps:
            raise InputError(
                f"`total_steps={total_steps!r}` must be greater than "
                f"`warmup_steps={warmup_steps!r}`, because it includes the warmup."
            )
        if self.final_learning_rate > self.peak_learning_rate:
            raise InputError(
                f"`final_learning_rate={final_learning_rate!r}` must not exceed "
                f"`peak_learning_rate={peak_learning_rate!r}`."
            )

        # The decay covers the last steps.
        self.decay_steps = self.total_steps - self.warmup_steps

    def decay_curve(self, done: tf.Tensor) -> tf.Tensor:
        """Return the decay curve, which falls from 1 (peak rate) to 0 (final rate).

        Args:
            done: Float tensor from 0 to 1. Completed fraction of the decay.
        """
        return 1.0 - done

    def after_warmup(self, step: tf.Tensor) -> tf.Tensor | float:
        decay_start = self.total_steps - self.decay_steps
        done = ops.clip((step - decay_start) / self.decay_steps, 0.0, 1.0)
        span = self.peak_learning_rate - self.final_learning_rate
        return self.final_learning_rate + span * self.decay_curve(done)


@register
class WarmupInverseSquareRoot(WarmupSchedule):
    """Linear warmup, followed by decay with the inverse square root of the step.

    With n = step + 1 and w = max(warmup_steps, 1):

        learning rate = peak * min(n / w, sqrt(w / n))

    - Step 0: `peak / w`.
    - Step `w - 1`: the peak.
    - Step `4 w - 1`: half the peak. The rate never reaches 0, so the schedule does not depend on
      the length of the training.

    Reference:
        [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), "Attention Is All You Need",
        section 5.3. The peak there is (h w)^-0.5 for a model of width h: 0.0007 for the base model.

    Args:
        peak_learning_rate: Float greater than 0. The highest rate.
        warmup_steps: Non-negative integer. Number of updates up to the peak.

    Example:

    >>> schedule = WarmupInverseSquareRoot(peak_learning_rate=1.0, warmup_steps=4)
    >>> [float(schedule(step)) for step in (0, 1, 3, 15, 63)]
    [0.25, 0.5, 1.0, 0.5, 0.25]
    """

    def after_warmup(self, step: tf.Tensor) -> tf.Tensor | float:
        decay = ops.sqrt(max(self.warmup_steps, 1) / (step + 1.0))
        return self.peak_learning_rate * ops.minimum(decay, 1.0)


@register
class WarmupLinear(WarmupDecay):
    """Linear warmup, followed by linear decay to a final rate.

    With w = warmup_steps and T = total_steps:

        step < w:   peak * (step + 1) / w
        otherwise:  final + (peak - final) * (1 - p),  p = min((step - w) / (T - w), 1)

    - Step 0: `peak / w`, or the peak if w is 0.
    - Steps `w - 1` and `w`: the peak.
    - Step `T - 1`, the last of T updates: slightly above the final rate.
    - Step T and later: the final rate.

    Args:
        peak_learning_rate: Float greater than 0. The highest rate.
        warmup_steps: Non-negative integer. Number of updates up to the peak.
        total_steps: Integer greater than `warmup_steps`. Number of updates of the training,
            including the warmup.
        final_learning_rate: Float from 0 to the peak. The lowest rate. Defaults to `0.0`.

    Example:

    >>> schedule = WarmupLinear(peak_learning_rate=1.0, warmup_steps=2, total_steps=10)
    >>> [float(schedule(step)) for step in (0, 1, 2, 6, 10, 99)]
    [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    """


@register
class WarmupCosine(WarmupDecay):
    """Linear warmup, followed by cosine decay to a final rate.

    With w = warmup_steps and T = total_steps:

        step < w:   peak * (step + 1) / w
        otherwise:  final + (peak - final) * (1 + cos(pi p)) / 2,
                    p = min((step - w) / (T - w), 1)

    - Step 0: `peak / w`, or the peak if w is 0.
    - Steps `w - 1` and `w`: the peak.
    - Step `(w + T) / 2`: halfway between the peak and the final rate.
    - Step T and later: the final rate.

    Reference:
        [Loshchilov and Hutter, 2017](https://arxiv.org/abs/1608.03983), "SGDR: Stochastic Gradient
        Descent with Warm Restarts", equation 5, without restarts

    Args:
        peak_learning_rate: Float greater than 0. The highest rate.
        warmup_steps: Non-negative integer. Number of updates up to the peak.
        total_steps: Integer greater than `warmup_steps`. Number of updates of the training,
            including the warmup.
        final_learning_rate: Float from 0 to the peak. The lowest rate. Defaults to `0.0`.

    Example:

    >>> schedule = WarmupCosine(1.0, warmup_steps=2, total_steps=10, final_learning_rate=0.5)
    >>> [round(float(schedule(step)), 4) for step in (0, 1, 2, 4, 6, 10, 99)]
    [0.5, 1.0, 1.0, 0.9268, 0.75, 0.5, 0.5]
    """

    restarts = 0

    def decay_curve(self, done: tf.Tensor) -> tf.Tensor:
        waves = done * (self.restarts + 1)
        fraction = ops.where(done >= 1.0, 1.0, waves - ops.floor(waves))
        return 0.5 * (1.0 + ops.cos(math.pi * fraction))


@register
class WarmupConstant(WarmupSchedule):
    """Linear warmup, followed by a constant rate.

        learning rate = peak * min((step + 1) / warmup_steps, 1)

    - Step 0: `peak / warmup_steps`, or the peak if `warmup_steps` is 0.
    - Step `warmup_steps - 1` and later: the peak.

    Args:
        peak_learning_rate: Float greater than 0. The highest rate.
        warmup_steps: Non-negative integer. Number of updates up to the peak.

    Example:

    >>> schedule = WarmupConstant(peak_learning_rate=2.0, warmup_steps=4)
    >>> [float(schedule(step)) for step in (0, 1, 3, 4, 1000)]
    [0.5, 1.0, 2.0, 2.0, 2.0]
    """


@register
class WarmupStableDecay(WarmupDecay):
    """Linear warmup, a constant rate for most of the training, and a decay at its end.

    With w = warmup_steps, T = total_steps and d = decay_steps:

        step < w:      peak * (step + 1) / w
        step < T - d:  peak
        otherwise:     final + (peak - final) * f(p),  p = min((step - (T - d)) / d, 1)

    where f(p) is 1 - p for linear decay and 1 - sqrt(p) for square-root decay.

    Reference:
        [Hu et al., 2024](https://arxiv.org/abs/2404.06395), "MiniCPM", section 4, and
        [Hägele et al., 2024](https://arxiv.org/abs/2405.18392), "Scaling Laws and Compute-Optimal
        Training Beyond Fixed Training Durations", for the square-root decay

    Args:
        peak_learning_rate: Float greater than 0. The highest rate.
        warmup_steps: Non-negative integer. Number of updates up to the peak.
        total_steps: Integer greater than `warmup_steps`. Number of updates of the training.
        decay_steps: Integer from 1 to `total_steps - warmup_steps`. Length of the decay, in
            updates. Defaults to a tenth of `total_steps`.
        final_learning_rate: Float from 0 to the peak. The lowest rate. Defaults to `0.0`.
        decay: `"linear"` or `"sqrt"`. Defaults to `"linear"`.

    Example:

    >>> schedule = WarmupStableDecay(1.0, warmup_steps=2, total_steps=10, decay_steps=4)
    >>> [float(schedule(step)) for step in (0, 1, 5, 6, 8, 10, 99)]
    [0.5, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0]
    """

    def __init__(
        self,
        peak_learning_rate: float,
        warmup_steps: int,
        total_steps: int,
        decay_steps: int | None = None,
        final_learning_rate: float = 0.0,
        decay: str = "linear",
    ):
        super().__init__(peak_learning_rate, warmup_steps, total_steps, final_learning_rate)
        max_steps = self.decay_steps
        if decay_steps is None:
            decay_steps = max(min(self.total_steps // 10, max_steps), 1)
        self.decay_steps = check_int("decay_steps", decay_steps, 0)
        if not 1 <= self.decay_steps <= max_steps:
            raise InputError(
                f"`decay_steps` must be from 1 to {max_steps}, the number of steps after the "
                f"warmup, received {decay_steps!r}."
            )
        if decay not in ("linear", "sqrt"):
            raise InputError(f"`decay` must be 'linear' or 'sqrt', received {decay!r}.")
        self.decay = decay

    def decay_curve(self, done: tf.Tensor) -> tf.Tensor:
        return 1.0 - (ops.sqrt(done) if self.decay == "sqrt" else done)


@register
class WarmupRestarts(WarmupCosine):
    """Linear warmup, followed by cosine decays of equal length, each from the peak.

    With w = warmup_steps, T = total_steps and n = restarts + 1 decays:

        step < w:   peak * (step + 1) / w
        otherwise:  final + (peak - final) * (1 + cos(pi q)) / 2,
                    q = fractional part of n (step - w) / (T - w), or 1 from step T

    Reference:
        [Loshchilov and Hutter, 2017](https://arxiv.org/abs/1608.03983), "SGDR: Stochastic Gradient
        Descent with Warm Restarts"

    Args:
        peak_learning_rate: Float greater than 0. The highest rate.
        warmup_steps: Non-negative integer. Number of updates up to the peak.
        total_steps: Integer greater than `warmup_steps`. Number of updates of the training.
        restarts: Non-negative integer. Number of times that the rate returns to the peak. Defaults
            to `1`.
        final_learning_rate: Float from 0 to the peak. The lowest rate. Defaults to `0.0`.

    Example:

    >>> schedule = WarmupRestarts(1.0, warmup_steps=0, total_steps=8, restarts=1)
    >>> [round(float(schedule(step)), 4) for step in (0, 2, 3, 4, 6, 8, 99)]
    [1.0, 0.5, 0.1464, 1.0, 0.5, 0.0, 0.0]
    """

    def __init__(
        self,
        peak_learning_rate: float,
        warmup_steps: int,
        total_steps: int,
        restarts: int = 1,
        final_learning_rate: float = 0.0,
    ):
        super().__init__(peak_learning_rate, warmup_steps, total_steps, final_learning_rate)
        self.restarts = check_int("restarts", restarts, 0)


SCHEDULES = {
    "constant": WarmupConstant,
    "cosine": WarmupCosine,
    "inverse_sqrt": WarmupInverseSquareRoot,
    "linear": WarmupLinear,
    "restarts": WarmupRestarts,
    "wsd": WarmupStableDecay,
}


def get(name: str, **kwargs) -> keras.optimizers.schedules.LearningRateSchedule:
    """Return the learning-rate schedule with a name, as in config files.

    Args:
        name: `"constant"`, `"cosine"`, `"inverse_sqrt"`, `"linear"`, `"restarts"` or `"wsd"`.
        **kwargs: Arguments of the schedule.

    Raises:
        InputError: If the name is unknown, or if an argument is unknown, missing or invalid.

    Example:

    >>> schedule = get("linear", peak_learning_rate=0.5, warmup_steps=0, total_steps=10)
    >>> float(schedule(5))
    0.25
    """
    if name not in SCHEDULES:
        raise InputError(
            f"Unknown learning-rate schedule {short_repr(name)}: {suggest(name, SCHEDULES)}"
        )
    signature = inspect.signature(SCHEDULES[name])
    with raise_as_input_error(
        f"The learning-rate schedule {name!r} takes {', '.join(signature.parameters)}"
    ):
        signature.bind(**kwargs)
    return SCHEDULES[name](**kwargs)


def rate(name: str, value: object) -> float:
    """Return a learning rate after checking that it is finite and at least 0.

    Raises:
        InputError: If it is not. The error quotes `name`.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise InputError(f"`{name}` must be a finite number of at least 0, received {value!r}.")
    return value
