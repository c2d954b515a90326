"""On a mesh each device calls cuDNN for its rows and heads, with the values of one device.

Without a GPU, either TensorFlow computes the calls, or XLA computes modules of the same inputs and
results on CPUs (`cudnn_on_cpu`). The second way compiles and runs all of the GPU's code, except for the
custom calls.
"""

import contextlib
import os
from unittest import mock

import numpy as np
import tensorflow as tf

from dtransformer.layers.attention_core import attention, implementation_for
from dtransformer.layers.attention_mask import Segments
from dtransformer.layers.cudnn_call import CudnnCall
from dtransformer.layers.position_bias import alibi, relative_bias
from dtransformer.parallel.mesh.axis_rules import constrain, replicate
from dtransformer.parallel.mesh.batch import local_value, put_replicated
from dtransformer.parallel.mesh.function import MeshFunction
from dtransformer.parallel.ops import gpu_calls
from tests.layers import cudnn_on_cpu
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


def results(implementation, case, dtype, q, k, v, upstream, table):
    """Return the context and the gradients of q, k, v and the table."""
    options = dict(CASES[case])
    if "mask" in options:
        options["mask"] = options["mask"]()
    with tf.GradientTape() as tape:
        tape.watch([q, k, v, table])
        if "bias" in options:
            options["bias"] = options["bias"](table)
        if "sinks" in options:
            options["sinks"] = tf.reduce_sum(table, axis=0)
        tensors = [constrain(x, ("batch", "heads", "inner_length", None)) for x in (q, k, v)]
        tensors = [tf.cast(x, dtype) for x in tensors]
        assert implementation_for(implementation, *tensors[:2], **options) == implementation
        context = attention(*tensors, implementation=implementation, **options)
        context = tf.cast(context, "float32")
    gradients = tape.gradient(context, [q, k, v, table], upstream, unconnected_gradients="zero")
    return [context, *gradients]


def on_devices(case, dtype, arrays):
    def compute(*tensors):
        return replicate(results("cudnn", case, dtype, *tensors))

    compiled = MeshFunction(compute, [], gradients=True)
    return [local_value(x).numpy() for x in compiled(*map(put_replicated, arrays))]


def check(cases, dtype, tolerance, **fields):
    arrays = inputs()
    tensors = list(map(tf.constant, arrays))
    expected = {case: results("reference", case, "float32", *tensors) for case in cases}
    start(**fields)
    for case in cases:
        for actual, reference in zip(on_devices(case, dtype, arrays), expected[case], strict=True):
            atol = tolerance * max(np.abs(reference).max(), 1)
            np.testing.assert_allclose(actual, reference, rtol=0, atol=atol, err_msg=case)
    stop()


@contextlib.contextmanager
def gpu_code(shapes):
    """Take the GPU's code path, and append the shapes of each local call to a list."""

    def compute(module):
        def text(call):
            shapes.append((call.queries, call.keys, call.bias))
            return module(call)

        return text

    with contextlib.ExitStack() as stack:
        patch = stack.enter_context
        patch(mock.patch.dict(os.environ, {"DTRANSFORMER_GPU_BRANCH": "1"}))
        patch(mock.patch.object(gpu_calls, "is_on_gpu", lambda: True))
        patch(mock.patch.object(gpu_calls, "_capability", lambda: (9, 0)))
        for name in ("forward", "backward"):
            patch(mock.patch.object(CudnnCall, name, compute(getattr(cudnn_on_cpu, name))))
        yield


@on_mesh
def test_cudnn_on_a_mesh_matches_reference():
    check(CASES, "float32", 1e-5, data_parallel=2, model_parallel=2)


@on_mesh
def test_devices_call_cudnn_with_their_rows_and_heads():
    shapes = []
    with gpu_code(shapes):
        check(["causal window"], "bfloat16", 2e-2, data_parallel=2, model_parallel=2)
        assert set(shapes) == {((1, S, 2, D), (1, S, 1, D), None)}
        shapes.clear()
        check(["relative", "relative keys"], "bfloat16", 2e-2, data_parallel=2, model_parallel=2)
        assert set(shapes) == {((1, S, 2, D), (1, S, 1, D), (1, 2, S, S))}
        shapes.clear()
        check(["segments"], "bfloat16", 2e-2, data_parallel=1, model_parallel=2)
        assert set(shapes) == {((2, S, 2, D), (2, S, 1, D), (2, 1, S, S))}


@on_mesh
def test_gpu_code_on_a_mesh_matches_reference():
    with gpu_code([]):
        check(CASES, "bfloat16", 3e-2, data_parallel=2, model_parallel=2)
