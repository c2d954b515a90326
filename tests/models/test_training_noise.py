"""Training noise follows the papers and applies in training steps only."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import CrossEntropyLoss, Linear
from dtransformer.models import CausalLM, add_lora
from dtransformer.parallel.mesh.training_noise import EmbeddingNoise, InputDropout
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.dropout_seed import dropout_seed
from dtransformer.trainers import Trainer

SEED = tf.constant([3, 5])


def call_with_seed(function, x, is_training=False):
    with dropout_seed(SEED), trace.training_step(is_training):
        return function(x).numpy()


def test_embedding_noise_is_uniform():
    """Jain et al., 2023, draw noise from U(−a, a) with a = α / √(s·h)."""
    noise, x = EmbeddingNoise(5.0, "noise"), tf.zeros((64, 4, 8))
    values = call_with_seed(noise, x, is_training=True)
    bound = 5 / np.sqrt(4 * 8)
    assert np.abs(values).max() <= bound and abs(values.mean()) < 0.05 * bound
    assert values.std() == pytest.approx(bound / np.sqrt(3), rel=0.03)
    assert not call_with_seed(noise, x).any()


def test_adapter_dropout_differs_by_kernel():
    x = tf.ones((64, 32))
    outputs = call_with_seed(InputDropout(0.25, "a/kernel"), x, is_training=True)
    assert set(np.unique(outputs)) == {0.0, np.float32(1 / 0.75)}
    assert (outputs == 0).mean() == pytest.approx(0.25, abs=0.03)
    other_outputs = call_with_seed(InputDropout(0.25, "b/kernel"), x, is_training=True)
    assert 0.3 < (outputs != other_outputs).mean() < 0.45
    np.testing.assert_array_equal(call_with_seed(InputDropout(0.25, "a/kernel"), x), x)


def test_adapter_dropout_with_dora_magnitudes():
    """Dropout affects only the inputs of the changes that DoRA adds (Liu et al., 2024)."""
    layer, x = Linear(5, use_bias=False), tf.random.stateless_normal((7, 6), (1, 2))
    layer.build((7, 6))
    layer.add_low_rank("kernel", 2, 3.0, 0.5, "dora")
    addition = layer.kernel.low_rank
    for i, variable in enumerate(addition.factors.values()):
        variable.assign(tf.random.stateless_normal(variable.shape, (i, 3)))
    w, a, b, m = (v.numpy().astype("float64") for v in (layer.kernel, *addition.factors.values()))
    dropped = call_with_seed(addition.dropout, x, is_training=True).astype("float64")
    gain = m / np.linalg.norm(w + 1.5 * a @ b, axis=0)
    expected = x @ w + (gain - 1) * (dropped @ w) + gain * 1.5 * (dropped @ a @ b)
    np.testing.assert_allclose(
        call_with_seed(layer, x, is_training=True), expected, rtol=0, atol=1e-5
    )
    np.testing.assert_allclose(
        call_with_seed(layer, x), gain * (x @ (w + 1.5 * a @ b)), rtol=0, atol=1e-5
    )


def losses(steps=3, recomputes=False, dropout=0.5, alpha=0.0):
    """Return the initial evaluation loss of a network and the losses of its training steps."""
    keras.utils.set_random_seed(0)
    network = CausalLM(30, hidden_size=16, num_heads=2, num_layers=2, dropout_rate=0.0)
    network.build()
    add_lora(network, rank=4, targets="*_kernel", dropout=dropout)
    rng = np.random.default_rng(0)
    for weight in network.trainable_variables:
        weight.assign(rng.normal(size=weight.shape) * 0.3)
    for block in network.blocks.blocks if recomputes else ():
        block.recompute()
    network.embedding_noise = EmbeddingNoise(alpha, "noise") if alpha else None
    trainer = Trainer(network)
    trainer.compile(keras.optimizers.SGD(0.5), CrossEntropyLoss())
    ids = rng.integers(0, 30, (4, 7))
    batch = ids[:, :-1], ids[:, 1:]
    initial_loss = trainer.evaluate(*batch, verbose=0, return_dict=True)["loss"]
    step_losses = [
        trainer.train_on_batch(*batch, return_dict=True)["step_loss"] for _ in range(steps)
    ]
    return initial_loss, step_losses


def test_noise_applies_in_training_only():
    plain = losses(dropout=0.0)
    dropped, noisy = losses(), losses(dropout=0.0, alpha=20.0)
    recomputed = losses(recomputes=True)  # Recomputation draws the same masks.
    assert plain[0] == dropped[0] == noisy[0] == pytest.approx(recomputed[0], rel=1e-6)
    assert plain[1][0] == pytest.approx(plain[0], rel=1e-5)
    assert abs(dropped[1][0] - plain[0]) > 1e-3 and abs(noisy[1][0] - plain[0]) > 1e-3
    np.testing.assert_allclose(recomputed[1], dropped[1], rtol=1e-5)
