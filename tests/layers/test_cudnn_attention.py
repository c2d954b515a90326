"""cuDNN attention matches the reference for every supported mask, and its calls equal JAX's.

Without a GPU, TensorFlow computes the calls, so values and gradients are compared on CPUs. The
programs for GPUs are compared as text. `benchmarks/gpu.py` compares results on a GPU.
"""

import copy
import dataclasses
import json
import pathlib
import warnings

import numpy as np
import pytest
import tensorflow as tf

from dtransformer import parallel_config
from dtransformer.layers import MultiHeadAttention, Rotary, attention_core
from dtransformer.layers.attention_core import attention, implementation_for
from dtransformer.layers.attention_mask import Segments
from dtransformer.layers.cudnn_call import CudnnCall
from dtransformer.layers.dropout import Dropout
from dtransformer.models import CausalLM
from dtransformer.parallel.ops import gpu_calls
from dtransformer.parallel.tracing import trace
from dtransformer.reports import memory
from harness.stablehlo import custom_calls
from tests.layers.reference_compare import dtype_policy
from tests.layers.test_blockwise_attention import CASES, results, train_losses

JAX_CALLS = json.loads(pathlib.Path(__file__).with_name("jax_cudnn_calls.json").read_text())
REFUSED = {"soft cap"}
X = tf.zeros([2, 4, 16, 8], "bfloat16")


@pytest.fixture
def on_gpu(monkeypatch):
    """Trace functions for a GPU. They cannot be executed."""
    monkeypatch.setenv("DTRANSFORMER_GPU_BRANCH", "1")
    monkeypatch.setattr(gpu_calls, "is_on_gpu", lambda: True)
    monkeypatch.setattr(gpu_calls, "_capability", lambda: (9, 0))


@pytest.fixture(autouse=True)
def reset_warnings():
    attention_core._warn_once.cache_clear()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("case", [case for case in CASES if case not in REFUSED])
def test_cudnn_matches_reference(case, compiled):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = results("cudnn", case, compiled=compiled)
    for x, expected in zip(actual, results("reference", case), strict=True):
        np.testing.assert_allclose(x, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype, atol", [("float32", 1e-5), ("bfloat16", 5e-2), ("float16", 4e-3)])
@pytest.mark.parametrize("case", ["causal window", "segments", "prefix", "relative causal"])
def test_cudnn_matches_reference_in_other_types(case, dtype, atol):
    actual, expected = results("cudnn", case, dtype), results("reference", case)
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=atol * max(np.abs(y).max(), 1))


@pytest.mark.parametrize("case, rate", [("soft cap", 0.0), ("all", 0.3)])
def test_unsupported_options_use_blocks_and_warn_once(case, rate):
    reason = {"soft cap": "soft cap", "all": "dropout masks"}[case]
    with pytest.warns(UserWarning, match=f"without cuDNN: .*{reason}"):
        actual = results("cudnn", case, rate=rate)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results("cudnn", case, rate=rate)
    for x, expected in zip(actual, results("blockwise", case, rate=rate), strict=True):
        np.testing.assert_array_equal(x, expected)


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, "cudnn"),
        ({"causal": True, "window": 4}, "cudnn"),
        ({"mask": Segments(X[:, 0, :, 0], X[:, 0, :, 0])}, "cudnn"),
        ({"dtype": "float32"}, "reference"),
        ({"shape": [2, 4, 16, 12]}, "reference"),
        ({"shape": [2, 4, 16, 136]}, "reference"),
        ({"shape": [None, 4, 16, 8]}, "reference"),
        ({"shape": [2, 4, 15, 8], "mask": X[:, 0, :15, 0]}, "reference"),
        ({"shape": [2, 4, 15, 8]}, "cudnn"),
        ({"shape": [64, 4, 4096, 8], "mask": tf.TensorSpec([64, 4096])}, "blockwise"),
        ({"bias": True}, "cudnn"),
        ({"bias": True, "shape": [2, 4, 15, 8]}, "reference"),
        ({"bias": True, "shape": [2, 16, 8192, 8]}, "blockwise"),
        ({"soft_cap": 3.0}, "reference"),
        ({"dropout": Dropout(0.1).masks}, "reference"),
    ],
)
def test_auto_choice_on_a_gpu(on_gpu, options, expected):
    options = dict(options)
    spec = tf.TensorSpec(options.pop("shape", X.shape), options.pop("dtype", "bfloat16"))
    with tf.Graph().as_default():
        assert implementation_for("auto", spec, spec, **options) == expected
    # Executed eagerly, not traced.
    assert implementation_for("auto", spec, spec, **options) != "cudnn"


