"""Blockwise attention matches the reference: masks, biases, dropout and gradients."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import CrossEntropyLoss, attention_dropout, blockwise_attention
from dtransformer.layers.attention_core import attention
from dtransformer.layers.attention_mask import Segments
from dtransformer.layers.dropout import Dropout
from dtransformer.layers.position_bias import alibi, relative_bias
from dtransformer.models import CausalLM
from dtransformer.parallel.context_parallel.plan import ContextPlan
from dtransformer.parallel.tracing.dropout_seed import dropout_seed
from dtransformer.trainers import Trainer
from tests.on_mesh import on_mesh, start

B, N, M, S, D = 2, 4, 2, 11, 5
RNG = np.random.default_rng(0)
SEGMENTS = tf.constant(RNG.integers(0, 3, (B, S)))
PREFIX = tf.constant(np.arange(S)[None] < [[6], [0]])
TABLE = tf.constant(RNG.normal(size=(8, N)))
CASES = {
    "all": {},
    "causal": {"causal": True},
    "causal window": {"causal": True, "window": 3},
    "window": {"window": 2},
    "keys": {"mask": SEGMENTS > 0},
    "segments": {"mask": Segments(SEGMENTS, SEGMENTS)},
    "prefix": {"causal": True, "mask": Segments(SEGMENTS, SEGMENTS, PREFIX)},
    "pairs": {"mask": tf.constant(RNG.integers(0, 2, (B, S, S)))},
    "heads": {"mask": tf.constant(RNG.integers(0, 2, (B, N, S, S))), "causal": True},
    "nowhere": {"mask": tf.zeros((B, S), "bool")},
    "relative, a row without keys": {
        "bias": "relative",
        "mask": (SEGMENTS > 0) & tf.constant([[True], [False]]),
    },
    "soft cap": {"causal": True, "mask": Segments(SEGMENTS, SEGMENTS), "soft_cap": 2.0},
    "relative": {"bias": "relative"},
    "relative causal": {"bias": "relative", "causal": True, "mask": SEGMENTS > 0},
    "alibi": {"bias": "alibi", "causal": True, "window": 6},
    "sinks": {"causal": True, "mask": Segments(SEGMENTS, SEGMENTS), "window": 6, "sinks": True},
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Use blocks of 3 queries and 4 keys, and tiles of dropout, which do not divide the lengths."""
    monkeypatch.setattr(blockwise_attention, "ALL_POSITIONS", (3, 4))
    monkeypatch.setattr(attention_dropout, "TILE", (4, 5))


def results(implementation, case, dtype="float64", rate=0.0, compiled=False):
    """Return the context and the gradients of q, k, v and the table."""
    rng = np.random.default_rng(1)
    shapes = (B, N, S, D), (B, M, S, D), (B, M, S, D)
    tensors = [tf.cast(rng.normal(size=shape), dtype) for shape in shapes]
    tensors.append(tf.cast(TABLE, dtype))
    upstream = tf.cast(rng.normal(size=shapes[0]), dtype)
    dropout = Dropout(rate, name="drop")
    dropout.build((None,))

    def run(q, k, v, table):
        options = dict(CASES[case])
        if options.get("bias") == "relative":
            options["bias"] = relative_bias(table, 6, options.get("causal", False))
        elif options.get("bias") == "alibi":
            options["bias"] = alibi(N)
        if "sinks" in options:
            options["sinks"] = tf.reduce_sum(table, axis=0)
        with dropout_seed(tf.constant([3, 4])), tf.GradientTape() as tape:
            tape.watch([q, k, v, table])
            context = attention(
                q,
                k,
                v,
                dropout=dropout.masks(training=True),
                softmax_compute_type="float64" if dtype == "float64" else "float32",
                implementation=implementation,
                **options,
            )
            total = tf.reduce_sum(context * upstream)
        gradients = tape.gradient(total, [q, k, v, table], unconnected_gradients="zero")
        return [context, *gradients]

    run = tf.function(run) if compiled else run
    return [tf.cast(x, "float64").numpy() for x in run(*tensors)]


