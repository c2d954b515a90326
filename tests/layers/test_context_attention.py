"""Attention to sharded sequences matches one device, in each mode, for all masks and biases."""

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import blockwise_attention
from dtransformer.layers.attention_core import attention, implementation_for
from dtransformer.layers.attention_mask import Segments
from dtransformer.layers.position_bias import alibi, relative_bias
from dtransformer.parallel.mesh.axis_rules import constrain, replicate
from dtransformer.parallel.mesh.batch import local_value, put_replicated
from dtransformer.parallel.mesh.function import MeshFunction
from tests.on_mesh import on_mesh, raises, start, stop

B, N, S, D = 2, 4, 16, 4
RNG = np.random.default_rng(0)
SEGMENTS = RNG.integers(0, 3, (B, S)).astype("int32")
PAIRS = RNG.integers(0, 2, (B, S, S)).astype("int32")
HEADS = RNG.integers(0, 2, (B, N, S, S)).astype("int32")
TABLE = RNG.normal(size=(8, N)).astype("float32")
CASES = {
    "all": {},
    "causal": {"causal": True},
    "causal window": {"causal": True, "window": 5},
    "window": {"window": 4},
    "keys": {"mask": lambda: tf.constant(SEGMENTS > 0)},
    "segments": {"mask": lambda: Segments(*[tf.constant(SEGMENTS)] * 2), "causal": True},
    "prefix": {
        "mask": lambda: Segments(*[tf.constant(SEGMENTS)] * 2, tf.constant(PAIRS[:, 0] > 0)),
        "causal": True,
        "window": 5,
    },
    "pairs": {"mask": lambda: tf.constant(PAIRS)},
    "heads": {"mask": lambda: tf.constant(HEADS), "causal": True},
    "nowhere": {"mask": lambda: tf.zeros((B, S), "bool"), "soft_cap": 2.0},
    "relative": {"bias": lambda table: relative_bias(table, 6, causal=False)},
    "alibi": {"bias": lambda table: alibi(N), "causal": True, "window": 9},
    "sinks": {"mask": lambda: tf.constant(SEGMENTS > 0), "causal": True, "sinks": True},
}

RING, GATHERED, BY_HEADS, RINGS = (
    {"context_parallel_mode": mode} for mode in ("ring", "all_gather", "ulysses", "ulysses_ring")
)


def tensors(num_kv_heads, num_keys=S):
    rng = np.random.default_rng(1)
    shapes = (B, N, S, D), *[(B, num_kv_heads, num_keys, D)] * 2, (B, N, S, D)
    return [rng.normal(size=shape).astype("float32") for shape in shapes]


def results(options, q, k, v, upstream, table, dtype="float32", implementation="auto"):
    """Return the context and the gradients of q, k, v and the table.

    Args:
        options: Options of `attention`. A mask and a bias are functions.
        q, k, v, upstream, table: Tensors.
        dtype: Type of the attention. Defaults to `"float32"`.
        implementation: Implementation that must be used. Defaults to `"auto"`, which allows all.
    """
    options = dict(options)
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
        if implementation != "auto":
            assert implementation_for(implementation, *tensors[:2], **options) == implementation
        context = attention(*tensors, implementation=implementation, **options)
        context = tf.cast(context, "float32")
    gradients = tape.gradient(context, [q, k, v, table], upstream, unconnected_gradients="zero")
    return [context, *gradients]


def on_devices(case, *arrays):
    compiled = MeshFunction(
        lambda *args: replicate(results(CASES[case], *args)), [], gradients=True
    )
    return [local_value(x).numpy() for x in compiled(*map(put_replicated, arrays))]


