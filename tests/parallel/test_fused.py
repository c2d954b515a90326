"""On CPUs XLA compiles elementwise operations of large tensors, with the same results."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers.activations import gated_product, gelu, gelu_tanh
from dtransformer.parallel.ops import fused as fused_module
from dtransformer.parallel.ops.fused import enable_fusion, fused
from dtransformer.parallel.tensor_parallel.cross_entropy import token_nll
from dtransformer.trainers.compile_options import set_tensorflow_options

SHAPE = (6, 10)
LABELS = np.array([0, 9, 3, 3, 7, 1])


@pytest.fixture(autouse=True)
def fusion_of_small_tensors(monkeypatch):
    monkeypatch.setattr(fused_module, "MIN_ELEMENTS", 60)
    enable_fusion(True)
    yield
    enable_fusion(False)


def count_compiled_calls(function, *specs):
    """Return the number of calls in a graph that XLA compiles."""
    graph = tf.function(function).get_concrete_function(*specs).graph.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    return sum(node.attr["_XlaMustCompile"].b for node in nodes)


def run_with_gradients(function, inputs, upstream):
    """Return the results and the gradients of a traced function in float32."""

    @tf.function(autograph=False)
    def run(*inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            y = function(*inputs)
        return y, tape.gradient(y, inputs, tf.constant(upstream, "float32"))

    y, gradients = run(*(tf.constant(x, "float32") for x in inputs))
    return [y, *gradients]


def normal_cdf(x):
    return np.vectorize(lambda value: 0.5 * math.erfc(-value / math.sqrt(2)))(x)


def expected_gelu(x, dy):
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    return x * normal_cdf(x), dy * (normal_cdf(x) + x * density)


def expected_gelu_tanh(x, dy):
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    tanh = np.tanh(inner)
    return 0.5 * x * (1 + tanh), dy * 0.5 * (1 + tanh + x * (1 - tanh**2) * slope)


def expected_swiglu(gate, x, dy):
    sigmoid = 1 / (1 + np.exp(-gate))
    silu = gate * sigmoid
    return silu * x, dy * x * (sigmoid + silu * (1 - sigmoid)), dy * silu


def swiglu(gate, x):
    return gated_product(keras.activations.silu, gate, x)


@pytest.mark.parametrize(
    "function, expected, num_inputs",
    [
        (gelu, expected_gelu, 1),
        (gelu_tanh, expected_gelu_tanh, 1),
        (swiglu, expected_swiglu, 2),
    ],
)
def test_compiled_activations_match_numpy(function, expected, num_inputs):
    rng = np.random.default_rng(0)
    *inputs, upstream = rng.normal(0, 1, (num_inputs + 1, *SHAPE))
    results = run_with_gradients(function, inputs, upstream)
    for result, reference in zip(results, expected(*inputs, upstream), strict=True):
        np.testing.assert_allclose(result, reference, rtol=1e-6, atol=1e-6)


def test_compiled_loss_matches_numpy():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 5, SHAPE)
    upstream = rng.normal(0, 1, SHAPE[0])
    smoothing, z_loss = 0.1, 1e-2
    z = np.log(np.exp(logits).sum(-1, keepdims=True))
    target = np.full(SHAPE, smoothing / SHAPE[1])
    target[np.arange(SHAPE[0]), LABELS] += 1 - smoothing
    expected = (target * (z - logits)).sum(-1) + z_loss * z[:, 0] ** 2
    probabilities = np.exp(logits - z)
    gradient = upstream[:, None] * ((1 + 2 * z_loss * z) * probabilities - target)

    def loss(logits):
        return token_nll(logits, tf.constant(LABELS), smoothing, z_loss=z_loss)

    result, result_gradient = run_with_gradients(loss, [logits], upstream)
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(result_gradient, gradient, rtol=1e-6, atol=1e-6)


def test_compiles_large_tensors_of_known_shape():
    function = fused(tf.square)
    assert count_compiled_calls(function, tf.TensorSpec(SHAPE)) == 1
    assert count_compiled_calls(function, tf.TensorSpec((None, 10))) == 0
    assert count_compiled_calls(function, tf.TensorSpec((5, 10))) == 0
    assert fused(lambda x: [tf.executing_eagerly(), x])(tf.zeros(SHAPE))[0]


@pytest.mark.parametrize("jit_compile, expected", [("auto", 1), (False, 0)])
def test_jit_compile_enables_and_disables_fusion(jit_compile, expected):
    set_tensorflow_options(jit_compile)
    assert count_compiled_calls(fused(tf.square), tf.TensorSpec(SHAPE)) == expected
