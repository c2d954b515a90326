import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer import MoEConfig
from dtransformer.layers import FeedForward, MoE
from dtransformer.layers.activations import gated_product, gelu, gelu_tanh, get_activation, xielu
from dtransformer.layers.heads import MaskedLMHead

PAIRS = {
    "gelu": (gelu, keras.activations.gelu),
    "gelu_tanh": (gelu_tanh, lambda x: keras.activations.gelu(x, approximate=True)),
    "silu": (keras.activations.silu, keras.activations.silu),
}


def result_and_gradient(function, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return y.numpy(), tape.gradient(y, x, tf.cast(tf.sin(tf.range(float(len(x)))), x.dtype)).numpy()


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("float16", 4e-3)])
@pytest.mark.parametrize("name", PAIRS)
def test_values_and_gradients_match_keras(name, dtype, tolerance, traced):
    function, keras_function = PAIRS[name]
    assert get_activation(name) is function
    x = np.concatenate([np.linspace(-12, 12, 97), [0.0, -0.0, 1e-4, -50.0, 50.0]])
    run = tf.function(function) if traced else function
    results = result_and_gradient(run, tf.constant(x, dtype))
    expected = result_and_gradient(keras_function, tf.constant(x, "float64"))
    for function, reference in zip(results, expected):
        assert function.dtype == dtype
        np.testing.assert_allclose(function, reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtype, large", [("float32", 1e6), ("float16", 700.0)])
def test_gradients_of_large_values_are_0_and_1(name, dtype, large):
    x = tf.constant([-large, large], dtype)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = PAIRS[name][0](x)
    np.testing.assert_array_equal(tape.gradient(y, x), [0, 1])


class Doubled:
    """Custom activation without a hash."""

    __hash__ = None

    def __call__(self, x):
        return 2 * x


def gpt_oss_gate(gate, x):
    """Gate of the published gpt-oss code, with NumPy's clip."""
    gate, x = tf.minimum(gate, 7), tf.clip_by_value(x, -7, 7)
    return (x + 1) * gate / (1 + tf.exp(-1.702 * gate))


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-12), ("bfloat16", 3e-2)])
def test_clamped_swiglu_matches_gpt_oss(dtype, tolerance):
    values = np.random.default_rng(0).normal(size=(2, 60)) * 6
    function = functools.partial(gated_product, get_activation("clamped_swiglu"))
    results = product_and_gradients(function, *tf.cast(values, dtype))
    expected = product_and_gradients(gpt_oss_gate, *tf.constant(values))
    assert (values[0] > 7).any() and (np.abs(values[1]) > 7).any()
    for x, reference in zip(results, expected):
        scale = np.abs(reference).max()
        np.testing.assert_allclose(
            tf.cast(x, "float64"), reference, rtol=tolerance, atol=tolerance * scale
        )


def test_gated_activation_requires_gated_layer():
    with pytest.raises(ValueError, match="'clamped_swiglu'` requires `gated=True`"):
        FeedForward(4, 8, hidden_act="clamped_swiglu")


def xielu_formula(x, alpha_p, alpha_n):
    """Return xIELU as in the paper, section 3, with the limit of the published code."""
    positive = tf.math.log1p(tf.exp(alpha_p)) * x**2
    negative = (tf.math.log1p(tf.exp(alpha_n)) + 0.5) * (tf.exp(tf.minimum(x, -1e-6)) - 1 - x)
    return tf.where(x > 0, positive, negative) + 0.5 * x


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-9), ("bfloat16", 3e-2)])
def test_xielu_matches_its_formula(dtype, tolerance):
    values = np.linspace(-9, 9, 61), [0.3], [-1.1]
    results = []
    for function, precision in ((xielu, dtype), (xielu_formula, "float64")):
        inputs = [tf.constant(x, precision) for x in values]
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            y = function(*inputs)
        results.append([y, *tape.gradient(y, inputs, tf.cos(tf.cast(tf.range(61), precision)))])
    for x, reference in zip(*results):
        assert x.dtype == dtype and x.shape == reference.shape
        scale = np.abs(reference).max()
        np.testing.assert_allclose(tf.cast(x, "float64"), reference, atol=tolerance * scale)


def test_xielu_needs_a_feed_forward_layer_without_gate_and_experts():
    with pytest.raises(ValueError, match="'xielu'` requires `gated=False`"):
        FeedForward(4, 8, hidden_act="xielu", gated=True)
    experts = MoEConfig(expert_num=4)
    for layer in (
        lambda: MoE(4, 8, experts, hidden_act="xielu"),
        lambda: MaskedLMHead(9, 4, hidden_act="xielu"),
    ):
        with pytest.raises(ValueError, match="only feed-forward layers without experts"):
            layer()


OTHERS = {"relu": [keras.activations.relu] * 2, "own": [Doubled()] * 2}


@pytest.mark.parametrize(
    "way, dtype, tolerance",
    [
        ("eager", "float64", 1e-6),
        ("traced", "float32", 1e-5),
        ("traced", "float16", 4e-3),
        ("xla", "bfloat16", 3e-2),
    ],
)
@pytest.mark.parametrize("name", [*PAIRS, *OTHERS])
def test_gated_product_gradients_match_autodiff(name, way, dtype, tolerance):
    function, keras_function = {**PAIRS, **OTHERS}[name]
    values = np.random.default_rng(0).normal(size=(2, 60)) * 3
    run = lambda *args: product_and_gradients(functools.partial(gated_product, function), *args)
    run = run if way == "eager" else tf.function(run, jit_compile=way == "xla")
    results = run(*tf.cast(values, dtype))
    expected = product_and_gradients(lambda gate, x: keras_function(gate) * x, *tf.constant(values))
    for function, reference in zip(results, expected):
        assert function.dtype == dtype
        function = tf.cast(function, "float64")
        np.testing.assert_allclose(function, reference, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", PAIRS)
def test_gated_product_is_bitwise_equal_to_activation_times_x(name, dtype):
    """Runs eagerly, since graph optimizers reorder products with constants."""
    activation = PAIRS[name][0]
    gate, x = tf.cast(np.random.default_rng(0).normal(size=(2, 500)) * 3, dtype)
    np.testing.assert_array_equal(gated_product(activation, gate, x), activation(gate) * x)


def product_and_gradients(function, gate, x):
    with tf.GradientTape() as tape:
        tape.watch([gate, x])
        y = function(gate, x)
    upstream = tf.cast(tf.sin(tf.range(60.0)), x.dtype)
    return [y, *tape.gradient(y, [gate, x], upstream)]


@pytest.mark.parametrize("name", PAIRS)
def test_gated_product_stores_only_its_arguments(name):
    """Stores the gate and the other factor. The next product stores the result."""

    @tf.function(autograph=False)
    def product(gate, x):
        return tf.matmul(gated_product(PAIRS[name][0], gate, x), x, transpose_b=True)

    @tf.function(autograph=False)
    def run(gate, x):
        with tf.GradientTape() as tape:
            tape.watch([gate, x])
            y = product(gate + 1, x + 1)
        return tape.gradient(y, [gate, x])

    graph = run.get_concrete_function(*[tf.TensorSpec([4, None])] * 2).graph
    (_, backward) = [op for op in graph.get_operations() if op.type.endswith("PartitionedCall")]
    stored = {x.ref() for x in backward.inputs if x.shape.as_list() == [4, None]}
    assert len(stored) == 3
