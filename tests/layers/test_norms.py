"""LayerNorm and RMSNorm match the reference over their numeric range."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import LayerNorm, RMSNorm
from dtransformer.layers.norm import make_norm
from tests.layers import reference, reference_weights
from tests.layers.reference_compare import compare, dtype_policy, each_policy

NORMS = [
    pytest.param(LayerNorm, reference.layer_norm, reference_weights.layer_norm, id="LayerNorm"),
    pytest.param(RMSNorm, reference.rms_norm, reference_weights.rms_norm, id="RMSNorm"),
]


def plain(layer, x):
    return layer(x)


@each_policy
@pytest.mark.parametrize("norm, function, make_weights", NORMS)
class TestNorms:
    @pytest.mark.parametrize("shape", [(2, 5, 12), (1, 1, 3), (7, 33)])
    def test_matches_the_reference(self, policy, norm, function, make_weights, shape):
        rng = np.random.default_rng(0)
        x = reference_weights.numbers(rng, *shape)
        compare(policy, norm, function, [x], make_weights(rng, shape[-1]), plain)

    def test_default_epsilon_matters_for_small_inputs(self, policy, norm, function, make_weights):
        rng = np.random.default_rng(1)
        x = reference_weights.numbers(rng, 4, 8) / 512.0
        compare(policy, norm, function, [x], make_weights(rng, 8), plain)

    def test_norms_use_the_given_epsilon(self, policy, norm, function, make_weights):
        rng = np.random.default_rng(2)
        x = reference_weights.numbers(rng, 4, 8)
        function = partial(function, epsilon=0.25)
        make = lambda: norm(epsilon=0.25)
        compare(policy, make, function, [x], make_weights(rng, 8), plain)

    def test_constant_row_is_finite(self, policy, norm, function, make_weights):
        rng = np.random.default_rng(3)
        x = np.zeros((2, 8))
        compare(policy, norm, function, [x], make_weights(rng, 8), plain)

    def test_squares_do_not_overflow_in_16_bits(self, policy, norm, function, make_weights):
        """60,000 is a float16, its square is not: the norm is computed in float32."""
        rng = np.random.default_rng(4)
        x = 16384.0 * np.sign(reference_weights.numbers(rng, 4, 8) + 1 / 128)
        x[:, 0] = 49152.0
        compare(policy, norm, function, [x], make_weights(rng, 8), plain)


@pytest.mark.parametrize("norm, function, make_weights", NORMS)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_weights_stay_float32_under_mixed_precision(policy, norm, function, make_weights):
    with dtype_policy(policy):
        layer = norm()
    assert layer(tf.ones((2, 4))).dtype == layer.compute_dtype
    assert {variable.dtype for variable in layer.trainable_variables} == {"float32"}


def _of_all_heads(x, gamma, epsilon):
    mean_square = tf.reduce_mean(x**2, axis=(1, 3), keepdims=True)
    return x / tf.sqrt(mean_square + epsilon) * gamma


def _without_beta(x, gamma, epsilon):
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return (x - mean) / tf.sqrt(variance + epsilon) * gamma


@pytest.mark.parametrize(
    "name, formula, first",
    [
        ("rms_norm_all_heads", _of_all_heads, 1),
        ("layer_norm_without_beta", _without_beta, 1),
        (
            "rms_norm_unit_offset",
            lambda x, w, e: x / tf.sqrt(tf.reduce_mean(x**2, -1, keepdims=True) + e) * (1 + w),
            0,
        ),
    ],
)
def test_norm_variants_match_their_formulas(name, formula, first):
    """In float64, with TensorFlow's gradients of the formulas."""
    layer = make_norm(name, 1e-3, compute_type="float64", dtype="float64")
    x = tf.random.stateless_normal((2, 3, 4, 6), (1, 2), dtype="float64")
    layer(x)
    (gamma,) = layer.trainable_variables
    np.testing.assert_array_equal(gamma, first * np.ones(gamma.shape))
    gamma.assign(tf.random.stateless_normal(gamma.shape, (3, 4), dtype="float64"))
    results = []
    for function in (layer, lambda x: formula(x, tf.convert_to_tensor(gamma.value), 1e-3)):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
            loss = tf.reduce_sum(y * tf.reshape(tf.range(144.0, dtype="float64"), x.shape))
        results.append([y, *tape.gradient(loss, [x, gamma.value])])
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)
