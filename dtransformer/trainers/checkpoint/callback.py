"""Callbacks that save checkpoints while `fit` trains."""

import contextlib
import os
import pathlib
import time
import types
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import keras
import numpy as np
from safetensors.numpy import save_file

from dtransformer.errors import InputError, check_int
from dtransformer.inputs.safetensors_file import SafetensorsFile
from dtransformer.parallel.collectives.objects import from_chief
from dtransformer.parallel.runtime import job
from dtransformer.trainers.checkpoint import folders
from dtransformer.trainers.checkpoint.saved_checkpoint import Checkpoint

# Retention of checkpoints: the newest ones, and the best.


def remove_old(
    folder: str | os.PathLike, keep: int, monitor: str | None = None, sign: int = 1
) -> None:
    """Remove all checkpoints of a folder except the newest ones and the best.

    Checkpoints that cannot be removed cause a warning.

    Args:
        folder: Folder of checkpoints.
        keep: Positive integer. Number of newest checkpoints to keep.
        monitor, sign: As in `find_best`.
    """
    saved = [path for _, path in folders.saved_steps(folder)]
    best = find_best(saved, monitor, sign)
    for path in saved[:-keep]:
        try:
            if path != best:
                folders.remove(path)
        except OSError as error:  # Training continues.
            warnings.warn(f"An old checkpoint cannot be removed ({error}).", stacklevel=2)


def find_best(
    paths: Sequence[pathlib.Path], monitor: str | None, sign: int = 1
) -> pathlib.Path | None:
    """Return the checkpoint with the best value of a log, or `None` if no checkpoint has the log.

    Args:
        paths: Folders of checkpoints from oldest to newest. The oldest of equal values wins.
        monitor: Name of the log, or `None`.
        sign: 1 if smaller values are better, -1 if larger values are better.
    """
    values = {}
    for path in paths if monitor is not None else ():
        try:
            value = Checkpoint(path).manifest["metrics"].get(monitor)
        except InputError:  # Skip damaged checkpoints.
            continue
        if value is not None:
            values[path] = sign * value
    return min(values, key=values.get) if values else None


class SharedTimer:
    """Timer that expires at the same step on all ranks, by rank 0's clock.

    Ranks rarely exchange the time: each time after half of the steps that should remain, estimated
    from the duration of the steps since the last exchange. The first step is excluded because it
    compiles.

    Args:
        seconds: Number of seconds until it expires.
    """

    def __init__(self, seconds):
        self._seconds = seconds

    def start(self, step):
        """Start the timer at a step."""
        self._start_time = time.monotonic()
        self._seconds_passed = 0.0
        self._last_exchange = step
        self._next_exchange = step + 1

    def is_over(self, step):
        """Return whether the timer has expired. All ranks must call it at the same steps."""
        if step < self._next_exchange:
            return False
        passed = from_chief(lambda: time.monotonic() - self._start_time, "checkpoint/clock")
        step_seconds = max(passed - self._seconds_passed, 1e-9) / (step - self._last_exchange)
        self._seconds_passed = passed
        self._last_exchange = step
        self._next_exchange = step + max(int((self._seconds - passed) / step_seconds / 2), 1)
        return passed >= self._seconds


