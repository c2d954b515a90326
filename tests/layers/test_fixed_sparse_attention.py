"""Fixed sparse attention equals masked attention and computes few extra scores."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import CrossEntropyLoss, FixedSparseAttention, VocabEmbedding, VocabHead
from dtransformer.layers import fixed_sparse_attention as layer_module
from dtransformer.layers.attention_core import attention
from dtransformer.layers.attention_mask import Segments
from dtransformer.layers.fixed_sparse_attention import FixedSparsePattern
from dtransformer.trainers import Trainer
from harness.tolerances import PARITY_LOSS
from tests.on_mesh import on_mesh, start

B, N, S, D = 2, 6, 48, 5
SEGMENTS = tf.constant(np.sort(np.random.default_rng(0).integers(0, 3, (B, S)), axis=1)[:, ::-1])
PAIRS = tf.constant(np.random.default_rng(1).integers(0, 2, (B, S, S)))
MASKS = {
    "none": None,
    "keys": SEGMENTS > 0,
    "one row": PAIRS[:, :1],
    "pairs": PAIRS,
    "segments": Segments(SEGMENTS, SEGMENTS),
}
PATTERNS = {
    "all global": {"block_size": 4},
    "some global": {"block_size": 3, "num_different_global_patterns": 3, "global_size": 2},
    "one pattern": {"block_size": 2, "num_different_global_patterns": 1, "global_size": 1},
    "one window": {"block_size": 12},
}


def inputs(dtype):
    rng = np.random.default_rng(2)
    return [tf.constant(rng.normal(size=(B, S, N * D)), dtype) for _ in range(4)]


def by_pattern(layer, q, k, v, mask):
    """Attention with all scores, masked by the pattern of each head."""
    heads = lambda x: tf.transpose(tf.reshape(x, [B, S, N, D]), [0, 2, 1, 3])
    seen = tf.constant(np.stack([layer.pattern.mask(head) for head in range(N)]))[None]
    if isinstance(mask, Segments):
        mask = (mask.queries[:, :, None] == mask.keys[:, None]) & (mask.keys[:, None] != 0)
    if mask is not None:
        mask = mask[:, None] if len(mask.shape) == 2 else mask
        seen &= tf.cast(mask, "bool")[:, None]
    seen = tf.broadcast_to(seen, [B, N, S, S])
    softmax = "float64" if q.dtype == "float64" else "float32"
    context = attention(
        heads(q) * D**-0.5, heads(k), heads(v), mask=seen, softmax_compute_type=softmax
    )
    return tf.reshape(tf.transpose(context, [0, 2, 1, 3]), [B, S, N * D])


def with_gradients(function, q, k, v, upstream):
    with tf.GradientTape() as tape:
        tape.watch([q, k, v])
        context = function(q, k, v)
    return [context, *tape.gradient(context, [q, k, v], upstream)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-13), ("float32", 1e-5)])
def test_matches_attention_with_the_pattern_as_mask(monkeypatch, pattern, mask, dtype, tolerance):
    monkeypatch.setattr(layer_module, "_MIN_QUERIES", 24)
    layer = FixedSparseAttention(N, D, seq_length=S, dtype=dtype, **PATTERNS[pattern])
    tensors = inputs(dtype)
    actual = with_gradients(lambda q, k, v: layer(q, k, v, MASKS[mask]), *tensors)
    expected = with_gradients(lambda q, k, v: by_pattern(layer, q, k, v, MASKS[mask]), *tensors)
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(np.abs(y).max(), 1))


def test_padding_has_zero_context_and_gradient():
    layer = FixedSparseAttention(N, D, seq_length=S, block_size=4)
    results = with_gradients(lambda q, k, v: layer(q, k, v, MASKS["segments"]), *inputs("float32"))
    rows = SEGMENTS.numpy() == 0
    assert rows.any()
    for result in results:
        assert (result.numpy()[rows] == 0).all()


def test_pattern_matches_the_paper():
    """With 16 blocks of 4 and two patterns: the last block of each window, or the one before."""
    first, second = (FixedSparsePattern(64, 4, num_patterns=2).mask(p) for p in (0, 1))
    assert set(np.flatnonzero(first[40])) == {*range(12, 16), *range(28, 32), *range(32, 41)}
    assert set(np.flatnonzero(second[40])) == {*range(8, 12), *range(24, 28), *range(32, 41)}


def test_cost_per_query_grows_with_the_square_root_of_the_length():
    """The number of computed scores is at most twice the bound on visible keys."""
    for root in (16, 32, 64):
        plan = FixedSparsePattern(root**2, root // 4, global_size=1)
        assert plan.mask(0).sum() <= root**3
        counted = root**2 * (plan.window + plan.num_windows)
        assert counted <= 2 * root**3


class SparseModel(keras.Model):
    """Language model with one sparse attention layer."""

    def __init__(self):
        super().__init__(name="network")
        self.embedding = VocabEmbedding(30, 16, name="embedding")
        self.attention = FixedSparseAttention(4, 4, block_size=2, seq_length=16, name="attention")
        self.head = VocabHead(30, name="head")

    def call(self, tokens):
        x, _ = self.embedding(tokens)
        return self.head(x + self.attention(x, x, x, tokens > 3))


def losses():
    trainer = Trainer(SparseModel())
    trainer.compile(keras.optimizers.SGD(0.5), CrossEntropyLoss())
    tokens, labels = np.random.default_rng(0).integers(0, 30, (2, 4, 16), "int32")
    return [
        float(trainer.train_on_batch(tokens, labels, return_dict=True)["loss"]) for _ in range(3)
    ]


@on_mesh
def test_heads_and_batch_are_sharded():
    expected = losses()
    start(data_parallel=2, model_parallel=2)
    np.testing.assert_allclose(losses(), expected, rtol=PARITY_LOSS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq_length": 40}, "16 positions, must divide `seq_length=40`"),
        ({"num_different_global_patterns": 5}, "at most 4, one per block.*got 5"),
        ({"global_size": 5}, "`global_size=5` must be at most `block_size=4`"),
    ],
)
def test_invalid_patterns_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        FixedSparseAttention(N, D, **{"block_size": 4, "seq_length": S, **arguments})


def test_inputs_of_another_length_raise():
    x = tf.zeros((B, S, N * D))
    with pytest.raises(ValueError, match=r"\[2, 48, 30\], expected \[2, 64, 30\]"):
        FixedSparseAttention(N, D, 4, seq_length=64)(x, x, x)
