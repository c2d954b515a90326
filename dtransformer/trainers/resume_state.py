"""Going on where a checkpoint's run stood, in the midst of an epoch too."""

import contextlib
import dataclasses
import itertools
import warnings

import keras
import numpy as np
import tensorflow as tf

from dtransformer.errors import InputError
from dtransformer.parallel import job
from dtransformer.parallel.object_collectives import from_chief
from dtransformer.trainers.checkpoint import files
from dtransformer.trainers.checkpoint.callback import ModelCheckpoint
from dtransformer.trainers.checkpoint.reader import Restored, restore_metrics


@dataclasses.dataclass
class ResumeState:
    """Where `fit` begins.

    Args:
        data: as Keras takes them; its first epoch begins with `batch`.
        epoch, batch: what comes first.
        num_batches: number of batches of an epoch; None where `batch` is 0.
        restored: what was restored; None where nothing was.
    """

    data: object
    epoch: int = 0
    batch: int = 0
    num_batches: int | None = None
    restored: Restored | None = None
    _steps_left: int | None = None  # of the first epoch
    _quiet: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)

    @classmethod
    def of(cls, trainer, x, data, resume, callbacks, steps_per_epoch=None):
        """Restore what `fit` is to go on from, and return where it begins.

        Args:
            trainer: the `Trainer`.
            x: what `fit` is given, `data` as Keras takes it.
            resume, steps_per_epoch: as `fit`'s.
            callbacks: list of Keras callbacks.

        Raises:
            InputError: see `Trainer.fit`.
        """
        found = []

        def check(restored):
            found.append(cls._at(trainer, x, data, restored, steps_per_epoch))

        return found[0] if _restore(trainer, resume, callbacks, check) else cls(data)

    @classmethod
    def _at(cls, trainer, x, data, restored, steps_per_epoch):
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
            rest, num_batches = data, int(data.cardinality())
        elif not batch and not steps_per_epoch:
            return cls(data, epoch, restored=restored)
        else:
            rest, num_batches = begun_at(data, position, steps_per_epoch)
        too_many = batch - num_batches
        if too_many >= trainer.steps_per_execution:
            raise InputError(
                f"{restored.path}: the run stood at batch {batch}, and an epoch of the data has "
                f"{num_batches}: resume with the data and batch size that it began with"
            )
        if too_many >= 0:  # data that did not know their number
            return cls(data, epoch + 1, restored=restored)
        steps_left = -(-(num_batches - batch) // trainer.steps_per_execution)
        return cls(rest, epoch, batch, num_batches, restored, steps_left if batch else None)

    def count_step(self):
        """Count a step; end the first epoch after the batches that were left of it.

        Raises:
            StopIteration: none is left.
        """
        if self._steps_left is not None:
            if not self._steps_left:
                raise StopIteration
            self._steps_left -= 1

    def restore_metrics(self, trainer):
        """Set the sums of an epoch that is resumed in its midst."""
        if self.batch:
            restore_metrics(trainer, self.restored)

    def callbacks(self, callbacks, **options):
        """Return callbacks that count the first epoch's batches from `batch` on.

        Args:
            callbacks: list of Keras callbacks.
            **options: `verbose`, `epochs` and `model`, as `keras.callbacks.CallbackList` has.
        """
        if not self.batch:
            return callbacks
        return _ShiftedCallbacks(
            self,
            callbacks,
            add_history=True,
            add_progbar=options["verbose"] != 0,
            steps=self.num_batches,
            **options,
        )

    @property
    def is_over(self):
        """Whether no batch of the first epoch is left."""
        return self._steps_left == 0

    def begin_epoch(self, trainer):
        """Restore an epoch that is resumed in its midst."""
        if self.batch:
            self.restore_metrics(trainer)  # which Keras has reset
            self._quiet.enter_context(warnings.catch_warnings())
            # Keras takes its end for a lack of data.
            warnings.filterwarnings("ignore", message="Your input ran out of data")

    def end_epoch(self):
        """The first epoch is over: the others are whole."""
        self._quiet.close()
        self.batch, self._steps_left = 0, None


def check_callbacks(callbacks):
    """Refuse a callback that would lose the state of a run.

    Raises:
        InputError: says what to use instead.
    """
    if any(isinstance(one, keras.callbacks.BackupAndRestore) for one in callbacks):
        raise InputError(
            "keras.callbacks.BackupAndRestore would keep the network's weights only: use "
            "dtransformer.trainers.ModelCheckpoint(folder) and fit(resume=True)"
        )


class _ShiftedCallbacks(keras.callbacks.CallbackList):
    """Callbacks of a run whose first epoch does not begin with its first batch.

    Args:
        beginning: a `Beginning`.
        *args, **kwargs: as `keras.callbacks.CallbackList` has them.
    """

    def __init__(self, beginning, *args, **kwargs):
        self._beginning = beginning
        super().__init__(*args, **kwargs)

    def on_epoch_begin(self, epoch, logs=None):
        self._beginning.begin_epoch(self.model)
        super().on_epoch_begin(epoch, logs)

    def on_train_batch_begin(self, batch, logs=None):
        if not self._beginning.is_over:  # Keras counts on to a whole epoch
            super().on_train_batch_begin(batch + self._beginning.batch, logs)

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch + self._beginning.batch, logs)

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        self._beginning.end_epoch()


def _restore(trainer, resume, callbacks, check):
    """Restore a checkpoint; return whether there is one to go on from."""
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
        _set_aside(lambda: files.headless_steps(path))
        if not from_chief(lambda: bool(files.saved_steps(path)), "checkpoint/any"):
            return False
    restored = trainer._restore(path, check=check)
    if resume is True:  # else they would be kept as the newest ones
        _set_aside(lambda: restored.damaged)
    if job.is_chief():
        place = f"epoch {restored.position['epoch'] + 1}, batch {restored.position['batch'] + 1}"
        print(f"Resuming from {restored.path}: {place}", flush=True)
    return True


def _set_aside(damaged):
    """Let rank 0 rename the damaged checkpoints that a function returns."""

    def rename():
        for path in damaged():
            print(f"{path} is damaged, and set aside", flush=True)
            files.set_aside(path)

    from_chief(rename, "checkpoint/set_aside")


def begun_at(data, position, steps_per_epoch=None):
    """Return data that begin where a run stood, and the number of batches of an epoch.

    Args:
        data: as Keras takes them.
        position: dict with the `epoch` and `batch` that come next.
        steps_per_epoch: as `fit`'s; the data then go on from epoch to epoch.

    Raises:
        InputError: the data cannot begin in the midst of an epoch.
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
    num_batches, starts = steps_per_epoch or size, iter([position["batch"]])
    if steps_per_epoch:
        first = position["epoch"] * num_batches + position["batch"]
        later = (epoch * num_batches for epoch in itertools.count(position["epoch"] + 1))
        starts = (start % size if size > 0 else start for start in itertools.chain([first], later))
        data = data.repeat() if size > 0 else data

    def rest(_):
        start = tf.numpy_function(lambda: np.int64(next(starts, 0)), [], tf.int64)
        return data.skip(start)

    dataset = tf.data.Dataset.range(1).flat_map(rest).prefetch(tf.data.AUTOTUNE)
    # Keras counts by this; without it the first epoch's number would hold for all.
    dataset.cardinality = lambda: tf.constant(num_batches, tf.int64)
    return dataset, num_batches
