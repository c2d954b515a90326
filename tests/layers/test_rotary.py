"""Rotary embedding: products depend on distances, and frequencies match the papers."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import MultiHeadAttention, QKNorm, Rotary
from dtransformer.layers.attention_mask import Segments
from dtransformer.layers.rotary import attention_factor, rotary_frequencies, rotate

LLAMA_3 = {
    "type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_rotation_equals_complex_multiplication(fraction):
    frequencies = rotary_frequencies(16, 100.0, fraction)
    x = np.random.default_rng(0).normal(size=(2, 3, 5, 16))
    positions = np.array([0, 1, 7, 30, 31])
    r = int(16 * fraction)
    turned = (x[..., : r // 2] + 1j * x[..., r // 2 : r]) * np.exp(
        1j * positions[:, None] * 100.0 ** (-2 * np.arange(r // 2) / r)
    )
    expected = np.concatenate([turned.real, turned.imag, x[..., r:]], axis=-1)
    actual = rotate(tf.constant(x, "float32"), tf.constant(positions), frequencies)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)


def test_products_depend_only_on_distance():
    frequencies = rotary_frequencies(8)
    q, k = np.random.default_rng(1).normal(size=(2, 1, 1, 6, 8)).astype("float32")
    products = [
        rotate(q, start + tf.range(6), frequencies)
        @ tf.transpose(rotate(k, start + tf.range(6), frequencies), [0, 1, 3, 2])
        for start in (0, 100)
    ]
    np.testing.assert_allclose(*products, rtol=0, atol=1e-4)


def test_linear_and_llama3_scaling():
    plain = rotary_frequencies(32, 500.0)
    linear = rotary_frequencies(32, 500.0, scaling={"type": "linear", "factor": 4.0})
    np.testing.assert_allclose(linear, plain / 4)
    scaled = rotary_frequencies(32, 500.0, scaling=LLAMA_3)
    wavelengths = 2 * np.pi / plain
    short, long = wavelengths < 64 / 4, wavelengths > 64
    np.testing.assert_allclose(scaled[short], plain[short])
    np.testing.assert_allclose(scaled[long], plain[long] / 8)
    between = ~short & ~long
    assert short.any() and long.any() and between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


def test_ntk_scaling_matches_transformers():
    """Matches the dynamic scaling of transformers.

    At length L it equals a factor of f·L / M − (f − 1), where M is the original length.
    """
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0},
    )
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, "cpu", seq_len=512)
    actual = rotary_frequencies(32, 500.0, scaling={"type": "ntk", "factor": 2.0 * 4 - 1})
    np.testing.assert_allclose(actual, expected.numpy(), rtol=1e-6)


def test_ntk_scaling_stretches_the_longest_wavelength():
    plain = rotary_frequencies(32, 500.0)
    scaled = rotary_frequencies(32, 500.0, scaling={"type": "ntk", "factor": 4.0})
    np.testing.assert_allclose(scaled[[0, -1]], plain[[0, -1]] / [1, 4])
    assert ((scaled < plain) & (scaled > plain / 4))[1:-1].all()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"head_dim": 7}, "`rotary_fraction=1.0` of `head_dim=7` rotates 7"),
        ({"head_dim": 8, "fraction": 0.1}, "rotates 0 features"),
        ({"head_dim": 8, "fraction": 1.5}, r"`rotary_fraction=1.5` must be in \(0, 1\]"),
        ({"head_dim": 8, "base": 1.0}, "`rotary_base=1.0` must be above 1"),
        ({"head_dim": 8, "scaling": {"type": "su"}}, "'su', expected one of"),
        ({"head_dim": 8, "scaling": {"type": "linear"}}, "requires the fields factor"),
        ({"head_dim": 8, "scaling": {"type": "linear", "factor": -1}}, "all above 0"),
        (
            {"head_dim": 2, "scaling": {"type": "ntk", "factor": 2}},
            "requires at least 4 rotated features",
        ),
        ({"head_dim": 8, "scaling": {**LLAMA_3, "more": 1.0}}, "requires the fields factor"),
    ],
)
def test_invalid_rotary_options_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        rotary_frequencies(**arguments)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.3},
        {"mscale": 0.7, "mscale_all_dim": 0.4},
        {"truncate": False},
    ],
)
def test_yarn_matches_transformers(extra):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"factor": 8.0, "original_max_position_embeddings": 64, **extra}
    hf_scaling = {"rope_type": "yarn", "rope_theta": 500.0, **scaling}
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        rope_parameters=hf_scaling,
        max_position_embeddings=512,
    )
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    options = {"type": "yarn", **scaling}
    np.testing.assert_allclose(rotary_frequencies(32, 500.0, scaling=options), expected, rtol=1e-5)
    assert attention_factor(options) == pytest.approx(factor, rel=1e-12)
    assert attention_factor({"type": "linear", "factor": 2.0}) == 1


YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 3}


@pytest.mark.parametrize(
    "options",
    [
        {"rotary": Rotary(100.0, scaling={**YARN, "llama_4_scaling_beta": 2.0})},
        {"rotary": Rotary(100.0), "qk_norm": QKNorm("rms_norm", after_rotary=True)},
    ],
)
def test_absolute_positions_restart_in_each_sequence(options):
    """In packed sequences, in left-padded sequences, and for the next token."""
    layer = MultiHeadAttention(16, 4, 0.0, 0.0, causal=True, **options)
    layer.build((1, 9, 16))
    for norm in filter(None, (layer.query_norm, layer.key_norm)):
        norm.gamma.assign([1.0, 4.0, 0.5, 2.0])
    attend = lambda x, *masks: layer(x, x, x, *masks)
    x = tf.random.stateless_normal((1, 9, 16), [0, 1])
    expected = attend(x)
    check = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)
    segments = tf.constant([[1] * 9 + [2] * 9])
    twice = attend(tf.concat([x, x], 1), Segments(segments, segments))
    check(twice, tf.concat([expected, expected], 1))
    is_token = tf.constant([[False] * 4 + [True] * 8])
    padded = tf.pad(x[:, :8], [[0, 0], [4, 0], [0, 0]])
    output, cache = layer.prefill(padded, 2, Segments(is_token, is_token))
    check(output[:, 4:], expected[:, :8])
    output, _ = layer.decode_step(x[:, 8:], cache, prompt_mask=is_token)
    check(output, expected[:, 8:])
