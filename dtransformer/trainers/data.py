"""Data of `fit`: datasets, arrays, or objects that make a dataset of every epoch."""

import itertools
import sys
import types

import keras
import numpy as np
import tensorflow as tf

from dtransformer.inputs.autotuning import without_autotuning
from dtransformer.parallel.collectives import transport
from dtransformer.parallel.collectives.objects import all_gather_json
from dtransformer.parallel.runtime import job
from dtransformer.parallel.tracing.tensor_specs import number_of_rows

_KERAS_BATCH_SIZE = 32


class DataPosition(keras.callbacks.Callback):
    """Tells the data which epoch comes next, and counts batches, for checkpoints.

    It also begins the logs of every epoch anew.

    Args:
        data: as `fit` takes them.
        first_batch: the batch that the first epoch begins with.
    """

    def __init__(self, data, first_batch=0):
        super().__init__()
        self._data = data
        self._begins_at, self._begun_at = first_batch, 0  # the next epoch, and this one
        self._epoch = self._batch = 0

    def value(self):
        """Return where training stands, a dict with the `epoch` and `batch` that come next."""
        if hasattr(self._data, "position"):
            return self._data.position(self._batch - self._begun_at)
        return {"epoch": self._epoch, "batch": self._batch}

    def on_epoch_begin(self, epoch, logs=None):
        self.model._begin_epoch()
        if hasattr(self._data, "set_epoch"):
            self._data.set_epoch(epoch)
        self._begun_at, self._begins_at = self._begins_at, 0
        self._epoch, self._batch = epoch, self._begun_at

    def on_train_batch_end(self, batch, logs=None):
        steps = self.params.get("steps")  # several steps at a time may count beyond it
        self._batch = max(self._batch, batch + 1 if steps is None else min(batch + 1, steps))

    def on_epoch_end(self, epoch, logs=None):
        steps = self.params.get("steps")
        is_over = not self.model.stop_training or (steps is not None and self._batch >= steps)
        if is_over and not hasattr(self._data, "position"):
            self._epoch, self._batch = epoch + 1, 0


def as_data(data):
    """Return data as Keras takes them."""
    data = data.as_dataset() if hasattr(data, "as_dataset") else data
    return without_autotuning(data) if isinstance(data, tf.data.Dataset) else data


def peek(data):
    """Return a first batch, and the data to go on with: a generator is another one then.

    Args:
        data: as Keras takes them.

    Returns:
        A tuple (x, y, sample_weight), or shorter, of arrays or of specs, as
        `keras.utils.unpack_x_y_sample_weight` takes it; None where there is none to see. Of
        arrays only the x that were given, at most 64 rows.
        The data.
    """
    if isinstance(data, tf.data.Dataset):
        return data.element_spec, data
    if isinstance(data, keras.utils.PyDataset):
        return data[0], data
    if isinstance(data, types.GeneratorType):
        first = list(itertools.islice(data, 1))
        again = (batch for batch in itertools.chain(first, data))  # Keras asks for a generator
        return (first[0] if first else None), again
    if not _are_arrays(data):
        return _first_of_loader(data), data
    arrays = [x for x in tf.nest.flatten(data) if x is not None]
    if not all(hasattr(x, "__getitem__") for x in arrays):  # sparse ones have no rows to take
        return None, data
    return (tf.nest.map_structure(lambda x: None if x is None else x[:64], data),), data


def _are_arrays(data):
    return hasattr(data, "shape") or tf.nest.is_nested(data)


def _first_of_loader(data):
    """Return the first batch of a PyTorch `DataLoader`, which draws no other order for it."""
    if not any(x.__module__.startswith("torch.utils.data") for x in type(data).__mro__):
        return None
    torch = sys.modules["torch"]
    if isinstance(data.dataset, torch.utils.data.IterableDataset) or not len(data):
        return None  # of a stream the batch would be gone
    with torch.random.fork_rng(devices=[]):
        first = tf.nest.map_structure(np.asarray, next(iter(data)))
    return tuple(first) if isinstance(first, list) else first


def check_batched(first, network):
    """Check that what comes first is a batch, not a row: datasets have to be batched.

    Args:
        first: a first batch, see `peek`.
        network: a `keras.Model`.

    Raises:
        ValueError: it is a row.
    """
    if first is None:
        return
    batch = [x for x in tf.nest.flatten(first) if getattr(x, "shape", None) is not None]
    inputs = keras.utils.unpack_x_y_sample_weight(first)[0]
    ranks = [
        len(x.shape)
        for x in getattr(network, "inputs", None) or ()
        if x.shape[-1] != 1  # Keras adds such a dimension
    ]
    if hasattr(network, "named_inputs"):  # one of ours, of tokens [b, s]
        ranks = [2] * len(tf.nest.flatten(inputs))
    own = [tf.TensorShape(getattr(x, "shape", None)).rank for x in tf.nest.flatten(inputs)]
    shapes = [tuple(x.shape) for x in batch if x.shape != tf.TensorShape(None)]
    if () in shapes or (ranks and None not in own and sorted(own) == sorted(r - 1 for r in ranks)):
        raise ValueError(
            f"the data's elements have the shapes {shapes}, without the batch's dimension: call "
            "batch(...) on the dataset"
        )


