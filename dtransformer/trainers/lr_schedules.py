"""Learning-rate schedules with warm-up: functions of the step.

`step` is the number of updates done, `optimizer.iterations`: it is 0 for the
first update. Every schedule warms up as `peak * (step + 1) / warmup_steps`, so
that the first update already has a rate above 0 and the last one of the warm-up, step
`warmup_steps - 1`, has the peak. `warmup_steps=0` starts at the peak.
"""

import difflib
import inspect
import math

import keras
from keras import ops

from dtransformer.errors import InputError
from dtransformer.trainers.long_schedules import WarmupRestarts, WarmupStableDecay
from dtransformer.trainers.warmup import WarmupDecay, WarmupSchedule, as_float, count


@keras.saving.register_keras_serializable(package="dtransformer")
class WarmupInverseSquareRoot(WarmupSchedule):
    """Linear warm-up, then a decay with the inverse square root of the step.

    With n = step + 1 and w = max(warmup_steps, 1):

        learning rate = peak * min(n / w, sqrt(w / n))

    - step 0: `peak / w`;
    - step `w - 1`: the peak;
    - step `4 w - 1`: half the peak. The rate never reaches 0, so the length of
      the training need not be known.

    Reference: Vaswani et al., 2017, "Attention Is All You Need", section 5.3.

    Args:
        peak_learning_rate: the highest rate, greater than 0.
        warmup_steps: number of updates up to the peak, at least 0.

    Call arguments:
        step: integer or integer tensor, the number of updates done.

    Returns:
        A float32 tensor of the shape of `step`.

    Example:

    >>> schedule = WarmupInverseSquareRoot(peak_learning_rate=1.0, warmup_steps=4)
    >>> [float(schedule(step)) for step in (0, 1, 3, 15, 63)]
    [0.25, 0.5, 1.0, 0.5, 0.25]
    """

    @classmethod
    def from_model_size(cls, hidden_size: int, warmup_steps: int) -> "WarmupInverseSquareRoot":
        """Make the schedule as the paper writes it: h^-0.5 * min(n^-0.5, n * w^-1.5).

        The paper's base model has h = 512 and w = 4000, a peak of 0.0007.

        Args:
            hidden_size: the model's width h, at least 1.
            warmup_steps: number of updates up to the peak, at least 0.

        Example:

        >>> schedule = WarmupInverseSquareRoot.from_model_size(512, warmup_steps=4000)
        >>> print(f"{schedule.peak_learning_rate:.6f}")
        0.000699
        """
        hidden_size = count("hidden_size", hidden_size)
        if hidden_size == 0:
            raise InputError("hidden_size must be at least 1, received 0")
        steps = max(count("warmup_steps", warmup_steps), 1)
        return cls((hidden_size * steps) ** -0.5, warmup_steps)

    def __call__(self, step):
        step = as_float(step)
        warmup_steps = max(self.warmup_steps, 1)
        return self.peak_learning_rate * ops.minimum(
            (step + 1.0) / warmup_steps, ops.sqrt(warmup_steps / (step + 1.0))
        )


@keras.saving.register_keras_serializable(package="dtransformer")
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

    Call arguments:
        step: integer or integer tensor, the number of updates done.

    Returns:
        A float32 tensor of the shape of `step`.

    Example:

    >>> schedule = WarmupLinear(peak_learning_rate=1.0, warmup_steps=2, total_steps=10)
    >>> [float(schedule(step)) for step in (0, 1, 2, 6, 10, 99)]
    [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    """

    def __call__(self, step):
        step = as_float(step)
        return self.warmup(step) * self.between(1.0 - self.progress(step))


@keras.saving.register_keras_serializable(package="dtransformer")
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

    Call arguments:
        step: integer or integer tensor, the number of updates done.

    Returns:
        A float32 tensor of the shape of `step`.

    Example:

    >>> schedule = WarmupCosine(1.0, warmup_steps=2, total_steps=10, final_learning_rate=0.5)
    >>> [round(float(schedule(step)), 4) for step in (0, 1, 2, 4, 6, 10, 99)]
    [0.5, 1.0, 1.0, 0.9268, 0.75, 0.5, 0.5]
    """

    def __call__(self, step):
        step = as_float(step)
        factor = 0.5 * (1.0 + ops.cos(math.pi * self.progress(step)))
        return self.warmup(step) * self.between(factor)


@keras.saving.register_keras_serializable(package="dtransformer")
class WarmupConstant(WarmupSchedule):
    """Linear warm-up, then the peak for ever.

        learning rate = peak * min((step + 1) / warmup_steps, 1)

    - step 0: `peak / warmup_steps`, or the peak where `warmup_steps` is 0;
    - step `warmup_steps - 1` and later: the peak.

    Args:
        peak_learning_rate: the highest rate, greater than 0.
        warmup_steps: number of updates up to the peak, at least 0.

    Call arguments:
        step: integer or integer tensor, the number of updates done.

    Returns:
        A float32 tensor of the shape of `step`.

    Example:

    >>> schedule = WarmupConstant(peak_learning_rate=2.0, warmup_steps=4)
    >>> [float(schedule(step)) for step in (0, 1, 3, 4, 1000)]
    [0.5, 1.0, 2.0, 2.0, 2.0]
    """

    def __call__(self, step):
        return self.peak_learning_rate * self.warmup(as_float(step))


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
    if not isinstance(name, str) or name not in SCHEDULES:
        raise InputError(f"unknown learning-rate schedule {name!r}{_nearest(name, SCHEDULES)}")
    parameters = inspect.signature(SCHEDULES[name]).parameters
    for argument in kwargs:
        if argument not in parameters:
            raise InputError(
                f"the learning-rate schedule {name!r} has no argument {argument!r}"
                f"{_nearest(argument, parameters)}"
            )
    missing = [
        argument
        for argument, parameter in parameters.items()
        if parameter.default is parameter.empty and argument not in kwargs
    ]
    if missing:
        raise InputError(f"the learning-rate schedule {name!r} needs {', '.join(missing)}")
    return SCHEDULES[name](**kwargs)


def _nearest(name, known):
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f", did you mean {close[0]!r}?" if close else "."
    return f"{hint} Known: {', '.join(sorted(known))}"