class ModelCheckpoint(keras.callbacks.Callback):
    """Saves checkpoints of a `Trainer` during `fit`, so that `fit(resume=True)` can continue.

    It resembles `keras.callbacks.ModelCheckpoint`, but saves the full state of a run on any layout.
    A checkpoint is the folder `folder/step-NUMBER`. Training continues while a checkpoint is being
    written. If the process is killed, the incomplete folder is ignored and removed by the next
    save. The last step is always saved.

    Args:
        folder: Folder of checkpoints, on a file system that all hosts share.
        every_steps: Interval in steps between saves. `None` disables these saves.
        every_minutes: Interval in minutes between saves, by rank 0's clock. `None` disables these
            saves.
        every_epochs: Interval in epochs between saves. `None` disables these saves. Defaults to
            `1`.
        keep: Number of newest checkpoints to keep. `None` keeps all. Defaults to `3`.
        monitor: Name of a log, such as `"val_loss"`. The checkpoint with its best value is also
            kept. The log must be present at the end of epochs.
        mode: `"min"`, `"max"` or `"auto"`. Whether smaller or larger values are better. `"auto"`
            means `"max"` if the name contains "acc" or "bleu". Defaults to `"auto"`.
        replicas: As in `Trainer.save`.
        assets: As in `Trainer.save`.

    Raises:
        InputError: If an argument is invalid, or if a checkpoint cannot be written during training.

    Example:

    >>> saving = ModelCheckpoint("runs/wmt14/checkpoints", every_steps=500, keep=3)
    >>> history = trainer.fit(data, epochs=2, callbacks=[saving], resume=True, verbose=0)
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        every_epochs: int | None = 1,
        keep: int | None = 3,
        monitor: str | None = None,
        mode: Literal["auto", "min", "max"] = "auto",
        replicas: bool = False,
        assets: Mapping | None = None,
    ):
        super().__init__()
        counts = {"every_steps": every_steps, "every_epochs": every_epochs, "keep": keep}
        for name, value in counts.items():
            if value is not None:
                check_int(name, value)
        if every_minutes is not None and not every_minutes > 0:
            raise InputError(f"`every_minutes` must be greater than 0, received {every_minutes!r}.")
        if mode not in ("auto", "min", "max"):
            raise InputError(f"`mode` must be 'auto', 'min' or 'max', received {mode!r}.")
        self.folder = pathlib.Path(folder)
        self.every_steps = every_steps
        self.every_epochs = every_epochs
        self._timer = None if every_minutes is None else SharedTimer(60 * every_minutes)
        self.keep = keep
        self.monitor = monitor
        is_score = monitor is not None and ("acc" in monitor or "bleu" in monitor)
        self._sign = -1 if mode == "max" or (mode == "auto" and is_score) else 1
        self._in_epoch = False
        self._batch = 0
        self._options = {"replicas": replicas, "assets": assets}

    def on_train_begin(self, logs: dict | None = None) -> None:
        if not hasattr(self.model, "wait_until_saved"):
            raise InputError(
                "dtransformer.trainers.ModelCheckpoint needs a dtransformer.Trainer, received a "
                f"{type(self.model).__name__}. Use keras.callbacks.ModelCheckpoint."
            )
        self._saved_step = self._last_step = self._step()
        self._is_due = False
        self._saved_logs = True
        newest = from_chief(
            lambda: max((step for step, _ in folders.saved_steps(self.folder)), default=0),
            "checkpoint/newest",
        )
        if newest > self._last_step:
            raise InputError(
                f"{self.folder} contains a checkpoint of step {newest}, but training is at step "
                f"{self._last_step}. Resume from it with fit(resume=True), or use another folder."
            )
        if self._timer is not None:
            self._timer.start(self._last_step)

    # A due save waits until the next step starts or the epoch ends. A checkpoint of an epoch's last
    # step then contains the logs of the validation, and a resumed run starts with the next epoch.

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        before = self._last_step
        self._last_step = self.model.num_steps
        self._batch = batch + 1
        if self.every_steps is not None:
            self._is_due |= self._last_step // self.every_steps > before // self.every_steps
        if self._timer is not None:
            self._is_due |= self._timer.is_over(self._last_step)

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        self._in_epoch = True
        if self._is_due:
            self._save({})

    def on_test_begin(self, logs: dict | None = None) -> None:
        """Save an epoch that stops early, before validation resets the metrics."""
        steps = self.params.get("steps")
        if self._in_epoch and self.model.stop_training and (not steps or self._batch < steps):
            self._save({})
            # Do not save the validation's metric states at the end of the epoch.
            self._saved_logs = True

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self._in_epoch = False
        is_last = self.model.stop_training or epoch + 1 == self.params.get("epochs")
        is_due = self._is_due or is_last
        if is_due or (self.every_epochs and not (epoch + 1) % self.every_epochs):
            self._save(logs or {})

    def on_train_end(self, logs: dict | None = None) -> None:
        self._save(logs or {})
        self._finish()

    def save_now(self) -> int:
        """Save, wait for the complete checkpoint and return its step. All ranks must call it."""
        self._save({})
        self._finish()
        return self._saved_step

    def _save(self, logs):
        self._is_due = False
        step = self._step()
        if step == self._saved_step and (self._saved_logs or not logs):
            return
        metrics = {}
        for name, value in logs.items():
            with contextlib.suppress(TypeError, ValueError):  # Skip values that are not numbers.
                metrics[name] = float(value)
        if logs and self.monitor is not None and self.monitor not in logs:
            warnings.warn(
                f"`monitor={self.monitor!r}` is not in the logs, so this checkpoint cannot be the "
                f"best. The logs contain {', '.join(sorted(metrics))}.",
                stacklevel=2,
            )
        self._finish()
        path = self.folder / folders.step_folder(step)
        self.model.save(path, wait=False, metrics=metrics, **self._options)
        self._saved_step = step
        self._saved_logs = bool(logs)
        if self._timer is not None:
            self._timer.start(step)

    def _finish(self):
        """Wait until the newest checkpoint is complete, then remove old ones."""
        self.model.wait_until_saved()
        if self.keep is not None and job.is_chief():
            remove_old(self.folder, self.keep, self.monitor, self._sign)

    def _step(self):
        return int(self.model.optimizer.iterations)


# States of Keras' callbacks in checkpoints, such as the patience of early stopping.


FILE = "callbacks.safetensors"
KINDS = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.ModelCheckpoint,
)
_FIELDS = "best", "best_epoch", "cooldown_counter", "stopped_epoch", "wait"
_WEIGHTS = "best_weights"


class CallbackStates(keras.callbacks.Callback):
    """Callback that saves and restores the states of Keras' callbacks.

    Args:
        callbacks: Callbacks of `fit` that are listed before this one.
        folder: The checkpoint to resume from, or `None` for a new run.
    """

    def __init__(self, callbacks: Iterable[keras.callbacks.Callback], folder: str | None):
        super().__init__()
        self._stateful_callbacks = {}
        names = []
        for callback in callbacks:
            if isinstance(callback, KINDS):
                names.append(type(callback).__name__)
                self._stateful_callbacks[f"{names[-1]}.{names.count(names[-1])}"] = callback
        self._path = None if folder is None else pathlib.Path(folder) / FILE

    def on_train_begin(self, logs=None):
        """Restore the states, after the callbacks' `on_train_begin` has reset them."""
        if self._path is None or not self._path.exists():
            return
        file = SafetensorsFile(self._path)
        for name, callback in self._stateful_callbacks.items():
            for field in _FIELDS:
                if f"{name}.{field}" in file.shapes:
                    setattr(callback, field, file[f"{name}.{field}"][0].item())
            weights = sorted(x for x in file.shapes if x.startswith(f"{name}.{_WEIGHTS}."))
            if weights:
                callback.best_weights = [np.array(file[x]) for x in weights]

    def assets(self) -> dict:
        """Return the assets for a checkpoint: the current states, or `{}` without states."""
        values = {}
        for name, callback in self._stateful_callbacks.items():
            for field in _FIELDS:
                value = getattr(callback, field, None)
                if value is not None:
                    values[f"{name}.{field}"] = np.array([value])
            for i, value in enumerate(getattr(callback, _WEIGHTS, None) or ()):
                values[f"{name}.{_WEIGHTS}.{i:06}"] = np.array(value, order="C")
        asset = types.SimpleNamespace(save=lambda path: save_file(values, path))
        return {FILE: asset} if values else {}


def order_callbacks(callbacks: list) -> list:
    """Return callbacks in an order that lets checkpoints contain the other callbacks' new states.

    At the end of an epoch, callbacks such as `EarlyStopping` must update their states before
    `ModelCheckpoint` saves.

    Args:
        callbacks: Callbacks of `fit`.

    Example:

    >>> first, second = ModelCheckpoint("checkpoints"), keras.callbacks.EarlyStopping()
    >>> order_callbacks([first, second]) == [second, first]
    True
    """
    is_stateful = [isinstance(callback, KINDS) for callback in callbacks]
    end = max((i + 1 for i in range(len(callbacks)) if is_stateful[i]), default=0)
    moved = [callback for callback in callbacks[:end] if isinstance(callback, ModelCheckpoint)]
    states = [callback for callback in callbacks[:end] if not isinstance(callback, ModelCheckpoint)]
    return states + moved + callbacks[end:]
