"""Files of Keras' layers that a mesh has sharded load in a single process and back."""

import pathlib
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.trainers import Trainer
from harness.keras_networks import gpt, make_batch
from harness.tolerances import PARITY_LOGITS, PARITY_LOSS
from tests.on_mesh import on_mesh, start, stop

INPUTS, LABELS = make_batch("gpt")


def make_trainer():
    keras.backend.clear_session()  # Paths start from the beginning.
    keras.utils.set_random_seed(0)
    trainer = Trainer(gpt())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainer.compile(keras.optimizers.AdamW(0.01), loss)
    return trainer


def train(trainer):
    return trainer.fit(INPUTS, LABELS, 8, shuffle=False, verbose=0).history["loss"]


def predict(model):
    return model.predict(INPUTS, batch_size=8, verbose=0)


@on_mesh
def test_files_of_a_mesh_load_without_one():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        start(model_parallel=2)
        trainer = make_trainer()
        train(trainer)
        trainer.save(folder / "checkpoint")
        trainer.save(folder / "model.keras")
        trainer.save_weights(folder / "model.weights.h5")
        trainer.export(folder / "export", verbose=False)
        outputs = predict(trainer)
        losses = train(trainer)
        stop()
        restored = make_trainer()
        restored.restore(folder / "checkpoint")
        np.testing.assert_allclose(predict(restored), outputs, atol=PARITY_LOGITS)
        assert train(restored) == pytest.approx(losses, PARITY_LOSS)
        network = make_trainer().network
        network.load_weights(folder / "model.weights.h5")
        np.testing.assert_allclose(predict(network), outputs, atol=PARITY_LOGITS)
        loaded = keras.saving.load_model(folder / "model.keras")
        np.testing.assert_allclose(predict(loaded), outputs, atol=PARITY_LOGITS)
        exported = tf.saved_model.load(folder / "export")
        np.testing.assert_allclose(exported.serve(tf.constant(INPUTS)), outputs, atol=PARITY_LOGITS)


@on_mesh
def test_checkpoint_of_one_process_loads_on_a_mesh():
    with tempfile.TemporaryDirectory() as name:
        trainer = make_trainer()
        train(trainer)
        trainer.save(f"{name}/checkpoint")
        losses = train(trainer)
        start(data_parallel=2, model_parallel=2, optimizer_shard=1)
        restored = make_trainer()
        restored.restore(f"{name}/checkpoint")
        assert train(restored) == pytest.approx(losses, PARITY_LOSS)
