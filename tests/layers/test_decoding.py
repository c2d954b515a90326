"""Prompts and single positions with a cache match calls of the full sequence."""

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import (
    LatentAttention,
    MultiHeadAttention,
    QKNorm,
    Rotary,
    TransformerEncoder,
)
from tests.layers.reference_compare import dtype_policy

B, LENGTH, PROMPT, HIDDEN = 2, 7, 3, 16
SIZES = {"kv_rank": 6, "rotary_dim": 4, "value_dim": 8}
ATTENTIONS = {
    "plain": lambda: MultiHeadAttention(HIDDEN, 4, causal=True),
    "window": lambda: MultiHeadAttention(HIDDEN, 4, causal=True, window=2, rotary=Rotary(100.0)),
    "grouped": lambda: MultiHeadAttention(
        HIDDEN, 4, causal=True, num_kv_heads=2, qk_norm=QKNorm("rms_norm"), sinks=True
    ),
    "latent": lambda: LatentAttention(HIDDEN, 4, SIZES, head_dim=12, causal=True),
    "query latent": lambda: LatentAttention(
        HIDDEN, 4, {**SIZES, "query_rank": 5}, head_dim=12, causal=True, soft_cap=2.0
    ),
}
BLOCK_FORMS = {
    "pre": {},
    "post": {"post_layernorm_residual": True},
    "sandwich": {"norm_placement": "sandwich", "residual_scale": 0.5},
    "output": {"norm_placement": "output"},
    "parallel": {"norm_placement": "parallel"},
    "parallel_one_norm": {"norm_placement": "parallel_one_norm", "gated": True},
    "relative": {"relative_ranges": 8, "relative_max_distance": 5},
    "windows": {"rotary_base": 100.0, "block_pattern": [{"window": 2}, {"rotary_base": None}]},
}


@pytest.fixture
def inputs():
    return tf.constant(np.random.default_rng(3).normal(size=(B, LENGTH, HIDDEN)))


def decode(layer, x):
    """Return the outputs of a prompt and of single positions, in a TensorFlow loop."""

    @tf.function(autograph=False)
    def run(x):
        prompt, cache = layer.prefill(x[:, :PROMPT], LENGTH - PROMPT)

        def step(position, outputs, cache):
            new = tf.slice(x, [0, position, 0], [B, 1, HIDDEN])
            output, cache = layer.decode_step(new, cache)
            return position + 1, outputs.write(position - PROMPT, output[:, 0]), cache

        outputs = tf.TensorArray(x.dtype, LENGTH - PROMPT)
        state = tf.constant(PROMPT), outputs, cache
        _, outputs, _ = tf.while_loop(lambda position, *_: position < LENGTH, step, state)
        return tf.concat([prompt, tf.transpose(outputs.stack(), [1, 0, 2])], axis=1)

    return run(x)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_decodes_the_full_sequence(name, inputs):
    with dtype_policy("float64"):
        layer = ATTENTIONS[name]()
    expected = layer(inputs, inputs, inputs)
    np.testing.assert_allclose(decode(layer, inputs), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", BLOCK_FORMS)
def test_stack_decodes_the_full_sequence(form, inputs):
    with dtype_policy("float64"):
        layer = TransformerEncoder(2, HIDDEN, 4, 24, causal=True, **BLOCK_FORMS[form])
    expected = layer(inputs)
    np.testing.assert_allclose(decode(layer, inputs), expected, rtol=0, atol=1e-5)


def test_decode_step_rejects_several_positions():
    layer = MultiHeadAttention(HIDDEN, 4)
    layer.build((B, LENGTH, HIDDEN))
    cache = layer.init_cache(B, LENGTH)
    with pytest.raises(ValueError, match="takes one position, got 3. Use `prefill`"):
        layer.decode_step(tf.zeros([B, 3, HIDDEN]), cache)
    with pytest.raises(ValueError, match="expected .*`hidden_size=16`"):
        layer.prefill(tf.zeros([B, 3, HIDDEN + 1]), LENGTH)