@pytest.mark.parametrize("case", CASES)
def test_blockwise_matches_reference(case):
    for actual, expected in zip(
        results("blockwise", case), results("reference", case), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-13)


def test_blockwise_matches_reference_in_a_function():
    actual = results("blockwise", "relative causal", rate=0.3, compiled=True)
    for x, expected in zip(actual, results("reference", "relative causal", rate=0.3), strict=True):
        np.testing.assert_allclose(x, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("case", ["causal", "segments", "relative"])
def test_blockwise_matches_reference_in_float32(case):
    for actual, expected in zip(
        results("blockwise", case, "float32"), results("reference", case), strict=True
    ):
        np.testing.assert_allclose(
            actual, expected, rtol=0, atol=1e-5 * max(np.abs(expected).max(), 1)
        )


@pytest.mark.parametrize("case", ["causal", "segments", "relative"])
def test_blockwise_matches_reference_in_bfloat16(case):
    for actual, expected in zip(
        results("blockwise", case, "bfloat16"), results("reference", case), strict=True
    ):
        np.testing.assert_allclose(
            actual, expected, rtol=0, atol=2e-2 * max(np.abs(expected).max(), 1)
        )


@pytest.mark.parametrize("case", ["all", "causal", "causal window", "segments", "prefix"])
def test_blockwise_dropout_matches_reference(case):
    """Also for gradients: the backward pass draws the masks again."""
    dropped, undropped = results("blockwise", case, rate=0.3), results("blockwise", case)
    expected = results("reference", case, rate=0.3)
    assert np.abs(dropped[0] - undropped[0]).max() > 0.1
    for actual, reference in zip(dropped, expected, strict=True):
        np.testing.assert_allclose(actual, reference, rtol=0, atol=1e-13)


def test_query_without_visible_keys_has_zero_context_and_gradient():
    context, *gradients = results("blockwise", "segments")
    rows = SEGMENTS.numpy() == 0
    assert rows.any()
    for array in (context, gradients[0], *gradients[1:3]):
        assert (np.moveaxis(array, 1, 2)[rows] == 0).all()


def test_fully_masked_blocks_are_skipped():
    plan = ContextPlan("ulysses", 1, 12, 12)
    count = lambda **options: sum(map(len, plan.visible_columns(**options, sizes=(3, 4))[0]))
    assert count(causal=False, window=None) == 12
    assert count(causal=True, window=None) == 1 + 2 + 3 + 3
    assert count(causal=True, window=1) == 4


def test_unknown_lengths_raise():
    x = tf.TensorSpec([1, 2, None, 4])

    @tf.function(input_signature=[x])
    def run(q):
        return attention(q, q, q, implementation="blockwise")

    with pytest.raises(ValueError, match="known sequence lengths"):
        run.get_concrete_function()


def train_losses(implementation, **options):
    """Return the losses of three steps of a language model on packed sequences."""
    network = CausalLM(
        30,
        hidden_size=16,
        num_heads=4,
        num_layers=1,
        dropout_rate=0.0,
        num_kv_heads=2,
        implementation=implementation,
        **options,
    )
    trainer = Trainer(network)
    trainer.compile(keras.optimizers.SGD(0.5), CrossEntropyLoss(ignore_id=0))
    rng = np.random.default_rng(2)
    tokens, labels = rng.integers(1, 30, (2, 4, S), "int32")
    segments = np.sort(rng.integers(0, 3, (4, S)), axis=1)[:, ::-1].astype("int32")
    inputs = {"tokens": tokens, "segments": segments}
    if options.get("prefix"):
        inputs["prefix"] = rng.integers(0, 2, (4, S))
    step = lambda: trainer.train_on_batch(inputs, labels)
    return [float(np.ravel(step())[0]) for _ in range(3)]


@on_mesh
def test_blockwise_training_on_a_mesh_matches_reference():
    blockwise_attention.ALL_POSITIONS = 5, 4
    options = {"positions": "alibi", "prefix": True}
    expected = train_losses("reference", **options)
    start(data_parallel=2, model_parallel=2, sequence_parallel=True)
    np.testing.assert_allclose(train_losses("blockwise", **options), expected, rtol=1e-5)
