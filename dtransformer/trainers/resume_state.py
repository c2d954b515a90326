"""Beginning of `fit`: from nothing, or where a checkpoint's run stood, even within an epoch."""

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from dtransformer import _compat
from dtransformer.errors import InputError
from dtransformer.inputs.autotuning import without_autotuning
from dtransformer.parallel.collectives.objects import from_chief
from dtransformer.parallel.runtime import job
from dtransformer.trainers.callbacks import ProgressLog
from dtransformer.trainers.checkpoint import folders
from dtransformer.trainers.checkpoint.callback import ModelCheckpoint
from dtransformer.trainers.checkpoint.reader import Restored, restore_metrics


@dataclasses.dataclass
class ResumeState:
    """Where `fit` begins, and what the first epoch needs when it does not begin at its first batch.

    Args:
        data: data as Keras takes them; the first epoch begins with the batch number `batch`.
        epoch, batch: what comes first.
        num_batches: number of batches of an epoch; None where `batch` is 0.
        restored: what was restored; None where nothing was.
    """

    data: object
    epoch: int = 0
    batch: int = 0
    num_batches: int | None = None
    restored: Restored | None = None
    _calls_left: int | None = None  # of the train function in the first epoch
    _no_warnings: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)

    @classmethod
    def of(
        cls,
        trainer: keras.Model,
        x: object,
        data: object,
        resume: bool | str | Path,
        callbacks: Sequence[keras.callbacks.Callback],
        steps_per_epoch: int | None = None,
    ) -> "ResumeState":
        """Restore what `fit` is to go on from, and return where it begins.

        Args:
            trainer: the `Trainer`.
            x: what `fit` is given.
            data: `x` as Keras takes it.
            resume, callbacks, steps_per_epoch: as in `Trainer.fit`.

        Raises:
            InputError: see `Trainer.fit`.
        """
        found = []

        def check(restored):  # before anything is changed
            found.append(cls._after(restored, trainer, x, data, steps_per_epoch))

        return found[0] if _restore(trainer, resume, callbacks, check) else cls(data)

    @classmethod
    def _after(cls, restored, trainer, x, data, steps_per_epoch):
        """Return where a run goes on from a checkpoint."""
        position = restored.position
        if position is None:
            raise InputError(
                f"{restored.path} does not tell where its data stood, as it was not saved in fit: "
                "call restore instead of resume"
            )
        epoch, batch = position["epoch"], position["batch"]
        if hasattr(x, "restore"):
            if steps_per_epoch:
                raise InputError(
                    f"steps_per_epoch={steps_per_epoch} does not work with resume and a "
                    f"{type(x).__name__}, which has epochs of its own: leave it out"
                )
            x.restore(position)
            remaining, num_batches = data, int(data.cardinality())
        elif not batch and not steps_per_epoch:
            return cls(data, epoch, restored=restored)
        else:
            remaining, num_batches = resumed_data(data, position, steps_per_epoch)
        surplus = batch - num_batches
        if surplus >= trainer.steps_per_execution:
            raise InputError(
                f"{restored.path}: the run stood at batch {batch}, and an epoch of the data has "
                f"{num_batches}: resume with the data and batch size that it began with"
            )
        if surplus >= 0:  # data without a known size: the epoch was over
            return cls(data, epoch + 1, restored=restored)
        calls_left = -(-(num_batches - batch) // trainer.steps_per_execution)
        return cls(remaining, epoch, batch, num_batches, restored, calls_left if batch else None)

    def count_step(self) -> None:
        """Count a call of the train function; end the first epoch after those that were left of it.

        Raises:
            StopIteration: none is left.
        """
        if self._calls_left is not None:
            if not self._calls_left:
                raise StopIteration
            self._calls_left -= 1

    @property
    def is_over(self) -> bool:
        """Whether no batch of the first epoch is left."""
        return self._calls_left == 0

    def callbacks(
        self, callbacks: list[keras.callbacks.Callback], **options
    ) -> list[keras.callbacks.Callback] | keras.callbacks.CallbackList:
        """Return callbacks, and a progress log, that count the first epoch's batches from `batch` on.

        Args:
            callbacks: the callbacks of `fit`.
            **options: `verbose`, `epochs` and `model`, as in `keras.callbacks.CallbackList`.
        """
        has_bar = any(isinstance(one, keras.callbacks.ProgbarLogger) for one in callbacks)
        if not has_bar and options["verbose"] != 0:
            callbacks = [*callbacks, ProgressLog()]
        if not self.batch:
            return callbacks
        return _ResumedCallbacks(
            self,
            callbacks,
            add_history=True,
            add_progbar=options["verbose"] != 0,
            steps=self.num_batches,
            **options,
        )

    def begin_epoch(self, trainer: keras.Model) -> None:
        """Prepare an epoch that begins in its middle; later epochs need nothing."""
        if self.batch:
            self.restore_metrics(trainer)  # which Keras has reset
            self._no_warnings.enter_context(warnings.catch_warnings())
            # Keras takes the epoch's end for a lack of data.
            warnings.filterwarnings("ignore", message="Your input ran out of data")

    def restore_metrics(self, trainer: keras.Model) -> None:
        """Set the sums of an epoch that begins in its middle, of those metrics that are built."""
        if self.batch:
            restore_metrics(trainer.training_state(), self.restored)

    def end_epoch(self) -> None:
        """End the first epoch: later ones begin with their first batch."""
        self._no_warnings.close()
        self.batch, self._calls_left = 0, None


def resumed_data(
    data: object, position: Mapping[str, int], steps_per_epoch: int | None = None
) -> tuple[tf.data.Dataset, int]:
    """Return data that begin where a run stood, and the number of batches of an epoch.

    Args:
        data: data as Keras takes them.
        position: the `epoch` and `batch` that come next.
        steps_per_epoch: as in `fit`; the data then go on from epoch to epoch.

    Raises:
        InputError: the data cannot begin in the middle of an epoch.
    """
    if not isinstance(data, tf.data.Dataset):
        raise InputError(
            f"the run stood at batch {position['batch']} of epoch {position['epoch'] + 1}, and a "
            f"{type(data).__name__} cannot begin there: give fit a tf.data.Dataset, or an object with "
            "position() and restore(position), such as TranslationBatches"
        )
    size = int(data.cardinality())
    if size == tf.data.UNKNOWN_CARDINALITY and not steps_per_epoch:
        size = int(data.reduce(np.int64(0), lambda count, *_: count + 1))
    num_batches, starts = steps_per_epoch or size, [position["batch"]]
    if steps_per_epoch:  # Keras begins anew after the first epoch, and then goes on
        before = position["epoch"] * num_batches
        starts = [before + position["batch"], before + num_batches]
        if size > 0:
            data, starts = data.repeat(), [start % size for start in starts]
    starts = iter(starts)

    def remaining(_):
        start = tf.numpy_function(lambda: np.int64(next(starts, 0)), [], tf.int64)
        return data.skip(start)

    dataset = tf.data.Dataset.range(1).flat_map(remaining).prefetch(tf.data.AUTOTUNE)
    dataset = without_autotuning(dataset)
    cardinality = sys.maxsize if steps_per_epoch else num_batches
    return _compat.with_cardinality(dataset, cardinality), num_batches


def check_callbacks(callbacks: Iterable[keras.callbacks.Callback]) -> None:
    """Refuse a callback that would lose the state of a run, or needs full weights.

    Raises:
        InputError: says what to use instead.
    """
    if any(isinstance(one, keras.callbacks.BackupAndRestore) for one in callbacks):
        raise InputError(
            "keras.callbacks.BackupAndRestore would keep the network's weights only: use "
            "dtransformer.trainers.ModelCheckpoint(folder) and fit(resume=True)"
        )
    swaps = any(isinstance(one, keras.callbacks.SwapEMAWeights) for one in callbacks)
    if swaps and (job.size() > 1 or job.mesh() is not None):
        raise InputError(
            "keras.callbacks.SwapEMAWeights needs full weights, of which ranks may have shards: "
            "evaluate inside of Trainer.averaged_weights()"
        )


class _ResumedCallbacks(keras.callbacks.CallbackList):
    """Callbacks of a run whose first epoch does not begin with its first batch.

    Args:
        resume_state: the `ResumeState`.
        *args, **kwargs: as in `keras.callbacks.CallbackList`.
    """

    def __init__(self, resume_state, *args, **kwargs):
        self._resume_state = resume_state
        super().__init__(*args, **kwargs)

    def on_epoch_begin(self, epoch, logs=None):
        self._resume_state.begin_epoch(self.model)
        super().on_epoch_begin(epoch, logs)

    def on_train_batch_begin(self, batch, logs=None):
        if not self._resume_state.is_over:  # Keras counts on to a full epoch
            super().on_train_batch_begin(batch + self._resume_state.batch, logs)

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch + self._resume_state.batch, logs)

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        self._resume_state.end_epoch()


