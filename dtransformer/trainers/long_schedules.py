"""Learning-rate schedules of long trainings: a stable rate with a decay at the end, and restarts."""

import math

import keras
from keras import ops

from dtransformer.errors import InputError
from dtransformer.trainers.warmup import WarmupDecay, as_float, count


@keras.saving.register_keras_serializable(package="dtransformer")
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

    Call arguments:
        step: integer or integer tensor, the number of updates done.

    Returns:
        A float32 tensor of the shape of `step`.

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
        most = self.total_steps - self.warmup_steps
        given = max(min(self.total_steps // 10, most), 1) if decay_steps is None else decay_steps
        self.decay_steps = count("decay_steps", given)
        if not 1 <= self.decay_steps <= most:
            raise InputError(
                f"decay_steps must be from 1 to the {most} steps after the warm-up, received "
                f"{decay_steps!r}"
            )
        if decay not in ("linear", "sqrt"):
            raise InputError(f"decay must be 'linear' or 'sqrt', received {decay!r}")
        self.decay = decay

    def __call__(self, step):
        step = as_float(step)
        done = ops.clip((step - (self.total_steps - self.decay_steps)) / self.decay_steps, 0.0, 1.0)
        done = ops.sqrt(done) if self.decay == "sqrt" else done
        return self.warmup(step) * self.between(1.0 - done)

    def get_config(self) -> dict:
        return {**super().get_config(), "decay_steps": self.decay_steps, "decay": self.decay}


@keras.saving.register_keras_serializable(package="dtransformer")
class WarmupRestarts(WarmupDecay):
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

    Call arguments:
        step: integer or integer tensor, the number of updates done.

    Returns:
        A float32 tensor of the shape of `step`.

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
        self.restarts = count("restarts", restarts)

    def __call__(self, step):
        step = as_float(step)
        done = self.progress(step)
        waves = done * (self.restarts + 1)
        place = ops.where(done >= 1.0, 1.0, waves - ops.floor(waves))
        return self.warmup(step) * self.between(0.5 * (1.0 + ops.cos(math.pi * place)))

    def get_config(self) -> dict:
        return {**super().get_config(), "restarts": self.restarts}
