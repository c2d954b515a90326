"""Every layer of a Keras model gets a pipeline stage, or one line states the obstacle."""

import keras
import pytest
import tensorflow as tf

from dtransformer.layers import TransformerEncoderLayer
from dtransformer.models import TranslationTransformer
from dtransformer.parallel.pipeline_parallel.build import assign_by_use, assign_evenly, place_all
from dtransformer.parallel.pipeline_parallel.dataflow import Dataflow
from dtransformer.parallel.pipeline_parallel.stage_assignment import (
    get_chunk_losses,
    get_chunk_weights,
    has_state,
)
from dtransformer.parallel.pipeline_parallel.stage_dispatch import ChunkView, view
from dtransformer.parallel.schedules.placement import Placement

TWO = Placement.looped(2)
X = tf.reshape(tf.range(48.0), [2, 3, 8]) / 48
IDS = tf.reshape(tf.range(6), [2, 3])


def placed(network, inputs, placement=TWO):
    network(inputs)
    place_all(network, inputs, placement)
    return Dataflow.from_network(network, inputs, placement)


def assert_chunks_give(network, inputs, dataflow, expected):
    """Run all chunks of a network in sequence and compare the last outputs."""
    received = {}
    for chunk in range(dataflow.placement.num_chunks):
        with view(ChunkView(chunk, dataflow, received)) as calls:
            outputs = network(inputs)
        received = calls.sent
    tf.nest.map_structure(
        lambda x, y: tf.debugging.assert_near(x, y, 1e-6, 1e-6), outputs, expected
    )


def stages(*layers):
    return [layer.pipeline_stage for layer in layers]


def test_sequential_model_is_split_by_matmul_weights():
    layers = [keras.layers.Embedding(1000, 8), *(keras.layers.Dense(n) for n in (32, 32, 8))]
    network = keras.Sequential([layers[0], layers[1], keras.layers.Dropout(0.1), *layers[2:]])
    expected = network(IDS)
    dataflow = placed(network, IDS)
    # Weights of matrix products: 0 (embedding), 288, 1,056 and 264.
    assert stages(*layers) == [0, 0, 1, 1]
    assert_chunks_give(network, IDS, dataflow, expected)


class Counted(keras.layers.Layer):
    """Layer with an attribute that Keras may not track as state."""

    def __init__(self, saved):
        super().__init__()
        self.kept = saved

    def call(self, x):
        return x


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: keras.layers.Dense(8), [False, False]),
        (lambda: keras.layers.BatchNormalization(), [True, False]),
        (lambda: keras.layers.Dropout(0.1), [True, False]),
        (lambda: Counted(tf.Variable(0)), [True, True]),
        (lambda: Counted({"of": [1], "generator": tf.random.Generator.from_seed(1)}), [True, True]),
        (lambda: Counted([tf.Variable(0)]), [True, True]),
        (lambda: Counted(keras.metrics.Mean()), [True, True]),
        (lambda: Counted([1, "two"]), [False, False]),
    ],
    ids=["none", "means", "seed", "variable", "generator", "variables", "metric", "others"],
)
def test_has_state_detects_layers_that_change_state(make, expected):
    network = keras.Sequential([keras.layers.Dense(8), make(), keras.layers.Dense(8)])
    placed(network, X)
    assert [has_state(network, chunk, TWO) for chunk in (0, 1)] == expected


def functional_model():
    inputs = keras.Input((3, 8))
    x = keras.layers.Dense(8, name="first")(inputs)
    x = keras.ops.relu(x) + inputs
    block = TransformerEncoderLayer(8, 2, 16, name="block")
    y = keras.layers.LayerNormalization(name="norm")(block(x))
    return keras.Model(inputs, [keras.layers.Dense(4, name="head")(y), y])


@pytest.mark.parametrize("stage", [0, 1])
def test_unplaced_layers_join_the_stage_of_their_neighbor(stage):
    network = functional_model()
    network.get_layer("block").pipeline_stage = stage
    network.get_layer("first").pipeline_stage = 0
    network.get_layer("head").pipeline_stage = -1
    expected = network(X)
    dataflow = placed(network, X)
    assert stages(network.get_layer("norm")) == [stage]
    assert_chunks_give(network, X, dataflow, expected)
    assert len(dataflow.sent_after(0)) == 1


