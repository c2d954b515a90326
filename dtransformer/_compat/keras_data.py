"""Private names of Keras: data of `fit`."""

import contextlib
import itertools

import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.trainers.data_adapters import (
    array_data_adapter,
    array_slicing,
    data_adapter_utils,
    py_dataset_adapter,
    tf_dataset_adapter,
)

from dtransformer._compat.keras_step import patched

# `fit` splits arrays with `train_validation_split`. The trainer must know the training rows before
# Keras splits them. Unnecessary if Keras exported it.
train_validation_split = array_slicing.train_validation_split


def with_class_weights(dataset: tf.data.Dataset, class_weight: dict) -> tf.data.Dataset:
    """Return a dataset of (inputs, labels) with the sample weights of `fit(class_weight=...)`.

    When Keras maps a dataset itself, it loses an asserted cardinality. Unnecessary if Keras kept
    it.
    """
    weigh = tf_dataset_adapter.make_class_weight_map_fn(class_weight)
    return dataset.map(weigh, num_parallel_calls=tf.data.AUTOTUNE)


class EpochIterator(TFEpochIterator):
    """Keras' iterator over the batches of an epoch: arrays, datasets, generators and others.

    Each iteration yields `(first_step, last_step, iterator)`. Unnecessary if Keras exported its
    data adapters.

    Args:
        **options: `x`, `y`, `sample_weight`, `batch_size`, `steps_per_epoch`, `shuffle` and
            `class_weight` as in `keras.Model.fit`, and `steps_per_execution`.
    """

    def __init__(self, **options):
        super().__init__(distribute_strategy=tf.distribute.get_strategy(), **options)


class ShuffleOrder:
    """Order of array rows and `PyDataset` batches that is equal on all ranks.

    Keras uses the random state of the process. It differs between ranks, and with a global seed of
    TensorFlow it repeats in every epoch. Unnecessary if Keras' `fit` took a seed.

    Args:
        seed: Integer.
        epoch: Integer, the first epoch. Each epoch has another order.
    """

    def __init__(self, seed: int, epoch: int = 0):
        self._seed = seed
        self._draws = itertools.count(epoch)

    def shuffle(self, items):
        """Shuffle a list or an array in place, in another order in every call; return it."""
        np.random.default_rng([self._seed, next(self._draws)]).shuffle(items)
        return items

    def for_py_datasets(self) -> contextlib.AbstractContextManager:
        """Inside the `with` block Keras shuffles the batches of a `PyDataset` in this order."""
        return patched(py_dataset_adapter, random=self)

    def adapter(self, x, y, sample_weight, *options):
        """Return a Keras adapter with this order of rows, or `x` if the data are not arrays.

        Args:
            x, y, sample_weight: As in `keras.Model.fit`.
            *options: The other arguments of Keras' `ArrayDataAdapter`.
        """
        if not array_data_adapter.can_convert_arrays((x, y, sample_weight)):
            return x
        adapter = array_data_adapter.ArrayDataAdapter(x, y, sample_weight, *options)
        with patched(tf.random, shuffle=self._shuffled):  # Only Keras' code runs in here.
            dataset = adapter.get_tf_dataset()

        def get_tf_dataset():
            return dataset

        adapter.get_tf_dataset = get_tf_dataset
        return adapter

    def _shuffled(self, indices):
        order = tf.numpy_function(
            lambda array: self.shuffle(array.copy()), [indices], indices.dtype
        )
        return tf.ensure_shape(order, indices.shape)


def class_weight_to_sample_weight(labels, class_weight: dict, sample_weight=None):
    """Return the sample weights that `train_on_batch(class_weight=...)` uses.

    Unnecessary if Keras exported the conversion.

    Raises:
        ValueError: If there are also sample weights.
    """
    if sample_weight is not None:
        raise ValueError(
            "Received both `class_weight` and `sample_weight`. Multiply them, and pass "
            "`sample_weight` only."
        )
    return data_adapter_utils.class_weight_to_sample_weights(labels, class_weight)