def check(cases, num_kv_heads, num_keys=S, **fields):
    arrays = *tensors(num_kv_heads, num_keys), TABLE
    expected = {case: results(CASES[case], *map(tf.constant, arrays)) for case in cases}
    start(**fields)
    for case in cases:
        actuals = on_devices(case, *arrays)
        if case == "segments":  # Padding has zero context and gradient.
            for x in actuals[:4]:
                assert (np.moveaxis(x, 1, 2)[SEGMENTS == 0] == 0).all()
        for actual, reference in zip(actuals, expected[case], strict=True):
            tolerance = 1e-5 * max(np.abs(reference).max(), 1)
            np.testing.assert_allclose(actual, reference, rtol=0, atol=tolerance, err_msg=case)
    stop()


def use_small_blocks():
    blockwise_attention.ALL_POSITIONS = blockwise_attention.SOME_POSITIONS = 3, 5


@on_mesh
def test_ring_attention_matches_reference():
    use_small_blocks()
    check(["causal window"], 2, model_parallel=1, context_parallel=2, **RING)


@on_mesh
def test_all_gather_attention_matches_reference():
    check(["alibi"], 2, model_parallel=1, context_parallel=4, **GATHERED)


@on_mesh
def test_ulysses_attention_matches_reference():
    check(["segments"], 4, model_parallel=1, context_parallel=2, **BY_HEADS)


@on_mesh
def test_rings_for_parts_of_the_heads_match_reference():
    use_small_blocks()
    check(["segments"], 2, model_parallel=1, context_parallel=4, **RINGS)


@pytest.mark.long
@on_mesh
def test_all_masks_and_biases_in_rings_for_parts_of_the_heads():
    use_small_blocks()
    check(CASES, 2, model_parallel=1, context_parallel=4, **RINGS)


@pytest.mark.long
@on_mesh
def test_rings_with_replicated_keys_match_reference():
    use_small_blocks()
    check(["segments"], 1, model_parallel=1, context_parallel=4, **RINGS, ulysses_shards=2)


@pytest.mark.long
@on_mesh
def test_rings_beside_model_shards_match_reference():
    use_small_blocks()
    cases = ["causal", "heads", "relative", "sinks"]
    check(cases, 4, model_parallel=2, context_parallel=4, **RINGS)


@pytest.mark.long
@on_mesh
def test_all_masks_and_biases_in_ring_attention():
    use_small_blocks()
    check(CASES, 2, model_parallel=1, context_parallel=2, **RING)


@pytest.mark.long
@on_mesh
def test_all_masks_and_biases_in_all_gather_attention():
    use_small_blocks()
    check(CASES, 2, model_parallel=1, context_parallel=2, **GATHERED)


@pytest.mark.long
@on_mesh
def test_all_masks_and_biases_in_ulysses_attention():
    use_small_blocks()
    check(CASES, 2, model_parallel=1, context_parallel=2, **BY_HEADS)


@pytest.mark.long
@on_mesh
def test_ring_attention_over_four_shards_matches_reference():
    use_small_blocks()
    check(["all", "causal", "window", "segments"], 2, model_parallel=1, context_parallel=4, **RING)


@pytest.mark.long
@on_mesh
def test_ulysses_attention_with_replicated_keys_matches_reference():
    check(["segments"], 2, model_parallel=1, context_parallel=4, **BY_HEADS)
    check(["relative"], 2, model_parallel=2, context_parallel=2, **BY_HEADS)


@pytest.mark.long
@on_mesh
def test_cross_attention_to_another_length_matches_reference():
    use_small_blocks()
    for mode in (RING, GATHERED, BY_HEADS):
        check(["all"], 4, 24, data_parallel=2, context_parallel=2, model_parallel=1, **mode)


@on_mesh
def test_indivisible_lengths_and_heads_raise():
    start(model_parallel=1, context_parallel=2, **RING)
    arrays = [x[:, :, :15] for x in tensors(2)]
    raises(ValueError, ["must divide", "15", "16"], lambda: on_devices("all", *arrays, TABLE))
    stop()
    start(model_parallel=1, context_parallel=4, **BY_HEADS)
    arrays = [x[:, :2] for x in tensors(2)]
    words = ["'ulysses'", "2 heads", "'all_gather'"]
    raises(ValueError, words, lambda: on_devices("all", *arrays, TABLE))