class Towers(keras.Model):
    """Model of two identical towers, whose layers have equal names."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (
            keras.Sequential([keras.Input((3, 8)), keras.layers.Dense(8, name="dense")])
            for _ in range(2)
        )
        self.head = keras.layers.Dense(2)

    def call(self, x):
        return self.head(self.left(x) - self.right(x))


def test_layers_with_equal_names_are_distinguished():
    network = Towers()
    expected = network(X)
    dataflow = placed(network, X, Placement.looped(3))
    assert_chunks_give(network, X, dataflow, expected)


def test_extra_layer_outside_a_network_is_placed():
    class WithMore(TranslationTransformer):
        def __init__(self, **kwargs):
            super().__init__(20, hidden_size=8, num_heads=2, dropout_rate=0.0, **kwargs)
            self.more = keras.layers.Dense(8, name="more")

        def call(self, inputs, training=False):
            return self.more(super().call(inputs, training=training))

    network = WithMore(encoder_layers=1, decoder_layers=1)
    for stage, stack in enumerate((network.transformer.encoder, network.transformer.decoder)):
        stack.blocks[0].pipeline_stage = stack.final_norm.pipeline_stage = stage
    inputs = {"source": IDS, "target": IDS}
    expected = network(inputs)
    dataflow = placed(network, inputs)
    assert stages(network.more) == [1]
    assert_chunks_give(network, inputs, dataflow, expected)


class AddsLosses(keras.Model):
    """Model with a weightless layer that adds a loss between two layers with weights."""

    def __init__(self):
        super().__init__()
        self.first, self.last = (
            keras.layers.Dense(8, kernel_regularizer="l2"),
            keras.layers.Dense(2),
        )
        self.activity = keras.layers.ActivityRegularization(l2=0.1)

    def call(self, x):
        return self.last(self.activity(self.first(x)))


def test_added_losses_are_counted_once():
    network = AddsLosses()
    network(X)
    expected = sum(network.losses)
    dataflow = placed(network, X)
    assert stages(network.first, network.activity, network.last) == [0, 1, 1]
    chunk_losses, received = [], {}
    for chunk in range(2):
        with view(ChunkView(chunk, dataflow, received)) as calls:
            network(X)
        received = calls.sent
        chunk_losses += get_chunk_losses(network, chunk, TWO)
    tf.debugging.assert_near(tf.add_n(chunk_losses), expected)


class Tied(keras.Model):
    """Model that reads a layer's weight outside of the layer's call."""

    def __init__(self):
        super().__init__()
        self.embedding, self.dense = keras.layers.Embedding(6, 8), keras.layers.Dense(8)

    def call(self, ids):
        x = self.dense(self.embedding(ids))
        return tf.matmul(x, self.embedding.embeddings, transpose_b=True)


class ReadsTable(keras.layers.Layer):
    """Head that contains the embedding, like `MaskedLMHead` of KerasHub."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.dense = keras.layers.Dense(8)

    def call(self, x):
        return self.embedding(self.dense(x), reverse=True)


class TiedHead(keras.Model):
    """Language model whose head multiplies with the embedding table.

    Args:
        head: Function of the embedding that returns a layer or `None`. `None` calls the embedding
            again.
    """

    def __init__(self, head=lambda embedding: None):
        super().__init__()
        self.embedding = keras.layers.ReversibleEmbedding(6, 8)
        self.dense = keras.layers.Dense(8)
        self.head = head(self.embedding)

    def call(self, ids):
        x = self.dense(self.embedding(ids))
        return self.embedding(x, reverse=True) if self.head is None else self.head(x)


@pytest.mark.parametrize("head", [lambda embedding: None, ReadsTable], ids=["call", "layer"])
def test_first_and_last_chunk_have_a_tied_table(head):
    network = TiedHead(head)
    expected = network(IDS)
    dataflow = placed(network, IDS)
    assert network.embedding.pipeline_stage == 0
    assert dataflow.get_copy_chunks(network.embedding) == {1}
    for chunk in (0, 1):
        trained, _ = get_chunk_weights(network, chunk, dataflow)
        assert sum(weight is network.embedding.embeddings for weight in trained) == 1
    assert_chunks_give(network, IDS, dataflow, expected)


