"""Start of `fit`: from scratch, or from a checkpoint, also in the middle of an epoch."""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping

import keras
import numpy as np
import tensorflow as tf

from dtransformer import _compat
from dtransformer.errors import InputError
from dtransformer.inputs.autotuning import without_autotuning
from dtransformer.parallel.collectives.objects import from_chief
from dtransformer.parallel.runtime import job
from dtransformer.trainers.checkpoint import folders
from dtransformer.trainers.checkpoint.callback import ModelCheckpoint
from dtransformer.trainers.checkpoint.reader import Restored


@dataclasses.dataclass(frozen=True)
class StartPoint:
    """First batch of a `fit`, and the data from there on.

    Args:
        data: Data as Keras takes them. The first epoch starts with batch `batch`.
        epoch: Index of the first epoch.
        batch: Index of the first batch of the first epoch.
        num_batches: Number of batches of a full epoch, or `None` if `batch` is 0.
        restored: The restored checkpoint, or `None`.
    """

    data: object
    epoch: int = 0
    batch: int = 0
    num_batches: int | None = None
    restored: Restored | None = None


def find_start(
    restore: Callable, data: object, steps_per_execution: int, options: object
) -> StartPoint:
    """Restore the checkpoint to resume from, if any, and return where `fit` starts.

    Args:
        restore: `Trainer.restore`.
        data: Data as Keras takes them.
        steps_per_execution: As in `Trainer.compile`.
        options: `FitOptions`.

    Raises:
        InputError: If no checkpoint can be restored, or if the data cannot start at its position.
    """
    path = _checkpoint_path(options.resume, options.callbacks)
    if path is None:
        return StartPoint(data, options.initial_epoch)
    starts = []

    def check(restored):
        # Called before anything is restored, so that an error leaves the trainer unchanged.
        starts.append(_start_after(restored, data, steps_per_execution, options))

    restored = restore(path, check=check)
    if options.resume is True:
        # `keep` would count damaged checkpoints as the newest ones.
        _set_aside(lambda: restored.damaged)
    position = restored.position
    place = f"epoch {position['epoch'] + 1}, batch {position['batch'] + 1}"
    job.print_once(f"Resuming from {restored.path}: {place}")
    return starts[0]


def _checkpoint_path(resume, callbacks):
    """Return the checkpoint, or the folder of checkpoints, to resume from; `None` for a new run."""
    if not resume:
        return None
    if resume is not True:
        return resume
    saving = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
    if len(saving) != 1:
        raise InputError(
            f"`resume=True` needs exactly one ModelCheckpoint in `callbacks`, received "
            f"{len(saving)}. Add one, or pass the path of a checkpoint as `resume`."
        )
    folder = saving[0].folder
    _set_aside(lambda: folders.folders_without_manifest(folder))
    has_checkpoint = from_chief(lambda: bool(folders.saved_steps(folder)), "checkpoint/any")
    return folder if has_checkpoint else None


def _start_after(restored, data, steps_per_execution, options):
    """Return the `StartPoint` after a checkpoint."""
    position = restored.position
    if position is None:
        raise InputError(
            f"{restored.path} has no data position because it was not saved by `fit`. Call "
            "`restore` instead of passing `resume`."
        )
    epoch = position["epoch"]
    batch = position["batch"]
    x = options.samples.x
    steps_per_epoch = options.steps_per_epoch
    if hasattr(x, "restore"):
        if steps_per_epoch:
            raise InputError(
                f"`steps_per_epoch={steps_per_epoch}` cannot be combined with `resume` for a "
                f"{type(x).__name__}, which defines its epochs. Remove `steps_per_epoch`."
            )
        x.restore(position)
        remaining = data
        num_batches = int(data.cardinality())
    elif not batch and not steps_per_epoch:
        return StartPoint(data, epoch, restored=restored)
    else:
        remaining, num_batches = resumed_data(data, position, steps_per_epoch)
    surplus = batch - num_batches
    if surplus >= steps_per_execution:
        raise InputError(
            f"{restored.path} was saved at batch {batch}, but an epoch of the data has "
            f"{num_batches} batches. Resume with the data and batch size of the original run."
        )
    if surplus >= 0:  # The data had an unknown size and the epoch was complete.
        return StartPoint(data, epoch + 1, restored=restored)
    return StartPoint(remaining, epoch, batch, num_batches if batch else None, restored)


def resumed_data(
    data: object, position: Mapping[str, int], steps_per_epoch: int | None = None
) -> tuple[tf.data.Dataset, int]:
    """Return data that start at a position, and the number of batches of an epoch.

    Only the first iteration starts at the position. Later epochs start with their first batch.

    Args:
        data: Data as Keras takes them.
        position: Dict with the next `epoch` and `batch`.
        steps_per_epoch: As in `Trainer.fit`. With it the data continue from epoch to epoch.

    Raises:
        InputError: If the data cannot start in the middle of an epoch.
    """
    if not isinstance(data, tf.data.Dataset):
        raise InputError(
            f"The run stopped at batch {position['batch']} of epoch {position['epoch'] + 1}, and a "
            f"{type(data).__name__} cannot start there. Pass a tf.data.Dataset, or an object with "
            "position() and restore(position), such as TranslationBatches."
        )
    size = int(data.cardinality())
    if size == tf.data.UNKNOWN_CARDINALITY and not steps_per_epoch:
        size = int(data.reduce(np.int64(0), lambda count, *_: count + 1))
    if steps_per_epoch:
        start = position["epoch"] * steps_per_epoch + position["batch"]
        if size > 0:
            data = data.repeat()
            start = start % size
        dataset = without_autotuning(data.skip(start))
        return _compat.with_cardinality(dataset, sys.maxsize), steps_per_epoch
    starts = iter([position["batch"]])

    def remaining(_):
        start = tf.numpy_function(lambda: np.int64(next(starts, 0)), [], tf.int64)
        return data.skip(start)

    dataset = tf.data.Dataset.range(1).flat_map(remaining).prefetch(tf.data.AUTOTUNE)
    return _compat.with_cardinality(without_autotuning(dataset), size), size


def check_callbacks(callbacks: Iterable[keras.callbacks.Callback]) -> None:
    """Check that no callback would lose the state of a run or need full weights.

    Raises:
        InputError: If a callback would. The error names the replacement.
    """
    if any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in callbacks):
        raise InputError(
            "keras.callbacks.BackupAndRestore saves only the network's weights. Use "
            "dtransformer.trainers.ModelCheckpoint(folder) and fit(resume=True)."
        )
    swaps = any(isinstance(callback, keras.callbacks.SwapEMAWeights) for callback in callbacks)
    if swaps and (job.size() > 1 or job.mesh() is not None):
        raise InputError(
            "keras.callbacks.SwapEMAWeights needs full weights, but ranks may have shards of them. "
            "Evaluate inside of Trainer.averaged_weights()."
        )


def _set_aside(find_damaged: Callable[[], Iterable]):
    """Let rank 0 rename the damaged checkpoints that a function returns."""

    def rename():
        for path in find_damaged():
            print(f"{path} is damaged and was set aside.", flush=True)
            folders.set_aside(path)

    from_chief(rename, "checkpoint/set_aside")
