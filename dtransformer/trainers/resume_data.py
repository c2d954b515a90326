"""Datasets that begin in the middle of an epoch."""

import itertools
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from dtransformer import _compat
from dtransformer.errors import InputError
from dtransformer.inputs.autotuning import without_autotuning


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
    num_batches, starts = steps_per_epoch or size, iter([position["batch"]])
    if steps_per_epoch:
        first = position["epoch"] * num_batches + position["batch"]
        later = (epoch * num_batches for epoch in itertools.count(position["epoch"] + 1))
        starts = (start % size if size > 0 else start for start in itertools.chain([first], later))
        data = data.repeat() if size > 0 else data

    def remaining(_):
        start = tf.numpy_function(lambda: np.int64(next(starts, 0)), [], tf.int64)
        return data.skip(start)

    dataset = tf.data.Dataset.range(1).flat_map(remaining).prefetch(tf.data.AUTOTUNE)
    dataset = without_autotuning(dataset)
    return _compat.with_cardinality(dataset, num_batches), num_batches
