"""On a mesh each device calls cuDNN for its rows and heads, with the values of one device.

Without a GPU, either TensorFlow computes the calls, or XLA computes modules of the same inputs and
results on CPUs (`cudnn_on_cpu`). The second way compiles and runs all of the GPU's code, except for the
custom calls.
"""

import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import CrossEntropyLoss, attention_core
from dtransformer.layers.attention_core import implementation_for
from dtransformer.layers.attention_mask import Segments
from dtransformer.layers.position_bias import alibi, relative_bias
from dtransformer.models import CausalLM, EncoderDecoderLM
from dtransformer.parallel.mesh.axis_rules import replicate
from dtransformer.parallel.mesh.batch import local_value, put_replicated
from dtransformer.parallel.mesh.function import MeshFunction
from dtransformer.parallel.tracing import trace
from dtransformer.trainers import Trainer
from tests.layers.cudnn_on_cpu import gpu_code
from tests.layers.reference_compare import dtype_policy
from tests.layers.test_context_attention import results
from tests.on_mesh import on_mesh, start, stop

B, N, M, S, D = 2, 4, 2, 16, 8
RNG = np.random.default_rng(0)
SEGMENTS = RNG.integers(0, 3, (B, S)).astype("int32")
HEADS = RNG.integers(0, 2, (B, N, S, S)).astype("int32")
TABLE = RNG.normal(size=(8, N)).astype("float32")
CASES = {
    "all": {},
    "causal window": {"causal": True, "window": 5},
    "segments": {"mask": lambda: Segments(*[tf.constant(SEGMENTS)] * 2), "causal": True},
    "heads": {"mask": lambda: tf.constant(HEADS), "causal": True},
    "relative": {"bias": lambda table: relative_bias(table, 6, causal=True), "causal": True},
    "relative keys": {
        "bias": lambda table: relative_bias(table, 6, causal=False),
        "mask": lambda: tf.constant(SEGMENTS > 0),
    },
    "alibi": {"bias": lambda table: alibi(N), "causal": True, "window": 9},
    "sinks": {"mask": lambda: tf.constant(SEGMENTS > 0), "causal": True, "sinks": True},
}


def inputs():
    rng = np.random.default_rng(1)
    shapes = (B, N, S, D), *[(B, M, S, D)] * 2, (B, N, S, D)
    return [*(rng.normal(size=shape).astype("float32") for shape in shapes), TABLE]


def on_devices(case, dtype, arrays):
    def compute(*tensors):
        return replicate(results(CASES[case], *tensors, dtype, "cudnn"))

    compiled = MeshFunction(compute, [], gradients=True)
    return [local_value(x).numpy() for x in compiled(*map(put_replicated, arrays))]


def check(cases, dtype, tolerance, **fields):
    arrays = inputs()
    tensors = list(map(tf.constant, arrays))
    expected = {case: results(CASES[case], *tensors, implementation="reference") for case in cases}
    start(**fields)
    for case in cases:
        for actual, reference in zip(on_devices(case, dtype, arrays), expected[case], strict=True):
            atol = tolerance * max(np.abs(reference).max(), 1)
            np.testing.assert_allclose(actual, reference, rtol=0, atol=atol, err_msg=case)
    stop()


@on_mesh
def test_cudnn_on_a_mesh_matches_reference():
    check(CASES, "float32", 1e-5, data_parallel=2, model_parallel=2)


@on_mesh
def test_heads_that_the_mesh_cannot_divide_use_blocks():
    start(data_parallel=1, model_parallel=4)
    attention_core._warn_once.cache_clear()
    q, k = (tf.TensorSpec([B, heads, S, D], "bfloat16") for heads in (N, M))
    with gpu_code([]), trace.on_mesh(), warnings.catch_warnings(record=True) as caught:
        assert implementation_for("cudnn", q, q) == "cudnn"
        assert implementation_for("cudnn", q, k) == "blockwise"
    assert "the mesh cannot divide 2 key and value heads" in str(caught[-1].message)


@on_mesh
def test_gpu_code_on_a_mesh_matches_reference():
    queries, keys, position_bias = (1, S, 2, D), (1, S, 1, D), (1, 2, S, S)
    biases = {"causal window": None, "relative": position_bias, "relative keys": position_bias}
    shapes = []
    with gpu_code(shapes):
        for case, bias in biases.items():
            check([case], "bfloat16", 3e-2, data_parallel=2, model_parallel=2)
            assert set(shapes) == {(queries, keys, bias)}
            shapes.clear()
        check(["sinks"], "bfloat16", 3e-2, data_parallel=1, model_parallel=2)
        assert set(shapes) == {((2, S, 2, D), (2, S, 1, D), (2, 1, S, S))}


@pytest.mark.parametrize("case", CASES)
def test_gpu_code_on_one_device_matches_reference(case):
    tensors = list(map(tf.constant, inputs()))
    expected = results(CASES[case], *tensors, implementation="reference")
    with gpu_code([]):
        compute = tf.function(
            functools.partial(results, CASES[case], dtype="bfloat16", implementation="cudnn")
        )
        for actual, reference in zip(compute(*tensors), expected, strict=True):
            atol = 3e-2 * max(np.abs(reference).max(), 1)
            np.testing.assert_allclose(actual, reference, rtol=0, atol=atol)


SIZES = {"hidden_size": 32, "num_heads": 4, "dropout_rate": 0.0, "pad_id": 0}


def train_losses(network):
    """Return the losses of two steps, with padded rows."""
    trainer = Trainer(network)
    # TensorFlow cannot form other clusters for several CPUs of a process.
    trainer.compile(keras.optimizers.SGD(0.5), CrossEntropyLoss(ignore_id=0), jit_compile=False)
    source, target, labels = np.random.default_rng(2).integers(1, 30, (3, 4, S), "int32")
    source[:, 12:] = 0
    is_pair = isinstance(network, EncoderDecoderLM)
    inputs = {"source": source, "target": target} if is_pair else source
    return [float(np.ravel(trainer.train_on_batch(inputs, labels))[0]) for _ in range(2)]


def language_model(implementation):
    options = {"num_kv_heads": 2, "num_layers": 1, "positions": "alibi"}
    return CausalLM(30, **SIZES, **options, implementation=implementation)


def translation_model():
    """Return a network with T5's relative positions. Its attention is chosen automatically."""
    options = {"encoder_layers": 1, "decoder_layers": 1, "positions": "relative"}
    return EncoderDecoderLM(30, **SIZES, **options)


@on_mesh
def test_training_on_a_mesh_matches_one_device():
    expected = train_losses(language_model("reference"))
    start(data_parallel=2, model_parallel=2, sequence_parallel=True)
    np.testing.assert_allclose(train_losses(language_model("cudnn")), expected, rtol=1e-5)


@on_mesh
def test_training_by_gpu_code_on_a_mesh_matches_one_device():
    expected = train_losses(translation_model())
    start(data_parallel=2, model_parallel=2, sequence_parallel=True, recompute=True)
    shapes = []
    with gpu_code(shapes), dtype_policy("mixed_bfloat16"):
        np.testing.assert_allclose(train_losses(translation_model()), expected, rtol=1e-2)
    assert {heads for (_, _, heads, _), _, _ in shapes} == {2}
    # Cross-attention has a mask, but no position bias.
    assert {bias for _, _, bias in shapes} == {(2, 2, S, S), (2, 1, S, S)}
