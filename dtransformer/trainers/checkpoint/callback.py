"""The callback that saves checkpoints while `fit` trains."""

import math
import pathlib
import time
import warnings

import keras

from dtransformer.errors import InputError
from dtransformer.parallel import job
from dtransformer.parallel.object_collectives import from_chief
from dtransformer.trainers.callbacks import check_positive
from dtransformer.trainers.checkpoint import files


class ModelCheckpoint(keras.callbacks.Callback):
    """Saves checkpoints of a `Trainer` in `fit`, from which `fit(resume=True)` goes on.

    As `keras.callbacks.ModelCheckpoint`, for the whole state of a run on any layout. A
    checkpoint is `folder/step-NUMBER`; one that a kill cut short is never taken for one, and
    removed by the next save. Training goes on while it is written. The last step is saved
    always.

    Args:
        folder: path of the folder of checkpoints; all hosts have to see it.
        every_steps: number of steps between saves; None for none.
        every_minutes: minutes between saves, by rank 0's clock; None for none.
        every_epochs: number of epochs between saves; None for none.
        keep: number of checkpoints that are kept, the newest ones; None for all.
        monitor: name of a log, such as `"val_loss"`, by which the best checkpoint is kept
            besides. It has to be in the logs when an epoch ends.
        mode: `"min"` or `"max"`: which value is best; `"auto"` takes `"max"` for names with
            "acc" or "bleu".
        wait: whether training waits until a checkpoint is written.
        replicas: as `Trainer.save`'s.
        assets: as `Trainer.save`'s.

    Raises:
        InputError: an argument is wrong; while training, a checkpoint cannot be written.

    Example:

    >>> saving = ModelCheckpoint("runs/wmt14/checkpoints", every_steps=500, keep=3)
    >>> trainer.fit(data, epochs=10, callbacks=[saving], resume=True)  # doctest: +SKIP
    """

    def __init__(
        self,
        folder,
        every_steps=None,
        every_minutes=None,
        every_epochs=1,
        keep=3,
        monitor=None,
        mode="auto",
        wait=False,
        replicas=False,
        assets=None,
    ):
        super().__init__()
        for name, value in (
            ("every_steps", every_steps),
            ("every_epochs", every_epochs),
            ("keep", keep),
        ):
            if value is not None:
                check_positive(name, value)
        if every_minutes is not None and not every_minutes > 0:
            raise InputError(f"every_minutes must be greater than 0, received {every_minutes!r}")
        if mode not in ("auto", "min", "max"):
            raise InputError(f"mode must be 'auto', 'min' or 'max', received {mode!r}")
        self.folder = pathlib.Path(folder)
        self.every_steps, self.every_epochs = every_steps, every_epochs
        self._clock = None if every_minutes is None else _Clock(60 * every_minutes)
        self.keep, self.monitor = keep, monitor
        wants_most = monitor is not None and ("acc" in monitor or "bleu" in monitor)
        self._sign = -1 if mode == "max" or (mode == "auto" and wants_most) else 1
        self._in_epoch, self._batch = False, 0
        self._wait, self._options = wait, {"replicas": replicas, "assets": assets}

    def on_train_begin(self, logs=None):
        if not hasattr(self.model, "_save"):
            raise InputError(
                "dtransformer.trainers.ModelCheckpoint saves a dtransformer.trainers.Trainer, this "
                f"is a {type(self.model).__name__}: use keras.callbacks.ModelCheckpoint"
            )
        self._saved_step = self._last_step = self._step()
        self._is_due, self._has_logs = False, True
        newest = from_chief(
            lambda: max((step for step, _ in files.saved_steps(self.folder)), default=0),
            "checkpoint/newest",
        )
        if newest > self._last_step:
            raise InputError(
                f"{self.folder} has a checkpoint of step {newest}, and training is at step "
                f"{self._last_step}: go on from it with fit(resume=True), or give another folder"
            )
        if self._clock is not None:
            self._clock.start(self._last_step)

    # A save waits for the next step's beginning, or the epoch's end: at an epoch's last step it
    # has the logs of the validation, and going on from it begins the next epoch.

    def on_train_batch_end(self, batch, logs=None):
        before, self._last_step, self._batch = self._last_step, self._step(), batch + 1
        if self.every_steps is not None:
            self._is_due |= self._last_step // self.every_steps > before // self.every_steps
        if self._clock is not None:
            self._is_due |= self._clock.is_over(self._last_step)

    def on_train_batch_begin(self, batch, logs=None):
        self._in_epoch = True
        if self._is_due:
            self._save({})

    def on_test_begin(self, logs=None):
        """Save an epoch that is stopped in its midst while its sums are there."""
        steps = self.params.get("steps")
        if self._in_epoch and self.model.stop_training and (not steps or self._batch < steps):
            self._save({})
            self._has_logs = True  # the sums at the epoch's end are those of the validation

    def on_epoch_end(self, epoch, logs=None):
        self._in_epoch = False
        is_last = self.model.stop_training or epoch + 1 == self.params.get("epochs")
        is_due = self._is_due or is_last
        if is_due or (self.every_epochs and not (epoch + 1) % self.every_epochs):
            self._save(logs or {})

    def on_train_end(self, logs=None):
        self._save(logs or {})
        self.model.wait_until_saved()
        self._remove_old()

    def _save(self, logs):
        self._is_due, step = False, self._step()
        if step == self._saved_step and (self._has_logs or not logs):
            return
        metrics = {name: float(value) for name, value in logs.items() if _is_number(value)}
        if logs and self.monitor is not None and self.monitor not in logs:
            warnings.warn(
                f"monitor={self.monitor!r} is not in the logs, so that this checkpoint cannot be the "
                f"best: they have {', '.join(sorted(metrics))}",
                stacklevel=2,
            )
        self.model.wait_until_saved()
        self._remove_old()  # the newest is complete now
        info = {"position": self.model._position(), "metrics": metrics}
        self.model._save(self.folder / files.folder_of(step), info, **self._options)
        self._saved_step, self._has_logs = step, bool(logs)
        if self._clock is not None:
            self._clock.start(step)
        if self._wait:
            self.model.wait_until_saved()
            self._remove_old()

    def _step(self):
        return int(self.model.optimizer.iterations)

    def _remove_old(self):
        """Remove all checkpoints but the newest ones and the best."""
        if self.keep is None or not job.is_chief():
            return
        try:
            saved = files.saved_steps(self.folder)
            best = best_of([path for _, path in saved], self.monitor, self._sign)
            for _, path in saved[: -self.keep]:
                if path != best:
                    files.remove(path)
        except OSError as error:  # the other ranks go on
            warnings.warn(f"an old checkpoint cannot be removed ({error})", stacklevel=2)