def _restore(trainer, resume, callbacks, check) -> bool:
    """Restore the checkpoint to go on from; return whether there is one."""
    if not resume:
        return False
    path = resume
    if resume is True:
        saving = [one for one in callbacks if isinstance(one, ModelCheckpoint)]
        if len(saving) != 1:
            raise InputError(
                f"resume=True needs one ModelCheckpoint in callbacks, there are {len(saving)}: add "
                "one, or give resume the path of a checkpoint"
            )
        path = saving[0].folder
        _set_aside(lambda: folders.folders_without_manifest(path))
        if not from_chief(lambda: bool(folders.saved_steps(path)), "checkpoint/any"):
            return False
    restored = trainer.restore(path, check=check)
    if resume is True:  # else they would be kept as the newest ones
        _set_aside(lambda: restored.damaged)
    place = f"epoch {restored.position['epoch'] + 1}, batch {restored.position['batch'] + 1}"
    job.print_once(f"Resuming from {restored.path}: {place}")
    return True


def _set_aside(find_damaged: Callable[[], Iterable]):
    """Let rank 0 rename the damaged checkpoints that a function returns."""

    def rename():
        for path in find_damaged():
            print(f"{path} is damaged, and set aside", flush=True)
            folders.set_aside(path)

    from_chief(rename, "checkpoint/set_aside")
