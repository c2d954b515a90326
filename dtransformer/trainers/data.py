"""Input data of `fit`, `evaluate` and `predict`: datasets, arrays, loaders and their checks."""

import itertools
import sys
import types
import typing

import keras
import numpy as np
import tensorflow as tf

from dtransformer.inputs.autotuning import without_autotuning
from dtransformer.parallel.collectives.objects import all_gather_json
from dtransformer.parallel.runtime import job
from dtransformer.parallel.tracing.tensor_specs import count_rows
from dtransformer.trainers.row_sharding import RowSharding

_KERAS_BATCH_SIZE = 32


class DataPosition:
    """Position of a `fit` in its data, for checkpoints.

    Args:
        data: Data as passed to `fit`. If they have a method `set_epoch`, it is called before each
            epoch.
        first_batch: Index of the first batch of the first epoch.
        num_batches: Number of batches of an epoch, or `None` if it is unknown.
    """

    def __init__(self, data, first_batch=0, num_batches=None):
        self._data = data
        self._num_batches = num_batches
        self._next_start = first_batch
        self._start = 0
        self._epoch = 0
        self._batch = 0

    def value(self):
        """Return a dict with the next `epoch` and `batch`."""
        if hasattr(self._data, "position"):
            return self._data.position(self._batch - self._start)
        return {"epoch": self._epoch, "batch": self._batch}

    def begin_epoch(self, epoch):
        if hasattr(self._data, "set_epoch"):
            self._data.set_epoch(epoch)
        self._start = self._next_start
        self._next_start = 0
        self._epoch = epoch
        self._batch = self._start

    def end_batch(self, batch):
        """Count the batches up to index `batch`.

        With `steps_per_execution` the index may exceed the last batch of the epoch.
        """
        num_batches = batch + 1
        if self._num_batches is not None:
            num_batches = min(num_batches, self._num_batches)
        self._batch = max(self._batch, num_batches)

    def end_epoch(self, epoch, is_stopping):
        """Move to the next epoch, unless training stops in the middle of this one."""
        is_complete = self._num_batches is not None and self._batch >= self._num_batches
        if (is_complete or not is_stopping) and not hasattr(self._data, "position"):
            self._epoch = epoch + 1
            self._batch = 0


class InputData(typing.NamedTuple):
    """Data of `fit`, `evaluate` or `predict`.

    Args:
        first: First batch or its specs, see `peek`.
        data: Data as Keras takes them.
        sharding: `RowSharding` of the batches.
    """

    first: object
    data: object
    sharding: RowSharding


def prepare_data(x, shard, network):
    """Return the `InputData` of a call, compared between the ranks.

    Args:
        x, shard: As in `Trainer.fit`.
        network: The `keras.Model`.

    Raises:
        ValueError: If the data are not batched, or if the ranks have different numbers of batches.
    """
    first, data = peek(as_data(x))
    check_batched(first, network)
    check_batches(data)
    return InputData(first, data, RowSharding.from_data(x, shard))


def as_data(data):
    """Return data as Keras takes them."""
    data = data.as_dataset() if hasattr(data, "as_dataset") else data
    return without_autotuning(data) if isinstance(data, tf.data.Dataset) else data


def peek(data):
    """Return the first batch of some data, and data that still contain this batch.

    Args:
        data: Data as Keras takes them.

    Returns:
        A `(first, data)` tuple. `first` is a tuple `(x, y, sample_weight)`, or a shorter one, as
        `keras.utils.unpack_x_y_sample_weight` takes it. It contains specs for a `tf.data.Dataset`
        and otherwise arrays, for array data only x, with at most 64 rows. It is `None` if the data
        cannot be read without consuming them. `data` is a new generator if a generator was passed,
        otherwise the argument itself.
    """
    if isinstance(data, tf.data.Dataset):
        return data.element_spec, data
    if isinstance(data, keras.utils.PyDataset):
        return data[0], data
    if isinstance(data, types.GeneratorType):
        first = list(itertools.islice(data, 1))
        # Keras accepts a generator, but no other iterator.
        restarted = (batch for batch in itertools.chain(first, data))
        return (first[0] if first else None), restarted
    if not _are_arrays(data):
        return _peek_loader(data), data
    arrays = [x for x in tf.nest.flatten(data) if x is not None]
    # Sparse arrays cannot be sliced.
    if not all(hasattr(x, "__getitem__") for x in arrays):
        return None, data
    return (tf.nest.map_structure(lambda x: None if x is None else x[:64], data),), data


def _are_arrays(data):
    return hasattr(data, "shape") or tf.nest.is_nested(data)


def _peek_loader(data):
    """Return the first batch of a PyTorch `DataLoader` without changing its random order.

    The result is `None` for other objects, empty loaders and iterable datasets.
    """
    if not any(x.__module__.startswith("torch.utils.data") for x in type(data).__mro__):
        return None
    torch = sys.modules["torch"]
    if isinstance(data.dataset, torch.utils.data.IterableDataset) or not len(data):
        # A stream would lose the batch.
        return None
    with torch.random.fork_rng(devices=[]):
        first = tf.nest.map_structure(np.asarray, next(iter(data)))
    return tuple(first) if isinstance(first, list) else first