def best_of(paths, monitor, sign=1):
    """Return the checkpoint with the best value of a log; None where none has it.

    Args:
        paths: list of folders, the oldest first; of equal ones the first is best.
        monitor: name of the log, or None.
        sign: 1 where small values are good, -1 where large ones are.
    """
    values = {}
    for path in paths if monitor is not None else ():
        try:
            value = files.Checkpoint(path).manifest["metrics"].get(monitor)
        except InputError:  # damaged
            continue
        if value is not None:
            values[path] = sign * value
    return min(values, key=values.get) if values else None


class _Clock:
    """Tells all ranks at the same step that a time is over.

    Ranks ask each other rarely: after half of the steps that are left by rank 0's clock.
    """

    def __init__(self, seconds):
        self._seconds = seconds

    def start(self, step):
        """Begin to count at a step."""
        self._begin, self._first_step, self._ask_at = time.monotonic(), step, step + 1

    def is_over(self, step):
        """Return whether the time is over; all ranks have to call."""
        if step < self._ask_at:
            return False
        passed = from_chief(lambda: time.monotonic() - self._begin, "checkpoint/clock")
        a_step = passed / (step - self._first_step)
        self._ask_at = step + max(int((self._seconds - passed) / a_step / 2), 1)
        return passed >= self._seconds


def _is_number(value):
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False