class CallsAgain(keras.Model):
    """Model that calls its first layer again after the others."""

    def __init__(self, first):
        super().__init__()
        self.first, self.dense = first, keras.layers.Dense(8)

    def call(self, x):
        return self.first(self.dense(self.first(x)))


def test_a_repeated_layer_is_copied_to_the_chunk_of_its_second_call():
    network = CallsAgain(keras.layers.Dense(8))
    expected = network(X)
    dataflow = placed(network, X)
    assert dataflow.get_copy_chunks(network.first) == {1}
    assert_chunks_give(network, X, dataflow, expected)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: keras.layers.BatchNormalization(),
        lambda: keras.layers.Dense(8, activity_regularizer="l2"),
    ],
    ids=["state", "added loss"],
)
def test_a_repeated_layer_with_state_or_added_losses_is_refused(layer):
    with pytest.raises(ValueError, match="except repeated calls of a layer without state"):
        placed(CallsAgain(layer()), X)


def test_the_head_counts_when_layers_are_divided():
    layers = [keras.layers.Dense(8) for _ in range(4)]
    embedding = keras.layers.ReversibleEmbedding(1000, 8)
    ids = keras.Input((3,), dtype="int32")
    x = embedding(ids)
    for layer in layers:
        x = layer(x)
    placed(keras.Model(ids, embedding(x, reverse=True)), IDS)
    assert stages(embedding, *layers) == [0, 0, 0, 0, 1]


class OwnLoss(Tied):
    def call(self, ids):
        x = self.dense(self.embedding(ids))
        self.add_loss(tf.reduce_mean(x))
        return x


class OwnWeight(Tied):
    def __init__(self):
        super().__init__()
        self.scale = self.add_weight(shape=(), name="scale")

    def call(self, ids):
        return self.dense(self.embedding(ids)) * self.scale


class Backwards(Tied):
    """Model whose layers are assigned to stages in decreasing order."""

    def __init__(self):
        super().__init__()
        self.embedding.pipeline_stage, self.dense.pipeline_stage = 1, 0

    def call(self, ids):
        return self.dense(self.embedding(ids))


@pytest.mark.parametrize(
    "kind, words",
    [
        (Tied, "embeddings is used outside of a call of its layer"),
        (OwnLoss, "own_loss adds a loss in its call"),
        (OwnWeight, "own_weight has weights outside of its layers"),
        (Backwards, "can only use results of earlier stages"),
    ],
)
def test_rejects_networks_that_no_stage_can_compute(kind, words):
    with pytest.raises(ValueError, match=words):
        placed(kind(), IDS)


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(ValueError, match="calls 1 layers with weights.* 2 model chunks"):
        placed(keras.Sequential([keras.layers.Dense(2), keras.layers.ReLU()]), X)


def test_rejects_a_nonexistent_stage():
    network = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(8)])
    network(X)
    network.layers[0].pipeline_stage, network.layers[1].pipeline_stage = 0, 2
    with pytest.raises(ValueError, match="`pipeline_stage=2` of .* there are 2 stages"):
        placed(network, X)


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4, 7])
def test_spread_minimizes_the_largest_chunk(num_chunks):
    sizes = dict(enumerate([1, 9, 4, 4, 4, 9, 2, 30]))
    result = assign_evenly(sizes, num_chunks)
    assert sorted(set(result.values())) == list(range(num_chunks))
    assert list(result.values()) == sorted(result.values())
    largest = max(sum(sizes[k] for k in result if result[k] == c) for c in range(num_chunks))
    assert largest == {1: 63, 2: 32, 3: 30, 4: 30, 7: 30}[num_chunks]


def test_unplaced_calls_join_their_consumers():
    calls = [("a", []), ("ids", []), ("b", ["a"]), ("c", ["b", "ids"]), ("d", ["c"]), ("e", [])]
    assert assign_by_use(calls, ["d", "e"], {"a": 0, "c": 2}, 4) == {
        "b": 0,
        "ids": 2,
        "d": 2,
        "e": 3,
    }
