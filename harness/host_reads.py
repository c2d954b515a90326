"""Count tensor reads and waits of the host in each step of `fit`."""

import keras
import tensorflow as tf

from dtransformer.parallel.runtime import job


class HostReads(keras.callbacks.Callback):
    """Callback that records the size of each tensor read and each collective that the host waits for.

    Attributes:
        bytes: List with a list of the read sizes for each step.
        collectives: List with a list of the collectives' names for each step.
    """

    _KIND = type(tf.constant(0))

    def on_train_begin(self, logs=None):
        self.bytes, self.collectives, self._now = [], [], ([], [])
        self._real = read, wait = self._KIND._numpy_internal, job.record_wait

        def counted(tensor):
            array = read(tensor)
            self._now[0].append(array.nbytes)
            return array

        def waiting(collective, ranks):
            if tf.executing_eagerly():
                self._now[1].append(collective)
            return wait(collective, ranks)

        self._KIND._numpy_internal, job.record_wait = counted, waiting

    def on_train_batch_begin(self, batch, logs=None):
        self._now = [], []

    def on_train_batch_end(self, batch, logs=None):
        sizes, names = self._now
        self.bytes.append([*sizes])
        self.collectives.append([*names])

    def on_train_end(self, logs=None):
        self._KIND._numpy_internal, job.record_wait = self._real
