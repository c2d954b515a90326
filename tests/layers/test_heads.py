"""Task heads match NumPy in float64, and padding has no effect."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import PoolingHead, SequenceHead, TokenHead
from dtransformer.models import CausalLM, MaskedLM, add_lora
from dtransformer.models.one_stack import with_task_head
from tests.tolerances import LAYERS

RNG = np.random.default_rng(0)
SIZES = {"hidden_size": 8, "num_heads": 2, "num_layers": 1}
X = RNG.normal(size=(3, 5, 8))
# Padding at the end, at the beginning, and in an entire row.
MASK = np.array([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]], bool)


def expected_pooling(pooling):
    """Return the pooled vectors computed by NumPy, float64 `[b, h]`."""
    rows = [x[is_token] for x, is_token in zip(X, MASK)]
    take = {"first": lambda r: r[0], "last": lambda r: r[-1], "mean": lambda r: r.mean(0)}
    return np.stack([take[pooling](r) if len(r) else np.zeros(8) for r in rows])


@pytest.mark.parametrize("hidden_act", [None, "tanh", "relu"])
@pytest.mark.parametrize("pooling", ["first", "mean", "last"])
def test_sequence_heads_match_the_reference(pooling, hidden_act):
    head = SequenceHead(3, pooling, hidden_act=hidden_act)
    logits = head(tf.constant(X, "float32"), tf.constant(MASK)).numpy()
    x = expected_pooling(pooling)
    if hidden_act:
        x = x @ head.pooler.kernel.numpy() + head.pooler.bias.numpy()
        x = np.tanh(x) if hidden_act == "tanh" else np.maximum(x, 0)
    expected = x @ head.classifier.kernel.numpy() + head.classifier.bias.numpy()
    np.testing.assert_allclose(logits, expected, atol=LAYERS["float32"] * np.abs(expected).max())


def test_padding_has_no_effect_and_no_gradient():
    head = SequenceHead(1, "mean", use_bias=False)
    x, changed = (
        tf.constant(X, "float32"),
        tf.constant(np.where(MASK[..., None], X, 9.0), "float32"),
    )
    np.testing.assert_array_equal(head(x, tf.constant(MASK)), head(changed, tf.constant(MASK)))
    with tf.GradientTape() as tape:
        tape.watch(x)
        total = tf.reduce_sum(head(x, tf.constant(MASK)))
    assert not tape.gradient(total, x).numpy()[~MASK].any()


def test_without_a_mask_all_positions_are_pooled():
    x = tf.constant(X, "float32")
    for pooling in ("first", "mean", "last"):
        head = SequenceHead(2, pooling)
        np.testing.assert_allclose(head(x), head(x, tf.ones((3, 5), "bool")), rtol=1e-6)


def test_token_heads_match_the_reference():
    head = TokenHead(4)
    logits = head(tf.constant(X, "float32"), tf.constant(MASK)).numpy()
    expected = X @ head.classifier.kernel.numpy() + head.classifier.bias.numpy()
    np.testing.assert_allclose(logits, expected, atol=LAYERS["float32"] * np.abs(expected).max())


@pytest.mark.parametrize("pooling", ["first", "mean", "last"])
def test_pooled_vectors_have_length_1(pooling):
    vectors = PoolingHead(pooling)(tf.constant(X, "float32"), tf.constant(MASK)).numpy()
    expected = expected_pooling(pooling)[:2]
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors[:2], expected, atol=LAYERS["float32"])
    assert not vectors[2].any()  # The row without tokens.


def test_head_config_round_trip():
    sequence = SequenceHead(3, "last", hidden_act="tanh", dropout_rate=0.1)
    for head in (sequence, TokenHead(3, norm="layer_norm")):
        restored = type(head).from_config(head.get_config())
        assert restored.get_config() == head.get_config()


def test_network_without_padding_accepts_all_heads():
    for head, shape in (
        (SequenceHead(3, "last"), (2, 3)),
        (TokenHead(3), (2, 5, 3)),
        (PoolingHead("last"), (2, 8)),
    ):
        network = with_task_head(CausalLM(20, pad_id=None, **SIZES), head)
        assert network(np.ones((2, 5), "int32")).shape == shape


def test_padding_with_the_end_token_is_excluded_from_pooling():
    network = with_task_head(CausalLM(20, pad_id=None, **SIZES), SequenceHead(3, "last", pad_id=3))
    ids = np.array([[5, 6, 7, 3, 3]])
    for inputs in (ids, {"tokens": ids, "attention_mask": np.array([[1, 1, 1, 1, 0]])}):
        np.testing.assert_allclose(network(inputs), network(ids[:, :3]), atol=LAYERS["float32"])


def test_keras_files_store_task_heads(tmp_path):
    """Including labels and adapters."""
    network = MaskedLM(20, **SIZES, next_sentence=True)
    network.build()
    head = SequenceHead(3, hidden_act="tanh", dropout_rate=0.1)
    head.label_names = ("bad", "fair", "good")
    add_lora(with_task_head(network, head), rank=2, targets=["*query_kernel", "head/*kernel"])
    for factor in network.trainable_variables:
        factor.assign_add(np.ones(factor.shape))
    network.save(tmp_path / "network.keras")
    restored = keras.saving.load_model(tmp_path / "network.keras")
    ids = np.arange(10).reshape(2, 5)
    np.testing.assert_array_equal(restored(ids), network(ids))
    assert restored.head.label_names == head.label_names and restored.sentence_head is None


def test_generate_rejects_classification_heads():
    network = with_task_head(CausalLM(20, **SIZES), TokenHead(3))
    with pytest.raises(ValueError, match="the network has a TokenHead, which returns labels"):
        network.generate([[5, 6]], 3)


def test_invalid_head_options_raise():
    with pytest.raises(ValueError, match="first, mean, last"):
        SequenceHead(3, "cls")
    with pytest.raises(ValueError, match="num_labels"):
        TokenHead(0)
