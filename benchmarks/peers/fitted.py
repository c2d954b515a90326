"""Steps of a Keras model by `fit`, and how long each takes."""

import itertools

import keras
import tensorflow as tf
from workloads import clock


class Stopwatch(keras.callbacks.Callback):
    """Keeps when it was made, and when each step ended."""

    def __init__(self):
        super().__init__()
        self.start, self.ends = clock(), []

    def on_train_batch_end(self, batch, logs=None):
        self.ends.append(clock())


def fitted(model, inputs, labels):
    """Return a function of n that fits n steps on one batch; seconds are those between ends.

    The first step's are from the start of `fit`. The function's `result` has the losses of the calls
    of one step each.
    """
    data = tf.data.Dataset.from_tensors((inputs, labels)).repeat()

    def run(number):
        stopwatch = Stopwatch()
        # One more than is counted: until the first one's end `fit` prepares.
        extra = 0 if number == 1 else 1
        history = model.fit(data, steps_per_epoch=number + extra, verbose=0, callbacks=[stopwatch])
        if not extra:
            run.result.append(history.history["loss"][-1])
        ends = stopwatch.ends if extra else [stopwatch.start, *stopwatch.ends]
        return [end - begin for begin, end in itertools.pairwise(ends)]

    run.result = []
    return run
