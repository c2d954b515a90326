"""Base class for epochs of batches that training can resume at any position."""

import abc
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from dtransformer import _compat
from dtransformer.errors import InputError
from dtransformer.inputs.autotuning import without_autotuning


class Epochs(abc.ABC):
    """Base class for datasets with epochs of equal length that can start at any batch.

    A batch depends only on its index, the seed and the epoch. `Trainer.fit` calls `set_epoch`
    before each epoch and stores `position` in checkpoints.

    Args:
        num_batches: Integer. Number of batches of an epoch.
        seed: Integer. Shuffling depends on the seed and the epoch.
        **same: Other values that must be equal when a run resumes, as JSON values.
    """

    def __init__(self, num_batches: int, seed: int, **same: object):
        self._num_batches = num_batches
        self._seed = seed
        self._epoch = 0
        self._first_batch = 0
        self._identity = {"num_batches": num_batches, "seed": seed, **same}

    @abc.abstractmethod
    def batch(self, epoch: int, batch: int) -> tuple:
        """Return this rank's rows of a batch, nested arrays in the structure of `spec`."""

    @abc.abstractmethod
    def spec(self) -> tuple:
        """Return the `tf.TensorSpec` of each array of a batch, in the same structure."""

    def as_dataset(self) -> tf.data.Dataset:
        """Return a `tf.data.Dataset` of one epoch.

        Each iteration uses the epoch and the first batch that `set_epoch` chose before it starts.
        The dataset's `cardinality()` counts a full epoch. If an epoch starts at a later batch,
        Keras warns that it ran out of data and continues with the next epoch.
        """
        spec = self.spec()
        flat = tf.nest.flatten(spec)

        def batch_indices(_):
            def read_position():
                return np.int64(self._epoch), np.int64(self._first_batch)

            epoch, first = tf.numpy_function(read_position, [], [tf.int64, tf.int64])
            indices = tf.data.Dataset.range(tf.reshape(first, []), len(self))
            return indices.map(lambda index: (tf.reshape(epoch, []), index))

        def load_batch(epoch, index):
            def make(epoch, index):
                return tf.nest.flatten(self.batch(int(epoch), int(index)))

            arrays = tf.numpy_function(
                make, [epoch, index], [component.dtype for component in flat]
            )
            arrays = [
                tf.ensure_shape(array, component.shape) for array, component in zip(arrays, flat)
            ]
            return tf.nest.pack_sequence_as(spec, arrays)

        dataset = tf.data.Dataset.range(1).flat_map(batch_indices)
        dataset = dataset.map(load_batch, num_parallel_calls=tf.data.AUTOTUNE)
        dataset = without_autotuning(dataset.prefetch(tf.data.AUTOTUNE))
        return _compat.with_cardinality(dataset, len(self))

    def __len__(self) -> int:
        """Return the number of batches of a full epoch, equal on every rank."""
        return self._num_batches

    def set_epoch(self, epoch: int, start: int | None = None) -> None:
        """Choose the epoch and the first batch of the next iteration.

        Args:
            epoch: Integer. Index of the epoch, from 0.
            start: Integer. Index of the first batch. By default, the first batch is kept if this
                epoch is already chosen, so that `Trainer.fit` keeps the position that `restore` has
                set. Otherwise it is 0.

        Raises:
            InputError: If there is no such batch.
        """
        if start is None:
            start = self._first_batch if epoch == self._epoch else 0
        if epoch < 0 or not 0 <= start <= len(self):
            raise InputError(
                f"Epoch {epoch}, batch {start} does not exist in epochs of {len(self)} batches. Resume "
                "with the data and options of the original run."
            )
        self._epoch = int(epoch)
        self._first_batch = int(start)

    def position(self, batches_done: int = 0) -> dict[str, int | str]:
        """Return the position of the next batch. `restore` resumes from it.

        Args:
            batches_done: Integer. Number of batches trained since the iteration began. The data
                pipeline does not know it, because it prefetches batches. Defaults to 0.

        Returns:
            Dict with the `epoch` and `batch` that come next, `num_batches`, `seed` and other values
            that identify the data.
        """
        epoch = self._epoch
        batch = self._first_batch + int(batches_done)
        if batch >= len(self):
            epoch = epoch + batch // len(self)
            batch = batch % len(self)
        return {"epoch": epoch, "batch": batch, **self._identity}

    def restore(self, position: Mapping[str, int | str]) -> None:
        """Start the next iteration at a saved position.

        Args:
            position: Dict that `position` returned.

        Raises:
            InputError: If the position belongs to other data or options, so that the remaining
                batches would differ.
        """
        for name, expected in self._identity.items():
            if position.get(name, expected) != expected:
                raise InputError(
                    f"The saved position has `{name}={position[name]}`, but this data has {expected}. "
                    "Resume with the data, seed and batch size of the original run."
                )
        self.set_epoch(position["epoch"], position["batch"])


def cache_plan(plan: Callable[[int], Any]) -> Callable[[int], Any]:
    """Cache a function of the epoch for its last two arguments, and serialize the calls.

    All threads of the data pipeline call it when a new epoch begins, and some may still read the
    epoch before.

    Args:
        plan: Function of the epoch index.

    Returns:
        Function with the same argument and result.
    """
    cached_plan = functools.lru_cache(2)(plan)
    lock = threading.Lock()

    def locked_plan(epoch):
        with lock:
            return cached_plan(epoch)

    return locked_plan


def check_shard(shard_index: int, num_shards: int) -> None:
    """Check that `shard_index` is in [0, num_shards).

    Raises:
        InputError: If it is not.
    """
    if not 0 <= shard_index < num_shards:
        raise InputError(
            f"`{shard_index=}` must be between 0 and {num_shards - 1} for {num_shards} data ranks."
        )
