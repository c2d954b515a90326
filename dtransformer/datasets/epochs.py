"""Epochs of batches that are made by their numbers, and the position from which they go on."""

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
    """Epochs of so many batches each, of which one is chosen with `set_epoch`.

    A batch is made of its number, the seed and the epoch. `Trainer.fit` calls `set_epoch` before
    each epoch, and keeps `position` in checkpoints.

    Args:
        num_batches: number of batches of an epoch.
        seed: what the shuffling depends on, besides the epoch.
        **same: what else has to be the same when a run goes on, as JSON has it.
    """

    def __init__(self, num_batches: int, seed: int, **same: object):
        self._num_batches, self._seed = num_batches, seed
        self._epoch, self._first_batch = 0, 0
        self._same = {"num_batches": num_batches, "seed": seed, **same}

    @abc.abstractmethod
    def batch(self, epoch: int, batch: int) -> tuple:
        """Return this rank's rows of a batch of an epoch, nested arrays."""

    @abc.abstractmethod
    def spec(self) -> tuple:
        """Return the `tf.TensorSpec`s of a batch, in its structure."""

    def as_dataset(self) -> tf.data.Dataset:
        """Return a dataset of one epoch, that of `set_epoch` when an iteration begins.

        Its `cardinality()` is that of a full epoch. An epoch that begins in its middle has
        fewer batches; Keras then warns that it ran out of data, and goes on to the next.
        """
        spec = self.spec()
        flat = tf.nest.flatten(spec)

        def numbers_of_batches(_):
            begin = lambda: (np.int64(self._epoch), np.int64(self._first_batch))
            epoch, first = tf.numpy_function(begin, [], [tf.int64, tf.int64])
            numbers = tf.data.Dataset.range(tf.reshape(first, []), len(self))
            return numbers.map(lambda number: (tf.reshape(epoch, []), number))

        def batch_of(epoch, number):
            make = lambda epoch, number: tf.nest.flatten(self.batch(int(epoch), int(number)))
            arrays = tf.numpy_function(make, [epoch, number], [one.dtype for one in flat])
            arrays = [tf.ensure_shape(array, one.shape) for array, one in zip(arrays, flat)]
            return tf.nest.pack_sequence_as(spec, arrays)

        dataset = tf.data.Dataset.range(1).flat_map(numbers_of_batches)
        dataset = dataset.map(batch_of, num_parallel_calls=tf.data.AUTOTUNE)
        dataset = without_autotuning(dataset.prefetch(tf.data.AUTOTUNE))
        return _compat.with_cardinality(dataset, len(self))

    def __len__(self) -> int:
        """The number of batches of a full epoch, the same on every rank."""
        return self._num_batches

    def set_epoch(self, epoch: int, start: int | None = None) -> None:
        """Choose the epoch that the next iteration goes through, and its first batch.

        Args:
            epoch: number of the epoch, from 0.
            start: the batch to begin with. By default 0; or, where this epoch is already
                chosen, what was chosen with it, so that `Trainer.fit` keeps the position
                that `restore` has set.

        Raises:
            InputError: there is no such batch.
        """
        if start is None:
            start = self._first_batch if epoch == self._epoch else 0
        if epoch < 0 or not 0 <= start <= len(self):
            raise InputError(
                f"epoch {epoch}, batch {start} is no position in epochs of {len(self)} batches: "
                "restore with the data and options that the run began with"
            )
        self._epoch, self._first_batch = int(epoch), int(start)

    def position(self, batches_done: int = 0) -> dict[str, int | str]:
        """Return where training stands, to go on from there with `restore`.

        Args:
            batches_done: number of batches that were trained on since the iteration began. (The
                pipeline itself cannot tell: it is always some batches ahead.)

        Returns:
            The `epoch` and `batch` that come next, `num_batches` and `seed`; and what else tells
            these data from others.
        """
        epoch, batch = self._epoch, self._first_batch + int(batches_done)
        if batch >= len(self):
            epoch, batch = epoch + batch // len(self), batch % len(self)
        return {"epoch": epoch, "batch": batch, **self._same}

    def restore(self, position: Mapping[str, int | str]) -> None:
        """Go to a position: the next iteration begins with its batch.

        Args:
            position: what `position` returned.

        Raises:
            InputError: the position is of other data or options, so that the batches that
                remain would be others.
        """
        for name, own in self._same.items():
            if position.get(name, own) != own:
                raise InputError(
                    f"the saved position has {name}={position[name]}, this data has {own}: "
                    "resume with the data, seed and batch size that the run began with"
                )
        self.set_epoch(position["epoch"], position["batch"])


def kept(plan: Callable[[int], Any]) -> Callable[[int], Any]:
    """Return a plan of epochs that is made once for this epoch, and for the one before.

    The pipeline's threads, which may still read the one before, all ask for a new epoch's.
    """
    made, one_at_a_time = functools.lru_cache(2)(plan), threading.Lock()

    def of_epoch(epoch):
        with one_at_a_time:
            return made(epoch)

    return of_epoch


def check_shard(shard_index: int, num_shards: int) -> None:
    """Check that a data rank is one of those that share a batch.

    Raises:
        InputError: it is not.
    """
    if not 0 <= shard_index < num_shards:
        raise InputError(
            f"shard_index={shard_index} is not one of {num_shards} shards: give 0 to "
            f"{num_shards - 1}"
        )
