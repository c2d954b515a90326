"""Promise: task heads compute what NumPy does in float64, and padding changes nothing."""

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import PoolingHead, SequenceHead, TokenHead
from tests.tolerances import LAYERS

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 5, 8))
# Padding at the end, at the beginning, and a row that has no token at all.
MASK = np.array([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]], bool)


def expected_pooling(pooling):
    """Return what NumPy pools, float64 [b, h]."""
    rows = [x[own] for x, own in zip(X, MASK)]
    take = {"first": lambda r: r[0], "last": lambda r: r[-1], "mean": lambda r: r.mean(0)}
    return np.stack([take[pooling](r) if len(r) else np.zeros(8) for r in rows])


@pytest.mark.parametrize("hidden_act", [None, "tanh", "relu"])
@pytest.mark.parametrize("pooling", ["first", "mean", "last"])
def test_sequence_heads_match_the_reference(pooling, hidden_act):
    head = SequenceHead(3, pooling, hidden_act=hidden_act)
    found = head(tf.constant(X, "float32"), tf.constant(MASK)).numpy()
    x = expected_pooling(pooling)
    if hidden_act:
        x = x @ head.pooler.kernel.numpy() + head.pooler.bias.numpy()
        x = np.tanh(x) if hidden_act == "tanh" else np.maximum(x, 0)
    wanted = x @ head.classifier.kernel.numpy() + head.classifier.bias.numpy()
    np.testing.assert_allclose(found, wanted, atol=LAYERS["float32"] * np.abs(wanted).max())


def test_what_is_padded_has_no_part_and_no_gradient():
    head = SequenceHead(1, "mean", use_bias=False)
    x, other = tf.constant(X, "float32"), tf.constant(np.where(MASK[..., None], X, 9.0), "float32")
    np.testing.assert_array_equal(head(x, tf.constant(MASK)), head(other, tf.constant(MASK)))
    with tf.GradientTape() as tape:
        tape.watch(x)
        total = tf.reduce_sum(head(x, tf.constant(MASK)))
    assert not tape.gradient(total, x).numpy()[~MASK].any()


def test_without_a_mask_all_positions_count():
    x = tf.constant(X, "float32")
    for pooling in ("first", "mean", "last"):
        head = SequenceHead(2, pooling)
        np.testing.assert_allclose(head(x), head(x, tf.ones((3, 5), "bool")), rtol=1e-6)


def test_token_heads_match_the_reference():
    head = TokenHead(4)
    found = head(tf.constant(X, "float32"), tf.constant(MASK)).numpy()
    wanted = X @ head.classifier.kernel.numpy() + head.classifier.bias.numpy()
    np.testing.assert_allclose(found, wanted, atol=LAYERS["float32"] * np.abs(wanted).max())


@pytest.mark.parametrize("pooling", ["first", "mean", "last"])
def test_vectors_have_length_one(pooling):
    found = PoolingHead(pooling)(tf.constant(X, "float32"), tf.constant(MASK)).numpy()
    wanted = expected_pooling(pooling)[:2]
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    np.testing.assert_allclose(found[:2], wanted, atol=LAYERS["float32"])
    assert not found[2].any()  # a row without a token


def test_configs_make_them_again():
    sequence = SequenceHead(3, "last", hidden_act="tanh", dropout_rate=0.1)
    for head in (sequence, TokenHead(3, norm="layer_norm")):
        again = type(head).from_config(head.get_config())
        assert again.get_config() == head.get_config()


def test_what_is_wrong_is_told():
    with pytest.raises(ValueError, match="first, mean, last"):
        SequenceHead(3, "cls")
    with pytest.raises(ValueError, match="num_labels"):
        TokenHead(0)