def check_batched(first, network):
    """Check that the data's elements are batches, not single rows.

    The shapes of the first element are compared with the network's inputs.

    Args:
        first: First batch, see `peek`. `None` skips the check.
        network: A `keras.Model`.

    Raises:
        ValueError: If the element is a scalar or a single row.
    """
    if first is None:
        return
    batch = [x for x in tf.nest.flatten(first) if getattr(x, "shape", None) is not None]
    inputs = keras.utils.unpack_x_y_sample_weight(first)[0]
    ranks = [
        len(x.shape)
        for x in getattr(network, "inputs", None) or ()
        if x.shape[-1] != 1  # Keras adds this dimension to rank-1 inputs.
    ]
    # Inputs of this package's models are tokens [b, s].
    if hasattr(network, "named_inputs"):
        ranks = [2] * len(tf.nest.flatten(inputs))
    input_ranks = [tf.TensorShape(getattr(x, "shape", None)).rank for x in tf.nest.flatten(inputs)]
    shapes = [tuple(x.shape) for x in batch if x.shape != tf.TensorShape(None)]
    are_rows = (
        ranks and None not in input_ranks and sorted(input_ranks) == sorted(r - 1 for r in ranks)
    )
    if () in shapes or are_rows:
        raise ValueError(
            f"The data's elements have the shapes {shapes}, without a batch dimension. Call "
            "`batch(...)` on the dataset."
        )


def check_batches(data):
    """Check that all ranks have the same number of batches, if the data are a `tf.data.Dataset`.

    Otherwise a rank with more batches would wait for the other ranks forever.

    Raises:
        ValueError: If the numbers differ. All ranks raise the error.
    """
    if not isinstance(data, tf.data.Dataset):
        return
    counts = all_gather_json(int(data.cardinality()), "number_of_batches")
    for rank, count in enumerate(counts):
        if count != counts[0]:
            raise ValueError(
                f"Rank 0 has {counts[0]} batches and rank {rank} has {count}. Every rank needs "
                "the same number of batches, with its rows of each global batch."
            )


def check_micro_batches(data, batch_size=None):
    """Check that the first batch, and the last batch of arrays, divide into micro-batches.

    Datasets are checked batch by batch.

    Args:
        data: `InputData`.
        batch_size: Batch size of arrays.

    Raises:
        ValueError: If the rows of a batch do not divide, see `check_rows`.
    """
    if job.row_multiple() == 1 or isinstance(data.data, tf.data.Dataset):
        return
    num_shards = data.sharding.num_shards
    if _are_arrays(data.data):
        num_rows = _count_rows(data.data)
        batch_size = batch_size or _KERAS_BATCH_SIZE
        check_rows(min(num_rows, batch_size) / num_shards)
        check_rows(num_rows % batch_size / num_shards)
    elif data.first is not None:
        check_rows(_count_rows(data.first) / num_shards)


def _count_rows(batch):
    return int(count_rows(tf.nest.flatten(batch)[0]))


def check_rows(num_rows):
    """Check that a number of local rows can be divided into micro-batches.

    Args:
        num_rows: Number of rows on this rank.

    Raises:
        ValueError: If the number of micro-batches does not divide it.
    """
    multiple = job.row_multiple()
    if num_rows % multiple:
        shards = job.data_shard()[1]
        raise ValueError(
            f"{num_rows:g} rows per rank cannot be divided into `micro_batch_num={multiple}` equal "
            "micro-batches, as a pipeline requires. Use batches with a multiple of "
            f"{multiple * shards} rows, {multiple} per data shard."
        )


def element_specs(first):
    """Return the specs of a first batch, so that its rows need not stay in memory.

    The batch size becomes `None`. See `peek`.
    """

    def spec(x):
        if x is None or isinstance(x, tf.TypeSpec):
            return x
        if isinstance(x, (tf.RaggedTensor, tf.SparseTensor)):
            return tf.type_spec_from_value(x)
        row = tf.convert_to_tensor(x[:1])
        return tf.TensorSpec([None, *row.shape[1:]], row.dtype)

    return first if first is None else tf.nest.map_structure(spec, first)


def input_symbols(first):
    """Return symbolic inputs that build a network for batches like the first one.

    Args:
        first: First batch, see `peek`.

    Returns:
        Nested `keras.KerasTensor`s with an unknown batch size.

    Raises:
        ValueError: If `first` is `None`.
    """
    return tf.nest.map_structure(
        lambda x: keras.KerasTensor(
            (None, *x.shape[1:]),
            x.dtype.name,
            sparse=isinstance(x, tf.SparseTensorSpec),
            ragged=isinstance(x, tf.RaggedTensorSpec),
        ),
        _element_inputs(first),
    )


def input_specs(first):
    """Return the specs of the inputs of a small batch.

    Args:
        first: First batch, see `peek`.

    Returns:
        Nested `tf.TensorSpec`s. The batch size and all unknown dimensions are 4.

    Raises:
        ValueError: If `first` is `None`.
    """
    return tf.nest.map_structure(
        lambda x: tf.TensorSpec([4, *(size or 4 for size in x.shape[1:])], x.dtype),
        _element_inputs(first),
    )


def _element_inputs(first):
    if first is None:
        raise ValueError("The network is not built. Call it on a batch before training.")
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(first)
    return element_specs(inputs)
