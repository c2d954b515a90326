"""Learning-rate schedules with warm-up: functions of the step.

`step` is the number of updates done, `optimizer.iterations`: it is 0 for the
first update. Every schedule warms up as `peak * (step + 1) / warmup_steps`, so
that the first update already has a rate above 0 and the last one of the warm-up, step
`warmup_steps - 1`, has the peak. `warmup_steps=0` starts at the peak. A schedule takes `step`
as an integer or an integer tensor, and returns a float32 tensor of its shape.
"""

import inspect
import math
import numbers

import keras
import tensorflow as tf
from keras import ops

from dtransformer.errors import InputError, check_int, nearest, refusing, shown

register = keras.saving.register_keras_serializable("dtransformer")


class WarmupSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """What the schedules share: two arguments and the linear rise; a subclass has `later(step)`."""

    def __init__(self, peak_learning_rate: float, warmup_steps: int):
        super().__init__()
        self.peak_learning_rate = rate("peak_learning_rate", peak_learning_rate)
        if self.peak_learning_rate == 0.0:
            raise InputError(
                f"peak_learning_rate must be greater than 0, received {peak_learning_rate!r}"
            )
        self.warmup_steps = check_int("warmup_steps", warmup_steps, 0)

    def warmup(self, step: tf.Tensor) -> tf.Tensor:
        """Return the factor of the peak: rising to 1 at step `warmup_steps - 1`, then 1."""
        return ops.minimum((step + 1.0) / max(self.warmup_steps, 1), 1.0)

    def later(self, step: tf.Tensor) -> tf.Tensor | float:
        """Return the rate of a step, float32, as it would be without the warm-up."""
        return self.peak_learning_rate

    def __call__(self, step):
        step = ops.cast(ops.convert_to_tensor(step), "float32")
        return self.warmup(step) * self.later(step)

    def get_config(self) -> dict:
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}


class WarmupDecay(WarmupSchedule):
    """A warm-up followed by a decay that ends at `total_steps`; a subclass has `left(done)`."""

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
                "total_steps counts the warm-up too and must be greater than warmup_steps, "
                f"received total_steps={total_steps!r} and warmup_steps={warmup_steps!r}"
            )
        if self.final_learning_rate > self.peak_learning_rate:
            raise InputError(
                "final_learning_rate must not exceed peak_learning_rate, received "
                f"final_learning_rate={final_learning_rate!r} and "
                f"peak_learning_rate={peak_learning_rate!r}"
            )

        self.decay_steps = self.total_steps - self.warmup_steps  # the last ones

    def left(self, done: tf.Tensor) -> tf.Tensor:
        """Return how much is left of what is between the peak and the final rate, from 1 to 0.

        Args:
            done: how much of the decay is done, from 0 to 1.
        """
        return 1.0 - done

    def later(self, step: tf.Tensor) -> tf.Tensor | float:
        begin = self.total_steps - self.decay_steps
        done = ops.clip((step - begin) / self.decay_steps, 0.0, 1.0)
        span = self.peak_learning_rate - self.final_learning_rate
        return self.final_learning_rate + span * self.left(done)


@register
class WarmupInverseSquareRoot(WarmupSchedule):
    """Linear warm-up, then a decay with the inverse square root of the step.

    With n = step + 1 and w = max(warmup_steps, 1):

        learning rate = peak * min(n / w, sqrt(w / n))

    - step 0: `peak / w`;
    - step `w - 1`: the peak;
    - step `4 w - 1`: half the peak. The rate never reaches 0, so the length of
      the training need not be known.

    Reference: Vaswani et al., 2017, "Attention Is All You Need", section 5.3, whose peak is
    (h w)^-0.5 for a model of width h: 0.0007 of the base model.

    Args:
        peak_learning_rate: the highest rate, greater than 0.
        warmup_steps: number of updates up to the peak, at least 0.

    Example:

    >>> schedule = WarmupInverseSquareRoot(peak_learning_rate=1.0, warmup_steps=4)
    >>> [float(schedule(step)) for step in (0, 1, 3, 15, 63)]
    [0.25, 0.5, 1.0, 0.5, 0.25]
    """

    def later(self, step: tf.Tensor) -> tf.Tensor | float:
        decay = ops.sqrt(max(self.warmup_steps, 1) / (step + 1.0))
        return self.peak_learning_rate * ops.minimum(decay, 1.0)


@register
class WarmupLinear(WarmupDecay):
    """Linear warm-up, then a straight line down to a final rate.

    With w = warmup_steps and T = total_steps:

        step < w:   peak * (step + 1) / w
        otherwise:  final + (peak - final) * (1 - p),  p = min((step - w) / (T - w), 1)

    - step 0: `peak / w`, or the peak where w is 0;
    - steps `w - 1` and `w`: the peak;
    - step `T - 1`, the last of T updates: still above the final rate;
    - step T and later: the final rate.

    Args:
        peak_learning_rate: the highest rate, greater than 0.
        warmup_steps: number of updates up to the peak, at least 0.
        total_steps: number of updates of the training, warm-up included; greater than
            `warmup_steps`.
        final_learning_rate: the lowest rate, from 0 to the peak.

    Example:

    >>> schedule = WarmupLinear(peak_learning_rate=1.0, warmup_steps=2, total_steps=10)
    >>> [float(schedule(step)) for step in (0, 1, 2, 6, 10, 99)]
    [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    """


