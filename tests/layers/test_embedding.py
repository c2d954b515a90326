"""Embeddings, positions and the vocabulary head against the reference, with padded vocabularies."""

import numpy as np
import pytest
import tensorflow as tf

from dtransformer import TransformerOpParallelConfig, parallel_config
from dtransformer.layers import (
    CrossEntropyLoss,
    PositionEmbedding,
    TokenTypeEmbedding,
    VocabEmbedding,
    VocabHead,
)
from dtransformer.layers.position import segment_starts
from tests.layers import reference, reference_weights
from tests.layers.reference_compare import assign, compare, dtype_policy, each_policy
from tests.tolerances import LAYERS, assert_all_close

VOCAB, PADDED, HIDDEN = 10, 12, 6


def random_table(rng, rows=VOCAB):
    return {"table": reference_weights.numbers(rng, rows, HIDDEN)}


@each_policy
@pytest.mark.parametrize("shape", [(2, 5), (1, 1), (3, 40)])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_look_up_and_gradient_of_repeated_ids(policy, shape, dtype):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB, shape).astype(dtype)
    layer = compare(
        policy,
        lambda: VocabEmbedding(VOCAB, HIDDEN),
        reference.embedding,
        [ids],
        random_table(rng),
        call=lambda layer, ids: layer(ids)[0],
    )
    embeddings, table = layer(ids)
    np.testing.assert_array_equal(tf.cast(table, tf.float32), layer.table.numpy())
    np.testing.assert_array_equal(tf.cast(embeddings, tf.float32), layer.table.numpy()[ids])


@each_policy
@pytest.mark.parametrize("use_bias", [False, True])
def test_head_matches_the_reference(policy, use_bias):
    rng = np.random.default_rng(1)
    compare(
        policy,
        lambda: VocabHead(VOCAB, use_bias=use_bias),
        reference.linear,
        [reference_weights.numbers(rng, 2, 5, HIDDEN)],
        reference_weights.linear(rng, HIDDEN, VOCAB, use_bias),
        call=lambda layer, x: layer(x),
    )


def tied_loss(ids, weights, labels):
    """Reference of a tied embedding: look-up, product with the table, cross entropy."""
    table = weights["table"]
    embeddings, embedding_backward = reference.embedding(ids, weights)
    logits, head_backward = reference.linear(embeddings, {"kernel": table.T})
    loss, loss_backward = reference.cross_entropy(logits, labels)

    def backward(grad):
        (grad_logits,), _ = loss_backward(grad)
        (grad_embeddings,), head_grads = head_backward(grad_logits)
        _, grads = embedding_backward(grad_embeddings)
        return (), {"table": grads["table"] + head_grads["kernel"].T}

    return loss, backward


def run_tied(policy, weights, ids, labels):
    """Return the loss, logits and table gradient of the tied layers."""
    with dtype_policy(policy):
        embed, head = VocabEmbedding(VOCAB, HIDDEN), VocabHead(VOCAB, tied=True, keeps_padding=True)
    embed(ids)
    variables = assign(embed, weights)
    with tf.GradientTape() as tape:
        logits = head(*embed(ids))
        loss = CrossEntropyLoss(vocab_size=VOCAB)(logits, labels)
    gradient = tape.gradient(loss, variables["table"].value)
    return loss, logits, tf.convert_to_tensor(gradient)


@each_policy
def test_tied_table_receives_both_gradients(policy):
    rng = np.random.default_rng(2)
    ids, labels = rng.integers(0, VOCAB, (2, 3, 5))
    weights = random_table(rng)
    loss, _, gradient = run_tied(policy, weights, ids, labels)
    expected, backward = tied_loss(ids, weights, labels)
    assert_all_close({"loss": loss}, {"loss": expected}, LAYERS[policy])
    assert_all_close({"table": gradient}, backward(1.0)[1], LAYERS[policy])


@each_policy
def test_padded_rows_do_not_change_results(policy):
    """Ten entries on four ranks are padded to twelve rows. The last two have no effect."""
    rng = np.random.default_rng(3)
    ids, labels = rng.integers(0, VOCAB, (2, 3, 5))
    true = random_table(rng)
    expected, backward = tied_loss(ids, true, labels)
    with parallel_config(TransformerOpParallelConfig(model_parallel=4)):
        seen = []
        for fill in (0.0, 1000.0, -1000.0):
            rows = np.full((PADDED - VOCAB, HIDDEN), fill)
            weights = {"table": np.concatenate([true["table"], rows])}
            seen.append(run_tied(policy, weights, ids, labels))
    for loss, logits, gradient in seen:
        assert logits.shape[-1] == PADDED
        assert (tf.argmax(tf.cast(logits, tf.float32), -1) < VOCAB).numpy().all()
        probabilities = tf.nn.softmax(tf.cast(logits, tf.float32)).numpy()
        np.testing.assert_array_equal(probabilities[..., VOCAB:], 0.0)
        assert_all_close({"loss": loss}, {"loss": expected}, LAYERS[policy])
        assert_all_close({"table": gradient[:VOCAB]}, backward(1.0)[1], LAYERS[policy])
        np.testing.assert_array_equal(gradient[VOCAB:], 0.0)
        assert float(loss) == float(seen[0][0])
        np.testing.assert_array_equal(gradient, seen[0][2])


