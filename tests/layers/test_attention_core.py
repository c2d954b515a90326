"""Attention core against a float64 reference: grouped heads, masks and several parts."""

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers.attention_core import attention, reference_attention
from dtransformer.layers.attention_mask import Segments
from dtransformer.layers.attention_options import AttentionOptions

B, N, S, T, D = 2, 6, 4, 7, 5
RNG = np.random.default_rng(0)
MASKS = {
    "none": None,
    "keys": RNG.integers(0, 2, (B, T)),
    "pairs": RNG.integers(0, 2, (B, S, T)),
    "heads": RNG.integers(0, 2, (B, N, S, T)),
    "nowhere": np.zeros((B, S, T), "int32"),
}


def reference(q, k, v, mask):
    """Return the context in float64, computed with repeated key and value heads."""
    k, v = (np.repeat(x, N // x.shape[1], axis=1) for x in (k, v))
    scores = q @ k.swapaxes(-1, -2)
    mask = np.ones((B, T)) if mask is None else mask
    mask = np.expand_dims(mask, {2: (1, 2), 3: 1, 4: ()}[mask.ndim])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True)) * mask
    return weights @ v / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("num_kv_heads", [6, 3, 1])
@pytest.mark.parametrize("parts", [[T], [3, 4], [0, 7]])
def test_context_and_gradients_match_reference(num_kv_heads, mask, parts):
    rng = np.random.default_rng(1)
    q = rng.normal(size=(B, N, S, D))
    k, v = rng.normal(size=(2, B, num_kv_heads, T, D))
    upstream = rng.normal(size=(B, N, S, D))
    mask = MASKS[mask]
    inputs = [tf.constant(x, "float64") for x in (q, k, v)]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        keys, values = (tf.split(x, parts, axis=2) for x in inputs[1:])
        options = AttentionOptions(mask, softmax_compute_type="float64")
        context = reference_attention(inputs[0], keys, values, options)
        total = tf.reduce_sum(context * upstream)
    expected = reference(q, k, v, mask)
    np.testing.assert_allclose(context, expected, rtol=0, atol=1e-12)
    for index, gradient in enumerate(tape.gradient(total, inputs)):
        arrays = [q, k, v]
        direction = rng.normal(size=arrays[index].shape)
        ends = []
        for step in (1e-6, -1e-6):
            moved = [x + step * direction if i == index else x for i, x in enumerate(arrays)]
            ends.append((reference(*moved, mask) * upstream).sum())
        slope = (ends[0] - ends[1]) / 2e-6
        np.testing.assert_allclose((gradient * direction).numpy().sum(), slope, rtol=0, atol=1e-7)


@pytest.mark.parametrize("implementation", ["reference", "blockwise", "cudnn"])
def test_sink_equals_an_extra_key_without_value(implementation):
    q, k, v = np.random.default_rng(2).normal(size=(3, B, N, T, D))
    sinks, seen = np.linspace(-2.0, 3.0, N), MASKS["keys"] > 0
    scores = np.where(seen[:, None, None], q @ k.swapaxes(-1, -2), -np.inf)
    scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (B, N, T, 1))], -1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = (weights / weights.sum(-1, keepdims=True))[..., :-1] @ v
    context = attention(
        *map(tf.constant, (q, k, v)),
        mask=tf.constant(seen),
        softmax_compute_type="float64",
        implementation=implementation,
        sinks=tf.constant(sinks),
    )
    np.testing.assert_allclose(context, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_all_queries_see_the_prefix(implementation):
    segments = np.array([[1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 0, 0]])
    prefix = np.array([[1, 1, 0, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0]], "bool")
    i, j = np.mgrid[:T, :T]
    mask = (i >= j) | prefix[:, None, :]
    mask &= (segments[:, :, None] == segments[:, None, :]) & (segments[:, None, :] > 0)
    q, k, v = np.random.default_rng(2).normal(size=(3, B, N, T, D))
    context = attention(
        *map(tf.constant, (q, k, v)),
        mask=Segments(*map(tf.constant, (segments, segments, prefix))),
        causal=True,
        softmax_compute_type="float64",
        implementation=implementation,
    )
    np.testing.assert_allclose(context, reference(q, k, v, mask), rtol=0, atol=1e-12)
