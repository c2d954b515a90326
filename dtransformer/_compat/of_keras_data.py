"""Private names of Keras' data adapters."""

import itertools

import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters import array_data_adapter
from keras.src.trainers.data_adapters import py_dataset_adapter as py_dataset_adapter

from dtransformer._compat.of_optimizers import meanwhile


class ShuffleOrder:
    """The order in which Keras draws the rows of arrays and the batches of a `PyDataset`.

    Keras uses the random numbers of the process. They differ between ranks, and with a global seed
    of TensorFlow they repeat in every epoch. Unnecessary if Keras' `fit` took a seed.

    Args:
        seed: Integer.
        epoch: Integer, the first epoch. Each epoch has another order.
    """

    def __init__(self, seed: int, epoch: int = 0):
        self._seed, self._draws = seed, itertools.count(epoch)

    def shuffle(self, items):
        """Shuffle a list or an array in place, in another order in every call; return it.

        Keras shuffles the batches of a `PyDataset` in this order if `py_dataset_adapter.random` is
        this object.
        """
        np.random.default_rng([self._seed, next(self._draws)]).shuffle(items)
        return items

    def adapter(self, x, y, sample_weight, *options):
        """Return Keras' adapter that draws rows in this order, or `x` if the data are no arrays.

        Args:
            x, y, sample_weight: As in `keras.Model.fit`.
            *options: The other arguments of Keras' `ArrayDataAdapter`.
        """
        if not array_data_adapter.can_convert_arrays((x, y, sample_weight)):
            return x
        adapter = array_data_adapter.ArrayDataAdapter(x, y, sample_weight, *options)
        with meanwhile(tf.random, shuffle=self._shuffled):  # Only Keras' code runs in here.
            dataset = adapter.get_tf_dataset()
        adapter.get_tf_dataset = lambda: dataset
        return adapter

    def _shuffled(self, indices):
        def copied(array):
            return self.shuffle(array.copy())

        order = tf.numpy_function(copied, [indices], indices.dtype)
        return tf.ensure_shape(order, indices.shape)
