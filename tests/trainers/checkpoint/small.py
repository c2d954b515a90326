"""Small network, trainer and data for tests of checkpoints."""

import keras
import numpy as np
import tensorflow as tf

from dtransformer.trainers import Trainer
from dtransformer.trainers.checkpoint import folders

NUM_BATCHES = 6


class Net(keras.Model):
    """A small network with weights and a running mean."""

    def __init__(self, width=8, layers=1):
        super().__init__(name="net")
        self.blocks = [keras.layers.Dense(width, name=f"block_{i}") for i in range(layers)]
        self.norm = keras.layers.BatchNormalization(name="norm")
        self.head = keras.layers.Dense(2, name="head")

    def build(self, input_shape=None):
        size = 4
        with keras.name_scope(self.name, caller=self):
            for layer in (*self.blocks, self.norm, self.head):
                layer.build((None, size))
                size = getattr(layer, "units", size)
        self.built = True

    def call(self, x, training=False):
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x, training=training))

    def get_config(self):
        return {"width": self.blocks[0].units, "layers": len(self.blocks)}


def new_trainer(optimizer=None, jit="auto", metrics=False, steps_per_execution=1, **options):
    keras.utils.set_random_seed(0)
    trainer = Trainer(Net(**options))
    loss = keras.losses.MeanSquaredError()
    trainer.compile(
        optimizer or keras.optimizers.Adam(0.01),
        loss,
        metrics=[keras.metrics.MeanAbsoluteError()] if metrics else None,
        jit_compile=jit,
        steps_per_execution=steps_per_execution,
    )
    return trainer


def dataset(num_batches=NUM_BATCHES):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4 * num_batches, 4)), rng.normal(size=(4 * num_batches, 2))
    data = tf.data.Dataset.from_tensor_slices((x.astype("float32"), y.astype("float32")))
    return data.batch(4)


def get_state(trainer):
    """Return all weights and optimizer states by name."""
    trainer.training_state()  # Builds the optimizer.
    weights = {variable.path: variable.numpy() for variable in trainer.network.variables}
    return weights | {
        f"optimizer/{index}": variable.numpy()
        for index, variable in enumerate(trainer.optimizer.variables)
    }


def assert_same_state(expected, actual):
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


def newest_checkpoint(folder):
    return folder / "step-00000007"


def flip_bit(path, position=0.5):
    content = bytearray(path.read_bytes())
    content[int(len(content) * position)] ^= 1
    path.write_bytes(content)


DATA_FILE = "state.data-00000-of-00001"


class StopAfterSteps(keras.callbacks.Callback):
    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = int(self.model.optimizer.iterations) >= self.steps


class StepRecorder(keras.callbacks.Callback):
    """Records the batch index and the loss of every step."""

    def __init__(self):
        super().__init__()
        self.batches, self.losses = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(batch)
        self.losses.append(logs["step_loss"])


def saved_steps(folder):
    return [step for step, _ in folders.saved_steps(folder)]


def run_uninterrupted(epochs=3, **options):
    trainer, recorder = new_trainer(**options), StepRecorder()
    history = trainer.fit(dataset(), epochs=epochs, verbose=0, callbacks=[recorder])
    return trainer, recorder.losses, history.history
