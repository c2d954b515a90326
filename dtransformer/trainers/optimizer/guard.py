"""Guard against gradient spikes: skip steps with an unusual gradient norm, and stop after several."""

import dataclasses
import sys

import keras
import tensorflow as tf

from dtransformer.errors import check_int
from dtransformer.parallel.runtime import job

# Steps before the median is known well enough.
_MIN_HISTORY = 16
_WINDOW = 128


@dataclasses.dataclass(frozen=True)
class SpikeGuard:
    """Skip steps with a gradient spike, for `Trainer.compile`. All ranks skip the same steps.

    A step is skipped if the global gradient norm is not finite, or if it exceeds `factor` times the
    median of the last 128 accepted steps. The first 16 steps are accepted. A skipped step changes
    neither the weights nor the optimizer's states. Training stops after `stop_after` skipped steps
    in a row, with the weights from before these steps, and `ModelCheckpoint` saves them.

    The logs contain `skipped_spikes`, the number of skipped steps, and `spikes_in_a_row`.

    Args:
        factor: Float above 1. Defaults to `8.0`.
        stop_after: Integer. Skipped steps in a row until training stops. Defaults to `5`.

    Raises:
        ValueError: If `factor` is not above 1, or `stop_after` is not positive.

    Example:

    >>> SpikeGuard(factor=4.0)
    SpikeGuard(factor=4.0, stop_after=5)
    """

    factor: float = 8.0
    stop_after: int = 5

    def __post_init__(self):
        check_int("stop_after", self.stop_after)
        if not self.factor > 1:
            raise ValueError(f"`factor` must be above 1, got {self.factor!r}.")


class StepGuard:
    """Decision for every step whether it is skipped, on the device.

    Args:
        options: `SpikeGuard`.
        allows_overflow: Boolean. Whether a dynamic loss scale handles norms that are not finite.

    Attributes:
        norms: Float32 variable [128], the gradient norms of accepted steps in a ring.
        num_accepted: Int64 scalar variable. Number of accepted steps.
        num_skipped: Int64 scalar variable. Number of skipped steps.
        in_a_row: Int64 scalar variable. Number of skipped steps since the last accepted one.
    """

    def __init__(self, options, allows_overflow):
        self._options = options
        self._allows_overflow = allows_overflow
        self.norms = tf.Variable(tf.zeros([_WINDOW]), trainable=False)
        self.num_accepted = tf.Variable(0, trainable=False, dtype="int64")
        self.num_skipped = tf.Variable(0, trainable=False, dtype="int64")
        self.in_a_row = tf.Variable(0, trainable=False, dtype="int64")

    @property
    def variables(self):
        """Dict of the variables by name, for checkpoints."""
        names = ("norms", "num_accepted", "num_skipped", "in_a_row")
        return {name: getattr(self, name) for name in names}

    def run(self, norm, update):
        """Call `update()` unless the norm is a spike or not finite.

        Args:
            norm: Float scalar tensor. Global gradient norm, equal on all ranks.
            update: Function without arguments that changes the weights.
        """
        is_finite = tf.math.is_finite(norm)
        is_spike = is_finite & (norm > self._limit())
        is_accepted = ~is_spike if self._allows_overflow else is_finite & ~is_spike

        def accept():
            update()
            return is_accepted

        tf.cond(is_accepted, accept, lambda: is_accepted)
        self._record(norm, is_accepted & is_finite, is_accepted)

    def _limit(self):
        """Return the largest accepted norm, infinite during the first steps."""
        size = tf.minimum(self.num_accepted, _WINDOW)
        is_known = tf.range(_WINDOW, dtype="int64") < size
        ordered = tf.sort(tf.where(is_known, self.norms, float("inf")))
        median = ordered[tf.maximum(size - 1, 0) // 2]
        return tf.where(size >= _MIN_HISTORY, self._options.factor * median, float("inf"))

    def _record(self, norm, is_recorded, is_accepted):
        is_next = tf.range(_WINDOW, dtype="int64") == self.num_accepted % _WINDOW
        self.norms.assign(tf.where(is_next & is_recorded, norm, self.norms))
        self.num_accepted.assign_add(tf.cast(is_recorded, "int64"))
        skipped = tf.cast(~is_accepted, "int64")
        self.num_skipped.assign_add(skipped)
        self.in_a_row.assign(skipped * (self.in_a_row + 1))


class StopOnSpikes(keras.callbacks.Callback):
    """Stop training after several skipped steps in a row.

    Args:
        stop_after: Integer. Number of skipped steps in a row.
    """

    def __init__(self, stop_after: int):
        super().__init__()
        self._stop_after = stop_after

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        num_spikes = (logs or {}).get("spikes_in_a_row", 0)
        if num_spikes < self._stop_after or self.model.stop_training:
            return
        self.model.stop_training = True
        job.print_once(
            f"dtransformer: training stops, because the gradient norm was a spike or not finite in "
            f"{num_spikes:g} steps in a row. The weights are those before these steps. Lower the "
            "learning rate, or inspect the data of the last batches.",
            sys.stderr,
        )
