"""Identical blocks of a stack are traced once, without a change of results."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import (
    AttentionMask,
    TransformerDecoder,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from dtransformer.parallel.tracing.dropout_seed import dropout_seed

X = np.random.default_rng(0).normal(size=(2, 5, 8)).astype("float32")
MEMORY = np.random.default_rng(1).normal(size=(2, 4, 8)).astype("float32")
MASK = np.array([[1, 1, 1, 0], [1, 1, 1, 1]], "int32")
SEED = [3, 4]


def stack(kind=TransformerEncoder, num_layers=3, **options):
    """Return a stack of blocks with different weights and biases."""
    layers = kind(num_layers, 8, 2, 16, name="stack", **options)
    layers.build(X.shape)
    rng = np.random.default_rng(2)
    layers.set_weights([rng.normal(size=w.shape, scale=0.5) for w in layers.weights])
    return layers


def results(layers, training=True):
    """Return the output and the gradients of the input and the weights of a traced call."""
    arguments = ()
    if isinstance(layers, TransformerDecoder):
        arguments = (AttentionMask()(np.ones((2, 5))), MEMORY, MASK)

    @tf.function(autograph=False)
    def run(x):
        with tf.GradientTape() as tape, dropout_seed(tf.constant(SEED)):
            tape.watch(x)
            y = layers(x, *arguments, training=training)
            loss = tf.reduce_sum(tf.sin(y))
        return y, tape.gradient(loss, [x, *layers.trainable_weights])

    return tf.nest.flatten(run(tf.constant(X)))


def without_sharing(layers):
    for block in layers.blocks:
        block.shared = None
    return layers


def one_recomputed(layers):
    layers.blocks[1].recompute()


def another_rate(layers):
    layers.blocks[1].attention.attention_dropout.rate = 0.5


def one_frozen(layers):
    layers.blocks[1].trainable = False


def another_activation(layers):
    layers.blocks[2].feed_forward.activation = keras.activations.relu
    layers.blocks[2].feed_forward.hidden_act = "relu"


@pytest.mark.parametrize("kind", [TransformerEncoder, TransformerDecoder])
@pytest.mark.parametrize("training", [False, True])
def test_shared_tracing_does_not_change_results(kind, training):
    expected = results(without_sharing(stack(kind)), training)
    for actual, expected_result in zip(results(stack(kind), training), expected, strict=True):
        np.testing.assert_allclose(actual, expected_result, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [one_recomputed, another_rate, one_frozen, another_activation],
    ids=lambda x: x.__name__,
)
def test_changed_block_is_traced_separately(change):
    shared, separate = stack(), stack()
    before = results(shared)[0]
    for layers in (shared, separate):
        change(layers)
    shared_results, separate_results = results(shared), results(without_sharing(separate))
    for actual, expected in zip(shared_results, separate_results, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    same = np.allclose(before, shared_results[0], atol=1e-6)
    assert same == (change in (one_recomputed, one_frozen))


def test_only_one_block_is_traced_at_any_depth(monkeypatch):
    calls = []
    compute = TransformerEncoderLayer.feed
    monkeypatch.setattr(
        TransformerEncoderLayer,
        "feed",
        lambda self, *args, **options: calls.append(self.name) or compute(self, *args, **options),
    )
    results(stack(num_layers=6))
    assert calls == ["block_0"]


def test_blocks_with_stateful_layers_are_not_shared():
    class Noisy(TransformerEncoderLayer):
        def add_sublayers(self):
            super().add_sublayers()
            self.noise = keras.layers.GaussianNoise(1.0)

        def feed(self, inputs, mask=None, training=False, drops=True):
            return super().feed(self.noise(inputs, training=training), mask, training, drops)

    class Stack(TransformerEncoder):
        layer_class = Noisy

    layers = stack(Stack)
    run = tf.function(lambda x: layers(x, training=True), autograph=False)
    assert (
        np.abs(run(tf.constant(X)) - run(tf.constant(X))).max() > 0.1
    )  # the noise differs between calls


def in_a_function(layers, x):
    return tf.function(layers, autograph=False)(x, None)


def in_a_loop(layers, x):
    return tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, layers(x, None)), (0, x))[1]


@pytest.mark.parametrize("call", [in_a_function, in_a_loop])
def test_gradients_through_functions_and_loops(call):
    """A block inside cannot see that its inputs are watched by an outer tape."""

    def gradients(layers):
        x = tf.constant(X)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = call(layers, x)
        return tape.gradient(y, [x, *(weight.value for weight in layers.trainable_variables)])

    expected, actual = (
        gradients(without_sharing(stack())),
        tf.function(gradients, autograph=False)(stack()),
    )
    for gradient, expected_gradient in zip(actual, expected, strict=True):
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-4)


def test_only_tensors_that_gradients_read_are_saved():
    """A block saves two tensors of the size of its attention probabilities, and smaller ones."""
    layers = stack(num_layers=13, hidden_act="relu")  # TensorFlow inlines shallow stacks

    @tf.function(autograph=False)
    def run(x):
        with tf.GradientTape() as tape, dropout_seed(tf.constant(SEED)):
            tape.watch(x)
            loss = tf.reduce_sum(layers(x, training=True))
        return tape.gradient(loss, [x, *layers.trainable_weights])

    graph = run.get_concrete_function(tf.TensorSpec([None, None, 8])).graph
    calls = [op for op in graph.get_operations() if op.type.endswith("PartitionedCall")]
    blocks = [op for op in calls if len(op.outputs) > len(layers.blocks[0].weights) + 5]
    assert len(blocks) == 13
    for block in blocks:
        shapes = [tuple(x.shape) for x in block.outputs if x.dtype == tf.float32]
        assert shapes.count((None, 2, None, None)) == 2  # before and after dropout
        # These are the result, the inputs of two products and the output of each norm.
        assert sum(x == (None, None, 8) for x in shapes) <= 5, shapes
