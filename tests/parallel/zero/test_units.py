"""Level 3 frees a block's weights between the passes and gathers one block ahead."""

import contextlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import CrossEntropyLoss, TransformerEncoder
from dtransformer.models import CausalLM
from dtransformer.parallel import variable_factory
from dtransformer.parallel.config.config import TransformerRecomputeConfig, parallel_config
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.dropout_seed import dropout_seed
from dtransformer.parallel.weights.weight import trained_value
from dtransformer.parallel.zero import gather, units
from dtransformer.parallel.zero.variables import FullyShardedVariable
from dtransformer.reports.audit import needed_operations

NUM_BLOCKS = 4
X = np.random.default_rng(0).normal(size=(2, 5, 8)).astype("float32")


@pytest.fixture
def sharded(monkeypatch):
    """Shard weights over a group of one rank, and give the all-gathers operations with a name."""

    def all_gather(variable, shard, name, wait_for=()):
        with tf.control_dependencies(list(wait_for)):
            shard = tf.identity(shard, name=f"all_gather/{name}")
        return tf.reshape(shard, variable.shape)

    monkeypatch.setattr(variable_factory, "_flat_class", lambda *args: FullyShardedVariable)
    monkeypatch.setattr(units, "all_gather", all_gather)
    monkeypatch.setattr(gather, "all_gather", all_gather)
    with parallel_config(parallel_optimizer_threshold=0):
        yield


def stack(**options):
    layers = TransformerEncoder(
        NUM_BLOCKS, 8, 2, 16, hidden_dropout_rate=0.2, name="stack", **options
    )
    layers.build(X.shape)
    rng = np.random.default_rng(1)
    for weight in layers.weights:
        weight.assign(rng.normal(size=weight.shape, scale=0.5))
    return layers


@contextlib.contextmanager
def training_tape():
    """Record a training step in the `with` block, with weights that are gathered on use."""
    with (
        tf.GradientTape() as tape,
        gather.unsharding("train"),
        dropout_seed(tf.constant([1, 2])),
        trace.training_step(),
    ):
        yield tape


def step(layers):
    """Return the function of a training step: the output, and all gradients as one vector."""
    weights = layers.trainable_variables

    @tf.function(autograph=False)
    def run(x):
        values = list(map(trained_value, weights))
        with training_tape() as tape:
            tape.watch([x, *values])
            y = layers(x, training=True)
            loss = tf.reduce_sum(tf.sin(y))
        gradients = tape.gradient(loss, [x, *values])
        return y, tf.concat([tf.reshape(g, [-1]) for g in gradients], 0)

    return run


def build_graph(layers):
    return step(layers).get_concrete_function(tf.constant(X)).graph


def ancestors(operation):
    result = set()
    pending = [operation]
    while pending:
        current = pending.pop()
        inputs = [*(x.op for x in current.inputs), *current.control_inputs]
        pending += [other for other in inputs if other not in result]
        result.update(inputs)
    return result


def find_gathers(graph, block, is_again):
    """Return the all-gathers of a block's kernels in one of the two passes."""
    return [
        operation
        for operation in graph.get_operations()
        if "all_gather/" in operation.name
        and f"block_{block}/" in operation.name.split("all_gather/")[1]
        and ("/again" in operation.name) == is_again
    ]


def find_products(operations, block, is_backward):
    """Return the names of a block's products in one of the two passes."""
    return {
        operation.name
        for operation in operations
        if operation.type == "MatMul"
        and re.search(rf"block_{block}[_/]", operation.name)
        and operation.name.startswith("gradient/") == is_backward
    }


RECOMPUTE = [False, True, TransformerRecomputeConfig(select=("attention", "norm"))]


