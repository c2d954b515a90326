"""Promise: noise of training is that of the papers, in training steps alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import CrossEntropyLoss, Linear
from dtransformer.models import CausalLM, add_lora
from dtransformer.parallel.ops.training_noise import EmbeddingNoise, InputDropout
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.dropout_seed import dropout_seed
from dtransformer.trainers import Trainer

SEED = tf.constant([3, 5])


def drawn(function, x, is_training=False):
    with dropout_seed(SEED), trace.training_step(is_training):
        return function(x).numpy()


def test_noise_of_embeddings():
    """Jain et al., 2023: U(−a, a), a = α / √(s·h)."""
    noise, x = EmbeddingNoise(5.0, "noise"), tf.zeros((64, 4, 8))
    found = drawn(noise, x, is_training=True)
    most = 5 / np.sqrt(4 * 8)
    assert np.abs(found).max() <= most and abs(found.mean()) < 0.05 * most
    assert found.std() == pytest.approx(most / np.sqrt(3), rel=0.03)
    assert not drawn(noise, x).any()


def test_dropout_of_adapters():
    x = tf.ones((64, 32))
    kept = drawn(InputDropout(0.25, "a/kernel"), x, is_training=True)
    assert set(np.unique(kept)) == {0.0, np.float32(1 / 0.75)}
    assert (kept == 0).mean() == pytest.approx(0.25, abs=0.03)
    other = drawn(InputDropout(0.25, "b/kernel"), x, is_training=True)
    assert 0.3 < (kept != other).mean() < 0.45
    np.testing.assert_array_equal(drawn(InputDropout(0.25, "a/kernel"), x), x)


def test_dropout_of_adapters_with_magnitudes():
    """What magnitudes change sees the dropped inputs, the kernel all of them (Liu et al., 2024)."""
    layer, x = Linear(5, use_bias=False), tf.random.stateless_normal((7, 6), (1, 2))
    layer.build((7, 6))
    layer.add_low_rank("kernel", 2, 3.0, 0.5, "dora")
    addition = layer.kernel.low_rank
    for number, variable in enumerate(addition.factors.values()):
        variable.assign(tf.random.stateless_normal(variable.shape, (number, 3)))
    w, a, b, m = (v.numpy().astype("float64") for v in (layer.kernel, *addition.factors.values()))
    dropped = drawn(addition.dropout, x, is_training=True).astype("float64")
    gain = m / np.linalg.norm(w + 1.5 * a @ b, axis=0)
    expected = x @ w + (gain - 1) * (dropped @ w) + gain * 1.5 * (dropped @ a @ b)
    np.testing.assert_allclose(drawn(layer, x, is_training=True), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(drawn(layer, x), gain * (x @ (w + 1.5 * a @ b)), rtol=0, atol=1e-5)


def losses(steps=3, recomputes=False, dropout=0.5, alpha=0.0):
    """Return a network's losses of training steps, and one of evaluation before them."""
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
    before = trainer.evaluate(*batch, verbose=0, return_dict=True)["loss"]
    each = [trainer.train_on_batch(*batch, return_dict=True)["step_loss"] for _ in range(steps)]
    return before, each


def test_training_draws_and_evaluation_does_not():
    plain = losses(dropout=0.0)
    dropped, noisy = losses(), losses(dropout=0.0, alpha=20.0)
    again = losses(recomputes=True)  # draws the same masks when it computes again
    assert plain[0] == dropped[0] == noisy[0] == pytest.approx(again[0], rel=1e-6)
    assert plain[1][0] == pytest.approx(plain[0], rel=1e-5)
    assert abs(dropped[1][0] - plain[0]) > 1e-3 and abs(noisy[1][0] - plain[0]) > 1e-3
    np.testing.assert_allclose(again[1], dropped[1], rtol=1e-5)