@each_policy
@pytest.mark.parametrize("use_bias", [False, True])
def test_padded_untied_head_matches_unpadded_head(policy, use_bias):
    rng = np.random.default_rng(4)
    weights = reference_weights.linear(rng, HIDDEN, PADDED, use_bias)
    x = reference_weights.numbers(rng, 2, 5, HIDDEN)

    def reference_head(x, weights):
        true = {name: value[..., :VOCAB] for name, value in weights.items()}
        logits, backward = reference.linear(x, true)

        def padded_backward(grad):
            inputs, grads = backward(grad)
            return inputs, {
                name: np.pad(g, [(0, 0)] * (g.ndim - 1) + [(0, PADDED - VOCAB)])
                for name, g in grads.items()
            }

        return logits, padded_backward

    with parallel_config(TransformerOpParallelConfig(model_parallel=4)):
        compare(
            policy,
            lambda: VocabHead(VOCAB, use_bias=use_bias),
            reference_head,
            [x],
            weights,
            call=lambda layer, x: layer(x)[..., :VOCAB],
        )


def test_initial_values_do_not_depend_on_padding():
    tables = []
    for model_parallel in (1, 4):
        with parallel_config(TransformerOpParallelConfig(model_parallel=model_parallel)):
            layer = VocabEmbedding(VOCAB, HIDDEN, name="embedding")
            tables.append(layer(np.zeros((1, 1), np.int32))[1].numpy())
    assert tables[0].shape == (VOCAB, HIDDEN) and tables[1].shape == (PADDED, HIDDEN)
    np.testing.assert_array_equal(tables[1][:VOCAB], tables[0])


@pytest.mark.parametrize("index", [10, 11, 12, -1])
def test_ids_of_padded_rows_raise(index):
    with parallel_config(TransformerOpParallelConfig(model_parallel=4)):
        layer = VocabEmbedding(10, 4)
        assert layer(tf.constant([[0, 9]]))[1].shape == (12, 4)
        with pytest.raises(tf.errors.InvalidArgumentError, match="is not in"):
            layer(tf.constant([[0, index]]))


@each_policy
def test_learned_positions_match_the_reference(policy):
    rng = np.random.default_rng(5)
    x = reference_weights.numbers(rng, 2, 5, HIDDEN)

    def positions(x, weights, start=0):
        rows = np.broadcast_to(np.arange(start, start + x.shape[1]), x.shape[:2])
        table, backward = reference.embedding(rows, weights)
        return x + table, lambda grad: ((grad,), backward(grad)[1])

    for start, offset in ((0, 0), (3, 0), (1, 2)):
        compare(
            policy,
            lambda: PositionEmbedding(VOCAB - offset, kind="learned", offset=offset),
            lambda x, weights: positions(x, weights, start + offset),
            [x],
            random_table(rng),
            call=lambda layer, x: layer(x, start=start),
        )


@each_policy
def test_token_type_embedding_matches_the_reference(policy):
    rng = np.random.default_rng(7)
    x, types = reference_weights.numbers(rng, 2, 5, HIDDEN), rng.integers(0, 3, (2, 5))
    weights = {"table": reference_weights.numbers(rng, 3, HIDDEN)}

    def with_types(x, weights, types):
        rows, backward = reference.embedding(types, weights)
        return x + rows, lambda grad: ((grad,), backward(grad)[1])

    for token_types in (types, None):
        rows = np.zeros_like(types) if token_types is None else token_types
        compare(
            policy,
            lambda: TokenTypeEmbedding(3),
            lambda x, weights: with_types(x, weights, rows),
            [x],
            weights,
            call=lambda layer, x: layer(x, token_types),
        )


@each_policy
@pytest.mark.parametrize("hidden", [6, 7])
@pytest.mark.parametrize("kind", ["sinusoidal", "sinusoidal_paper"])
def test_sinusoidal_positions_match_the_formula(policy, hidden, kind):
    """Wavelengths from 2π to 10000·2π, or 10000^(2i/h) as in the paper, sines first."""
    rng = np.random.default_rng(6)
    x = reference_weights.numbers(rng, 2, 9, hidden)
    half = (hidden + 1) // 2
    last = half - 1 if kind == "sinusoidal" else hidden / 2
    angles = np.arange(9)[:, None] * 10000.0 ** (-np.arange(half) / last)
    rows = np.concatenate([np.sin(angles), np.cos(angles)], -1)[:, :hidden]
    compare(
        policy,
        lambda: PositionEmbedding(9, kind),
        lambda x: (x + rows, lambda grad: ((grad,), {})),
        [x],
        call=lambda layer, x: layer(x),
    )


def test_positions_restart_in_each_segment_in_linear_memory():
    rng = np.random.default_rng(8)
    numbers = np.cumsum(rng.integers(0, 2, (3, 37)), axis=1, dtype="int32")
    expected = [[np.flatnonzero(row == segment)[0] for segment in row] for row in numbers]
    anyhow = tf.function(segment_starts, input_signature=[tf.TensorSpec([None, None], "int32")])
    for result in (segment_starts(tf.constant(numbers)), anyhow(numbers), anyhow(numbers[:, :1])):
        np.testing.assert_array_equal(result, np.array(expected)[:, : result.shape[1]])

    graph = tf.function(segment_starts).get_concrete_function(tf.TensorSpec([2, 512], "int32"))
    sizes = [out.shape.num_elements() for op in graph.graph.get_operations() for out in op.outputs]
    assert max(sizes) <= 2 * 2 * 512