@pytest.mark.parametrize("recompute", RECOMPUTE, ids=["none", "block", "parts"])
def test_gradients_equal_the_gradients_of_full_weights(recompute, sharded, monkeypatch):
    def run():
        layers = stack()
        for block in layers.blocks:
            block.recompute(recompute)
        return step(layers)(tf.constant(X))

    y, gradients = run()
    monkeypatch.undo()
    expected_y, expected = run()
    np.testing.assert_allclose(y, expected_y, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(gradients, expected, rtol=1e-5, atol=1e-5)


def test_no_gathered_weight_lives_until_the_backward_pass(sharded):
    graph = build_graph(stack())
    for block in range(NUM_BLOCKS):
        pending = find_gathers(graph, block, is_again=False)
        assert len(pending) > 6
        while pending:  # Follow the values that depend on weights only.
            for consumer in (x for y in pending.pop().outputs for x in y.consumers()):
                assert not consumer.name.startswith("gradient/"), consumer.name
                if consumer.type in ("Reshape", "Cast", "Transpose", "Identity"):
                    pending.append(consumer)


def test_gathers_wait_for_the_neighboring_block(sharded):
    graph = build_graph(stack())
    for block in range(1, NUM_BLOCKS):
        before = ancestors(find_gathers(graph, block, is_again=False)[0])
        assert not find_products(before, block - 1, is_backward=False)
        assert block == 1 or find_products(before, block - 2, is_backward=False)
    for block in range(NUM_BLOCKS - 1):
        before = ancestors(find_gathers(graph, block, is_again=True)[0])
        assert not find_products(before, block + 1, is_backward=True)
        has_later_block = block + 2 < NUM_BLOCKS
        assert bool(find_products(before, block + 2, is_backward=True)) is has_later_block


def test_no_product_is_computed_twice(sharded, monkeypatch):
    sharded_graph = build_graph(stack())
    monkeypatch.undo()
    layers = stack()
    for block in layers.blocks:
        block.shared = None
    kinds = [operation.type for operation in build_graph(layers).get_operations()]
    sharded_kinds = [operation.type for operation in sharded_graph.get_operations()]
    assert sharded_kinds.count("MatMul") == kinds.count("MatMul")
    assert sharded_kinds.count("BatchMatMulV2") == kinds.count("BatchMatMulV2") > 0


@pytest.mark.parametrize("gathers_again", [False, True])
def test_recompute_gathers_a_third_time_only_if_configured(gathers_again, sharded):
    layers = stack()
    for block in layers.blocks:
        block.recompute(
            TransformerRecomputeConfig(
                recompute=True, parallel_optimizer_comm_recompute=gathers_again
            )
        )
    names = [operation.name for operation in build_graph(layers).get_operations()]
    assert any("/again" in name for name in names)
    assert any("/third" in name for name in names) is gathers_again


VOCAB_SIZE = 31
IDS = np.random.default_rng(2).integers(4, VOCAB_SIZE, (2, 5), "int32")


def loss_step(is_tied, chunk_tokens):
    """Return a function of ids and labels: the loss and the gradients of a causal language model."""
    keras.utils.set_random_seed(0)
    network = CausalLM(
        VOCAB_SIZE, hidden_size=8, num_heads=2, num_layers=2, dropout_rate=0.0, tied_head=is_tied
    )
    network.build()
    loss = CrossEntropyLoss(chunk_tokens=chunk_tokens)
    weights = network.trainable_variables

    @tf.function(autograph=False)
    def run(inputs, labels):
        values = list(map(trained_value, weights))
        with training_tape() as tape:
            tape.watch(values)
            value = loss(network(inputs, training=True), labels)
        gradients = tape.gradient(value, values)
        return value, tf.concat([tf.reshape(g, [-1]) for g in gradients], 0)

    return run


@pytest.mark.parametrize("is_tied", [False, True])
def test_gradients_of_a_loss_in_chunks_equal_the_gradients_of_all_logits(is_tied, sharded):
    expected_loss, expected = loss_step(is_tied, None)(IDS, IDS)
    loss, gradients = loss_step(is_tied, 3)(IDS, IDS)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    np.testing.assert_allclose(gradients, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_loss_in_chunks_gathers_the_head_once(is_tied, sharded):
    graph = loss_step(is_tied, 3).get_concrete_function(tf.constant(IDS), tf.constant(IDS)).graph
    needed = needed_operations(graph)
    shapes = {tuple(x.shape) for operation in needed for x in operation.outputs if x.shape}
    assert not shapes & {(*IDS.shape, VOCAB_SIZE), (IDS.size, VOCAB_SIZE)}
    path = "embedding/table" if is_tied else "head/kernel"
    gathers = [x for x in needed if f"{path}/" in x.name.partition("all_gather/")[2]]
    # A tied table is gathered for the look-up and kept until the head has used it. The forward pass
    # computes all gradients of an untied head.
    assert len(gathers) == 1 and "/again" not in gathers[0].name


def test_a_loss_in_chunks_gathers_the_head_during_the_last_block(sharded):
    graph = loss_step(False, 3).get_concrete_function(tf.constant(IDS), tf.constant(IDS)).graph
    (head,) = [
        x
        for x in needed_operations(graph)
        if "head/kernel/" in x.name.partition("all_gather/")[2] and "/again" not in x.name
    ]
    before = ancestors(head)
    assert find_products(before, 0, is_backward=False)
    assert not find_products(before, 1, is_backward=False)
