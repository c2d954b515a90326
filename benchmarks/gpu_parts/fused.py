"""Check and time cuDNN's attention for each kind of mask."""

import functools
import time

import numpy as np
import tensorflow as tf

from benchmarks.gpu_parts import alone
from dtransformer.layers.attention_core import attention, implementation_for
from dtransformer.layers.attention_mask import Segments
from dtransformer.layers.position_bias import relative_bias

# Name -> ((b, n, m, s, t, d), dtype, options). A mask is given by name.
CASES = {
    "causal": ((2, 4, 4, 256, 256, 64), "bfloat16", {"causal": True}),
    "all": ((2, 4, 4, 256, 256, 64), "bfloat16", {}),
    "float16": ((2, 4, 4, 256, 256, 64), "float16", {"causal": True}),
    "fewer heads": ((2, 8, 2, 256, 256, 128), "bfloat16", {"causal": True}),
    "odd": ((2, 4, 4, 77, 77, 40), "bfloat16", {"causal": True}),
    "window": ((2, 4, 4, 256, 256, 64), "bfloat16", {"causal": True, "window": 40}),
    "window of both sides": ((2, 4, 4, 256, 256, 64), "bfloat16", {"window": 40}),
    "memory": ((2, 4, 4, 128, 256, 64), "bfloat16", {"mask": "right"}),
    "padding": ((2, 4, 4, 256, 256, 64), "bfloat16", {"causal": True, "mask": "right"}),
    "padding on the left": ((2, 4, 4, 256, 256, 64), "bfloat16", {"causal": True, "mask": "left"}),
    "packed": ((2, 4, 2, 256, 256, 64), "bfloat16", {"causal": True, "mask": "packed"}),
    "packed window": (
        (2, 4, 2, 256, 256, 64),
        "bfloat16",
        {"causal": True, "mask": "packed", "window": 30},
    ),
    "pairs": ((2, 4, 4, 256, 256, 64), "float16", {"mask": "pairs"}),
    "heads": ((2, 4, 4, 256, 256, 64), "bfloat16", {"mask": "heads"}),
    "relative": ((2, 4, 4, 256, 256, 64), "bfloat16", {"causal": True, "bias": "relative"}),
    "relative padding": (
        (2, 4, 2, 256, 256, 64),
        "bfloat16",
        {"mask": "right", "bias": "relative"},
    ),
}
TIMED = {  # Layers of models with 355M, 1.3B and 8B parameters.
    "355m": ((8, 16, 16, 1024, 1024, 64), {"causal": True}),
    "1.3b": ((8, 16, 16, 1024, 1024, 128), {"causal": True}),
    "llama": ((2, 32, 8, 4096, 4096, 128), {"causal": True}),
    "llama packed": ((2, 32, 8, 4096, 4096, 128), {"causal": True, "mask": "packed"}),
}
_SMALL = (1, 2, 1, 64, 64, 16)


def check(smoke, **_):
    """Yield relative errors of outputs and gradients against float32 reference attention."""
    for name, (shape, dtype, options) in CASES.items():
        shape = (*shape[:3], *(min(length, 64) for length in shape[3:5]), 8) if smoke else shape
        tensors, options = _make_inputs(shape, options, dtype)
        wide = [tf.cast(x, "float32") for x in tensors]
        differences = {}
        for mode, jit_compile in {"in a step": None, "compiled": True}.items():
            function = _function("cudnn", options, jit_compile)
            differences[mode] = _differences(
                function(*tensors), _function("reference", options)(*wide)
            )
        rounded = _differences(
            _function("reference", options)(*tensors), _function("reference", options)(*wide)
        )
        has_bias = {"bias": "bias" in options}
        implementation = implementation_for("cudnn", *tensors[:2], **{**options, **has_bias})
        yield {
            "case": name,
            "dtype": dtype,
            "taken": implementation,
            **differences,
            "reference": rounded,
        }


def measure(smoke, **_):
    """Yield the milliseconds of compiled attention and its gradient by implementation."""
    for name, (shape, options) in TIMED.items():
        tensors, options = _make_inputs(_SMALL if smoke else shape, options, "bfloat16")
        times = {}
        for implementation in ("cudnn", "blockwise", "reference"):
            function = _function(implementation, options, jit_compile=True)
            try:
                times[implementation] = _milliseconds(lambda: function(*tensors))
            except tf.errors.ResourceExhaustedError as error:
                times[implementation] = str(error)[:80]
        yield {"layer": name, **times}


def _make_inputs(shape, options, dtype):
    """Return a list [q, k, v, upstream gradient], and the options with the mask tensor."""
    b, n, m, s, t, d = shape
    rng = np.random.default_rng(0)
    shapes = (b, n, s, d), (b, m, t, d), (b, m, t, d), (b, n, s, d)
    tensors = [tf.cast(rng.normal(size=shape), dtype) for shape in shapes]
    tensors[0] *= tf.cast(d**-0.5, dtype)
    lengths = np.linspace(t // 2, t - 3, b).astype(int)[:, None]
    queries, keys = np.arange(s)[None], np.arange(t)[None]
    masks = {
        "right": lambda: tf.constant(keys < lengths),
        "left": lambda: Segments(*(tf.constant(x >= lengths // 3) for x in (queries, keys))),
        "packed": lambda: Segments(*(tf.constant(_packed(x, lengths)) for x in (queries, keys))),
        "pairs": lambda: tf.constant(rng.integers(0, 2, (b, s, t))),
        "heads": lambda: tf.constant(rng.integers(0, 2, (b, n, s, t))),
    }
    if "mask" in options:
        options = {**options, "mask": masks[options["mask"]]()}
    if "bias" in options:  # T5's table, which `_function` makes a bias of.
        options = {**options, "bias": tf.constant(rng.normal(size=(32, n)), "float32")}
    return tensors, options


def _packed(positions, lengths):
    """Return segment ids of three sequences, followed by padding."""
    third = lengths // 3
    return np.where(positions < 3 * third, 1 + positions // third, 0).astype("int32")


def _function(implementation, options, jit_compile=None):
    tables = [options["bias"]] if "bias" in options else []

    @functools.partial(tf.function, autograph=False, jit_compile=jit_compile)
    def run(q, k, v, dy):
        watched = [q, k, v, *tables]
        with tf.GradientTape() as tape:
            tape.watch(watched)
            bias = relative_bias(*tables, 128, options.get("causal", False)) if tables else None
            rest = {**options, "bias": bias}
            y = attention(q, k, v, implementation=implementation, **rest)
        return [y, *tape.gradient(y, watched, dy)]

    return run


def _differences(actual, expected):
    def wide(x):
        return tf.cast(x, "float32")

    norms = [tf.norm(wide(x) - y) / tf.norm(y) for x, y in zip(actual, expected)]
    return [round(float(x), 6) for x in norms]


def _milliseconds(run, repetitions=20):
    def wait(results):
        return [float(tf.cast(x[0, 0, 0, 0], "float32")) for x in results]

    wait(run())
    with alone():
        start_time = time.perf_counter()
        for _ in range(repetitions):
            results = run()
        wait(results)
        return round((time.perf_counter() - start_time) / repetitions * 1e3, 3)