def test_auto_does_not_use_cudnn_on_old_gpus_and_cpus(on_gpu, monkeypatch):
    monkeypatch.setattr(gpu_calls, "_capability", lambda: (7, 0))
    with tf.Graph().as_default():
        assert implementation_for("auto", X, X) == "reference"
        monkeypatch.setattr(gpu_calls, "is_on_gpu", lambda: False)
        monkeypatch.delenv("DTRANSFORMER_GPU_BRANCH")
        assert implementation_for("auto", X, X) == "reference"


@pytest.mark.parametrize("name", JAX_CALLS)
def test_calls_equal_those_of_jax(name):
    case = JAX_CALLS[name]
    shapes = {key: tuple(case[key]) for key in ("queries", "keys", "bias") if case[key]}
    options = {key: case[key] for key in ("dtype", "causal", "window")}
    call = CudnnCall(**shapes, **options, bias_gradient=bool(case["bias"]))
    assert custom_calls(call.forward()) + custom_calls(call.backward()) == case["calls"]
    if call.bias:  # JAX always computes the bias gradient.
        call = dataclasses.replace(call, bias_gradient=False)
        expected = copy.deepcopy(case["calls"][1])
        for key in ("results", "result_layouts"):
            expected[key].pop(3)
        assert custom_calls(call.backward()) == [expected]


def compile_to_hlo(mask):
    """Return the HLO of an attention layer and its gradient for a GPU."""
    with dtype_policy("mixed_bfloat16"):
        layer = MultiHeadAttention(
            32,
            4,
            0.0,
            0.0,
            num_kv_heads=2,
            causal=True,
            rotary=Rotary(100.0),
            implementation="auto",
        )
    x = tf.zeros([2, 48, 32])
    layer.build(x.shape)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(layer(x, x, x, mask, training=True))
        return tape.gradient(y, [x, *(v.value for v in layer.trainable_variables)])

    function = tf.function(step, jit_compile=True, autograph=False)
    return function.experimental_get_compiler_ir(x)(stage="hlo")


@pytest.mark.parametrize("has_mask", [False, True], ids=["causal", "packed"])
def test_gpu_program_contains_no_scores(on_gpu, has_mask):
    segments = tf.constant(np.repeat([[1, 2, 0]], 16, axis=1).repeat(2, axis=0))
    hlo = compile_to_hlo(Segments(segments, segments) if has_mask else None)
    kind = "ScaleBiasSoftmax" if has_mask else "Softmax"
    assert hlo.count(f'custom_call_target="__cudnn$fmha{kind}"') == 1
    assert hlo.count(f'custom_call_target="__cudnn$fmha{kind}Backward"') == 1
    for heads in ("4,48,48", "2,96,48"):
        assert f"[2,{heads}]" not in hlo
    assert ("bf16[2,1,48,48]" in hlo) == has_mask


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_training_matches_reference_attention(monkeypatch, recompute):
    counted, compute = [], attention_core.cudnn_attention
    monkeypatch.setattr(
        attention_core, "cudnn_attention", lambda *args: counted.append(1) or compute(*args)
    )
    with warnings.catch_warnings(), parallel_config(recompute=recompute):
        warnings.simplefilter("error", UserWarning)
        losses = train_losses("cudnn")
    assert counted
    np.testing.assert_allclose(losses, train_losses("reference"), rtol=1e-5)


def test_mesh_uses_blocks_with_a_warning(on_gpu):
    with trace.on_mesh(), pytest.warns(UserWarning, match="on a mesh"):
        assert implementation_for("cudnn", X, X) == "blockwise"


def test_supports_a_single_query():
    q = tf.random.stateless_normal([2, 4, 1, 8], [1, 2])
    k = tf.random.stateless_normal([2, 2, 7, 8], [3, 4])
    actual, expected = (
        attention(q, k, k, causal=True, implementation=name) for name in ("cudnn", "reference")
    )
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_memory_report_assumes_cudnn_on_gpus(on_gpu):
    with dtype_policy("mixed_bfloat16"):
        network = CausalLM(30, hidden_size=16, num_heads=2, num_layers=1, dropout_rate=0.0)
    network.build()
    assert memory._describe_attention(network, tf.TensorShape([2, 8])) == "blocks cudnn"
    num_bytes = memory.activation_bytes(network, tf.TensorShape([2, 8]))
    with dtype_policy("mixed_bfloat16"):
        network = CausalLM(
            30,
            hidden_size=16,
            num_heads=2,
            num_layers=1,
            dropout_rate=0.0,
            implementation="reference",
        )
    network.build()
    assert num_bytes < memory.activation_bytes(network, tf.TensorShape([2, 8]))