@register
class WarmupCosine(WarmupDecay):
    """Linear warm-up, then half a cosine wave down to a final rate.

    With w = warmup_steps and T = total_steps:

        step < w:   peak * (step + 1) / w
        otherwise:  final + (peak - final) * (1 + cos(pi p)) / 2,
                    p = min((step - w) / (T - w), 1)

    - step 0: `peak / w`, or the peak where w is 0;
    - steps `w - 1` and `w`: the peak;
    - step `(w + T) / 2`: midway between the peak and the final rate;
    - step T and later: the final rate.

    Reference: Loshchilov and Hutter, 2017, "SGDR: Stochastic Gradient Descent
    with Warm Restarts", equation 5, without restarts.

    Args:
        peak_learning_rate: the highest rate, greater than 0.
        warmup_steps: number of updates up to the peak, at least 0.
        total_steps: number of updates of the training, warm-up included; greater than
            `warmup_steps`.
        final_learning_rate: the lowest rate, from 0 to the peak.

    Example:

    >>> schedule = WarmupCosine(1.0, warmup_steps=2, total_steps=10, final_learning_rate=0.5)
    >>> [round(float(schedule(step)), 4) for step in (0, 1, 2, 4, 6, 10, 99)]
    [0.5, 1.0, 1.0, 0.9268, 0.75, 0.5, 0.5]
    """

    restarts = 0

    def left(self, done: tf.Tensor) -> tf.Tensor:
        waves = done * (self.restarts + 1)
        place = ops.where(done >= 1.0, 1.0, waves - ops.floor(waves))
        return 0.5 * (1.0 + ops.cos(math.pi * place))


@register
class WarmupConstant(WarmupSchedule):
    """Linear warm-up, then the peak for ever.

        learning rate = peak * min((step + 1) / warmup_steps, 1)

    - step 0: `peak / warmup_steps`, or the peak where `warmup_steps` is 0;
    - step `warmup_steps - 1` and later: the peak.

    Args:
        peak_learning_rate: the highest rate, greater than 0.
        warmup_steps: number of updates up to the peak, at least 0.

    Example:

    >>> schedule = WarmupConstant(peak_learning_rate=2.0, warmup_steps=4)
    >>> [float(schedule(step)) for step in (0, 1, 3, 4, 1000)]
    [0.5, 1.0, 2.0, 2.0, 2.0]
    """


@register
class WarmupStableDecay(WarmupDecay):
    """Linear warm-up, the peak for most of the training, then a decay to a final rate at its end.

    With w = warmup_steps, T = total_steps and d = decay_steps:

        step < w:      peak * (step + 1) / w
        step < T - d:  peak
        otherwise:     final + (peak - final) * f(p),  p = min((step - (T - d)) / d, 1)

    where f(p) is 1 - p, or 1 - sqrt(p).

    Reference: Hu et al., 2024, "MiniCPM", arXiv 2404.06395, section 4; Hägele et al., 2024, "Scaling
    laws and compute-optimal training beyond fixed training durations", arXiv 2405.18392, on the root.

    Args:
        peak_learning_rate: the highest rate, greater than 0.
        warmup_steps: number of updates up to the peak, at least 0.
        total_steps: number of updates of the training, greater than `warmup_steps`.
        decay_steps: number of the last updates, in which the rate falls; a tenth of all by default.
        final_learning_rate: the lowest rate, from 0 to the peak.
        decay: `"linear"` or `"sqrt"`.

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
        most = self.decay_steps
        given = max(min(self.total_steps // 10, most), 1) if decay_steps is None else decay_steps
        self.decay_steps = check_int("decay_steps", given, 0)
        if not 1 <= self.decay_steps <= most:
            raise InputError(
                f"decay_steps must be from 1 to the {most} steps after the warm-up, received "
                f"{decay_steps!r}"
            )
        if decay not in ("linear", "sqrt"):
            raise InputError(f"decay must be 'linear' or 'sqrt', received {decay!r}")
        self.decay = decay

    def left(self, done: tf.Tensor) -> tf.Tensor:
        return 1.0 - (ops.sqrt(done) if self.decay == "sqrt" else done)


@register
class WarmupRestarts(WarmupCosine):
    """Linear warm-up, then several half cosine waves of the same length, each from the peak down.

    With w = warmup_steps, T = total_steps and n = restarts + 1 waves:

        step < w:   peak * (step + 1) / w
        otherwise:  final + (peak - final) * (1 + cos(pi q)) / 2,
                    q = the fraction of n (step - w) / (T - w); 1 from T on

    Reference: Loshchilov and Hutter, 2017, "SGDR: Stochastic Gradient Descent with Warm Restarts".

    Args:
        peak_learning_rate: the highest rate, greater than 0.
        warmup_steps: number of updates up to the peak, at least 0.
        total_steps: number of updates of the training, greater than `warmup_steps`.
        restarts: how often the wave begins anew, at least 0.
        final_learning_rate: the lowest rate, from 0 to the peak.

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
    """Make a schedule from the name and the arguments that a config file holds.

    Args:
        name: `"constant"`, `"cosine"`, `"inverse_sqrt"`, `"linear"`, `"restarts"` or `"wsd"`.
        **kwargs: the arguments of that schedule.

    Raises:
        InputError: the name or an argument is unknown, missing or wrong; says what there is.

    Example:

    >>> schedule = get("linear", peak_learning_rate=0.5, warmup_steps=0, total_steps=10)
    >>> float(schedule(5))
    0.25
    """
    if name not in SCHEDULES:
        raise InputError(
            f"unknown learning-rate schedule {shown(name)}: {nearest(name, SCHEDULES)}"
        )
    signature = inspect.signature(SCHEDULES[name])
    with refusing(f"the learning-rate schedule {name!r} takes {', '.join(signature.parameters)}"):
        signature.bind(**kwargs)
    return SCHEDULES[name](**kwargs)


def rate(name: str, value: object) -> float:
    """Return a rate, checked: finite, at least 0."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise InputError(f"{name} must be a finite number, at least 0, received {value!r}")
    return value
