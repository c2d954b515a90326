"""Equal layers have equal signatures, and their names map to each other."""

import pytest
import tensorflow as tf

from dtransformer.layers import TransformerEncoder
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.equal_layers import EqualLayers, signature


@pytest.fixture
def blocks():
    stack = TransformerEncoder(12, 8, 2, 16, name="stack")
    stack.build((2, 5, 8))
    return stack.blocks


def freeze(block):
    block.trainable = False


def change_rate(block):
    block.attention.attention_dropout.rate = 0.5


def change_activation(block):
    block.feed_forward.hidden_act = "relu"


@pytest.mark.parametrize(
    "change", [freeze, change_rate, change_activation], ids=lambda x: x.__name__
)
def test_changed_layers_have_another_signature(blocks, change):
    assert signature(blocks[1]) == signature(blocks[2])
    change(blocks[1])
    assert signature(blocks[1]) != signature(blocks[2])


def test_signature_depends_on_the_context(blocks):
    before = signature(blocks[0])
    with trace.training_step():
        assert signature(blocks[0]) != before


def test_names_map_to_the_equal_layer_at_the_same_distance(blocks):
    source = EqualLayers(blocks, 2, 4)
    target = EqualLayers(blocks, 10, 12)
    names = {"stack/block_1:0": 0, "stack/block_3/moe/load": 1, "mask:0": 2, "stack/block_30:0": 3}
    assert source.rename_for(target, names) == {
        "stack/block_9:0": 0,
        "stack/block_11/moe/load": 1,
        "mask:0": 2,
        "stack/block_30:0": 3,
    }
    assert source.role("stack/block_1:0") == target.role("stack/block_9:0") == (-1, ":0")


def test_layers_compute_with_the_weights_and_ids_of_equal_layers(blocks):
    traced = EqualLayers(blocks, 0, 1)
    layers = EqualLayers(blocks, 1, 2)
    x = tf.random.stateless_normal((2, 5, 8), [1, 2])
    assert traced.random_ids() != layers.random_ids()

    def compute():
        return blocks[0](x), traced.random_ids()

    result, ids = traced.compute_with(compute, layers.weight_values(), layers.random_ids())[0]
    tf.debugging.assert_equal(result, blocks[1](x))
    assert ids == layers.random_ids()
