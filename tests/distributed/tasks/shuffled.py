"""Train on data that Keras shuffles, in one process and on ranks."""

import keras
import numpy as np

from dtransformer.trainers import Trainer

rng = np.random.default_rng(0)
X = rng.standard_normal((40, 3)).astype("float32")
Y = X[:, :1] ** 2
WEIGHT = rng.random(40).astype("float32")


class Rows(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, i):
        rows = slice(8 * i, 8 * i + 8)
        return X[rows], Y[rows]


class Steps(keras.callbacks.Callback):
    """Callback that stores the loss of each step."""

    def on_train_begin(self, logs=None):
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["step_loss"])


def losses(*data, **options):
    """Call `fit` twice with two epochs and return the loss of each step. The orders differ."""
    initializer = keras.initializers.Constant(0.1)
    network = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(1, kernel_initializer=initializer)]
    )
    trainer, step_losses = Trainer(network), []
    trainer.compile(keras.optimizers.SGD(0.01), "mse")
    for _ in range(2):
        steps = Steps()
        trainer.fit(*data, epochs=2, verbose=0, callbacks=[steps], **options)
        step_losses += steps.losses
    return step_losses


def shuffled():
    return {
        "arrays": losses(X, Y, batch_size=8),
        "split": losses(X, Y, batch_size=8, validation_split=0.2),
        "py_dataset": losses(Rows()),
    }


def shuffled_by_options():
    return {
        "unseeded_arrays": losses({"a": X}["a"], Y, 8, shuffle=True, sample_weight=WEIGHT),
        "batches": losses(X, Y, batch_size=8, shuffle="batch"),
        "steps_per_epoch": losses(X, Y, batch_size=8, steps_per_epoch=3),
        "py_dataset_with_workers": losses(Rows(workers=2)),
    }


TASKS = {"shuffled": shuffled, "shuffled_by_options": shuffled_by_options}
