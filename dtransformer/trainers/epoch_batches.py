"""Batches of each epoch. The first epoch may start in the middle."""

import itertools
import math

import tensorflow as tf

from dtransformer import _compat


class EpochBatches:
    """Batches of the epochs of a `fit`, made by Keras' data adapters.

    Args:
        start: `StartPoint` of the training.
        options: `FitOptions`.
        steps_per_execution: Number of batches per call of the training step.
        order: `ShuffleOrder` of arrays.

    Attributes:
        start: The `StartPoint`.
    """

    def __init__(self, start, options, steps_per_execution, order):
        self.start = start
        self._steps_per_execution = steps_per_execution
        samples = options.samples._replace(x=start.data)
        if options.shuffle:
            data = order.adapter(
                *samples,
                options.steps_per_epoch,
                options.shuffle,
                options.class_weight,
            )
            samples = samples._replace(x=data)
        self._iterator = _compat.EpochIterator(
            **samples._asdict(),
            steps_per_epoch=options.steps_per_epoch,
            shuffle=options.shuffle and not isinstance(samples.x, tf.data.Dataset),
            class_weight=options.class_weight,
            steps_per_execution=steps_per_execution,
        )
        self._iterator.reset()

    @property
    def num_batches(self):
        """Number of batches of an epoch, or `None` if it is unknown."""
        return self.start.num_batches or self._iterator.num_batches

    def is_resumed(self, epoch):
        """Return whether an epoch starts in the middle."""
        return epoch == self.start.epoch and self.start.batch > 0

    def epoch(self, epoch):
        """Yield `(first_step, last_step, iterator)` for each call of the training step.

        Steps are counted from the beginning of the epoch, also if it is resumed in the middle.
        """
        offset = 0
        num_calls = None
        if self.is_resumed(epoch):
            offset = self.start.batch
            num_calls = math.ceil((self.start.num_batches - offset) / self._steps_per_execution)
        for first_step, last_step, iterator in itertools.islice(self._iterator, num_calls):
            yield first_step + offset, last_step + offset, iterator

    def until_exhausted(self):
        """Return a context that ends the epoch if the data run out; Keras warns then."""
        return self._iterator.catch_stop_iteration()
