"""Promise: parts of a batch that are computed side by side give the batch's own numbers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import CausalLM, MicroBatchInterleaved
from dtransformer.trainers import Trainer
from harness.tolerances import PARITY_LOSS
from tests.on_mesh import on_mesh, start

IDS = np.random.default_rng(0).integers(1, 12, (24, 7)).astype("int32")


def language_model():
    return CausalLM(12, hidden_size=16, num_heads=4, num_layers=2, dropout_rate=0.0)


def losses(network, rows=24, batch_size=8):
    trainer = Trainer(network)
    trainer.compile(keras.optimizers.SGD(0.1, momentum=0.9), CrossEntropyLoss())
    x, y = IDS[:rows, :-1], IDS[:rows, 1:]
    history = trainer.fit(x, y, batch_size=batch_size, epochs=3, verbose=0, shuffle=False)
    outputs = trainer.predict(x, batch_size=batch_size, verbose=0)
    return [*history.history["step_loss"], *history.history["loss"]], outputs


@pytest.mark.parametrize(
    ["number", "rows", "batch_size"],
    [pytest.param(2, 24, 8, marks=pytest.mark.long), (2, 19, 5)],
)
def test_numbers_are_those_of_the_network(number, rows, batch_size):
    expected, logits = losses(language_model(), rows, batch_size)
    found, outputs = losses(MicroBatchInterleaved(language_model(), number), rows, batch_size)
    np.testing.assert_allclose(found, expected, rtol=PARITY_LOSS)
    np.testing.assert_allclose(outputs, logits, rtol=0, atol=1e-5)


def test_several_inputs_and_outputs():
    inputs = {"a": keras.Input((3,)), "b": keras.Input((2,))}
    together = keras.layers.Concatenate()([inputs["a"], inputs["b"]])
    network = keras.Model(inputs, {"x": together, "y": keras.layers.Dense(2)(together)})
    x = {"a": tf.random.normal((6, 3)), "b": tf.random.normal((6, 2))}
    found = MicroBatchInterleaved(network)(x)
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, network(x)
    )


def test_its_file(tmp_path):
    network = MicroBatchInterleaved(language_model(), 3, name="parts")
    expected = network(IDS[:6, :-1])
    network.save(tmp_path / "network.keras")
    loaded = keras.saving.load_model(tmp_path / "network.keras")
    assert loaded.interleave_num == 3 and loaded.name == "parts"
    np.testing.assert_array_equal(loaded(IDS[:6, :-1]), expected)


def test_losses_of_activations_are_refused():
    inputs = keras.Input((3,))
    network = keras.Model(inputs, keras.layers.Dense(2, activity_regularizer="l2")(inputs))
    with pytest.raises(ValueError, match="leave MicroBatchInterleaved out"):
        MicroBatchInterleaved(network)(tf.ones((4, 3)))


@pytest.mark.parametrize("number", [0, -1, 1.5, "2"])
def test_wrong_numbers_of_parts(number):
    with pytest.raises((TypeError, ValueError), match="interleave_num"):
        MicroBatchInterleaved(language_model(), number)


@on_mesh
def test_the_same_on_a_mesh():
    expected, logits = losses(language_model())
    start(data_parallel=2, model_parallel=2)
    found, outputs = losses(MicroBatchInterleaved(language_model()))
    np.testing.assert_allclose(found, expected, rtol=PARITY_LOSS)
    np.testing.assert_allclose(outputs, logits, rtol=0, atol=1e-4)
