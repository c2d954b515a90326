"""Time the training steps of a Keras model's `fit`."""

import itertools

import keras
import tensorflow as tf
from workloads import clock


class Stopwatch(keras.callbacks.Callback):
    """Callback that stores the time of its creation and of the end of each step."""

    def __init__(self):
        super().__init__()
        self.start, self.ends = clock(), []

    def on_train_batch_end(self, batch, logs=None):
        self.ends.append(clock())


def fitted(model, inputs, labels):
    """Return a function of n that fits n steps on one batch and returns the seconds of each.

    The first step counts from the start of `fit`, the others from the end of the previous step. The
    `result` attribute of the function has the losses of all calls with a single step.
    """
    data = tf.data.Dataset.from_tensors((inputs, labels)).repeat()

    def run(num_steps):
        stopwatch = Stopwatch()
        # The first of several steps does not count, because it includes the preparation by `fit`.
        extra = 0 if num_steps == 1 else 1
        history = model.fit(
            data, steps_per_epoch=num_steps + extra, verbose=0, callbacks=[stopwatch]
        )
        if not extra:
            run.result.append(history.history["loss"][-1])
        ends = stopwatch.ends if extra else [stopwatch.start, *stopwatch.ends]
        return [end - begin for begin, end in itertools.pairwise(ends)]

    run.result = []
    return run