def check_batches(data):
    """Compare the ranks' numbers of batches: a rank that has more waits for the others for ever.

    Raises:
        ValueError: it differs; on every rank.
    """
    if not isinstance(data, tf.data.Dataset):
        return
    numbers = all_gather_json(int(data.cardinality()), "number_of_batches")
    for rank, number in enumerate(numbers):
        if number != numbers[0]:
            raise ValueError(
                f"rank 0 has {numbers[0]} batches and rank {rank} has {number}: give every rank the "
                "same number, its own rows of each global batch"
            )


def check_micro_batches(data, first, batch_size=None, num_shards=1):
    """Check that the first batch, and an array's last, can be divided into micro-batches.

    Args:
        data: as Keras takes them, but no dataset.
        first: their first batch, see `peek`.
        batch_size: of arrays.
        num_shards: by how many data shards a batch is divided first.

    Raises:
        ValueError: see `check_rows`.
    """
    rows = lambda batch: int(number_of_rows(tf.nest.flatten(batch)[0]))
    if not _are_arrays(data):
        if first is not None:
            check_rows(rows(first) / num_shards)
    else:
        number, size = rows(data), batch_size or _KERAS_BATCH_SIZE
        check_rows(min(number, size) / num_shards)
        check_rows(number % size / num_shards)


def check_rows(number):
    """Check that a batch can be divided into micro-batches.

    Args:
        number: number of this rank's rows.

    Raises:
        ValueError: it cannot.
    """
    multiple = job.rows_multiple_of()
    if number % multiple:
        shards = job.data_shard()[1]
        raise ValueError(
            f"a batch of {number:g} rows a rank cannot be divided into micro_batch_num={multiple} "
            f"equal micro-batches, as a pipeline needs: give batches of a multiple of "
            f"{multiple * shards} rows, {multiple} a data shard"
        )


def element_specs(first):
    """Return a first batch's specs, which keep no rows in memory; see `peek`."""

    def spec(x):
        if x is None or isinstance(x, tf.TypeSpec):
            return x
        if isinstance(x, (tf.RaggedTensor, tf.SparseTensor)):
            return tf.type_spec_from_value(x)
        row = tf.convert_to_tensor(x[:1])
        return tf.TensorSpec([None, *row.shape[1:]], row.dtype)

    return first if first is None else tf.nest.map_structure(spec, first)


def input_symbols(first):
    """Return `keras.KerasTensor`s like a batch's inputs, to build a network with.

    Args:
        first: a first batch, see `peek`.

    Raises:
        ValueError: there is none.
    """
    kinds = {"sparse": tf.SparseTensorSpec, "ragged": tf.RaggedTensorSpec}
    return tf.nest.map_structure(
        lambda x: keras.KerasTensor(
            (None, *x.shape[1:]),
            x.dtype.name,
            **{name: isinstance(x, kind) for name, kind in kinds.items()},
        ),
        _inputs_of(first),
    )


def input_specs(first):
    """Return specs like those of a small batch's inputs; dimensions that may vary are 4.

    Args:
        first: a first batch, see `peek`.

    Raises:
        ValueError: there is none.
    """
    return tf.nest.map_structure(
        lambda x: tf.TensorSpec([4, *(size or 4 for size in x.shape[1:])], x.dtype),
        _inputs_of(first),
    )


def _inputs_of(first):
    if first is None:
        raise ValueError("the network is not built: call it on a batch before training")
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(first)
    return element_specs(inputs)


# Row sharding of global batches, and the outputs put together again.


def shards_rows(data: object, shard: bool | None) -> bool:
    """Return whether data are the same on every rank, of which each data shard takes its rows.

    Args:
        data: as `fit` takes them.
        shard: as of `fit`.
    """
    if job.data_shard()[1] == 1:
        return False
    if shard is not None:
        return shard
    return not hasattr(data, "as_dataset") or getattr(data, "num_shards", None) == 1


def own_rows(batch: object) -> object:
    """Return this data shard's rows of nested tensors [b, ...]; see `rows_of`."""
    return rows_of(batch, *job.data_shard())


def rows_of(batch: object, i: int | tf.Tensor, number: int) -> object:
    """Return the i-th of a number of parts of nested tensors [b, ...], where None stays None.

    The first part has the first rows. Where b cannot be divided, some have a row more than others.
    Batches are in the host's memory; a GPU gets its rows of them.
    """

    def take(x):
        rows = number_of_rows(x)
        with tf.device("CPU:0"):
            return x[rows * i // number : rows * (i + 1) // number]

    return keras.tree.map_structure(lambda x: None if x is None else take(x), batch)


def all_rows(outputs: object) -> object:
    """Return nested outputs [b, ...] of all rows, from those [b', ...] of each data shard's."""
    group = job.data_parallel_group()
    flat = [
        transport.concatenate(tf.convert_to_tensor(x), group, f"all_rows_{number}")
        for number, x in enumerate(keras.tree.flatten(outputs))
    ]
    return keras.tree.pack_sequence_as(outputs, flat)
