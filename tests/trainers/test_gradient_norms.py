"""Logs contain the gradient norm of each layer if it is requested."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.trainers import Trainer
from dtransformer.trainers.callbacks import ProgressLog
from dtransformer.trainers.optimizer.gradient_norms import layer_name


@pytest.mark.parametrize(
    "path, name",
    [
        ("lm/blocks/block_12/attention/query_kernel", "lm/blocks/block_12"),
        (
            "lm/transformer/encoder/block_0/feed_forward/mapping_bias",
            "lm/transformer/encoder/block_0",
        ),
        ("transformer_layer_3/self_attention/query/kernel", "transformer_layer_3"),
        ("lm/blocks/final_norm/gamma", "lm/blocks/final_norm"),
        ("dense_1/kernel", "dense_1"),
        ("kernel", "kernel"),
    ],
)
def test_weights_of_a_block_share_a_name(path, name):
    assert layer_name(path) == name


def train_one_step(**options):
    """Return a network before its first step, a batch and the logs of the step."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, "relu", name="hidden"), keras.layers.Dense(1, name="head")]
    network = keras.Sequential([keras.Input((4,)), *layers])
    before = keras.models.clone_model(network)
    before.set_weights(network.get_weights())
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    trainer = Trainer(network)
    trainer.compile(keras.optimizers.SGD(0.1, clipnorm=0.01), "mse", **options)
    logs = trainer.train_on_batch(x, x[:, :1], return_dict=True)
    return before, x, logs


def test_norms_equal_the_gradients_of_a_tape():
    network, x, logs = train_one_step(log_gradient_norms=True)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(network(x) - x[:, :1]))
    gradients = tape.gradient(loss, network.trainable_variables)
    for name, layer in (("hidden", gradients[:2]), ("head", gradients[2:])):
        expected = float(tf.linalg.global_norm(layer))
        assert float(logs[f"gradient_norm/{name}"]) == pytest.approx(expected, rel=1e-5)
    total = sum(float(logs[f"gradient_norm/{name}"]) ** 2 for name in ("hidden", "head"))
    assert float(logs["gradient_norm"]) ** 2 == pytest.approx(total, rel=1e-6)


def test_norms_of_layers_are_off_by_default():
    _, _, logs = train_one_step()
    assert "gradient_norm" in logs
    assert not [name for name in logs if name.startswith("gradient_norm/")]


def test_progress_lines_hide_the_norms_of_layers():
    log = ProgressLog()
    log.verbose = 2
    logs = {"loss": 1.0, "f1/macro": 0.5, "gradient_norm/hidden": 2.0, "epochs/web": 0.1}
    assert set(log._select(logs)) == {"loss", "f1/macro"}
