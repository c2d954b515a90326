"""Promise: what passes between stages is found out, and stages together are the network."""

import keras
import pytest
import tensorflow as tf

from dtransformer import parallel_config
from dtransformer.layers.block import spread_evenly
from dtransformer.models import TranslationTransformer
from dtransformer.parallel.pipeline import dataflow, placement

SIZES = {"hidden_size": 8, "num_heads": 2, "encoder_layers": 2, "decoder_layers": 2}
INPUTS = {"source": tf.reshape(tf.range(1, 16), [3, 5]), "target": tf.reshape(tf.range(12), [3, 4])}
TIED = {"shared_embeddings": True, "tied_head": True}


def network_and_plan(num_stages, **options):
    with parallel_config(pipeline_stage=num_stages):
        network = TranslationTransformer(20, dropout_rate=0.0, **SIZES, **options)
        network.build()
        return network, dataflow.Dataflow.of_network(network, INPUTS, num_stages)


def passed(plan):
    """Return for each border what passes it, without the network's name."""
    return [
        {value.name.split("/", 1)[1]: value.shape for value in plan.sent_after(stage)}
        for stage in range(plan.num_parts - 1)
    ]


def test_an_encoder_and_a_decoder():
    _, plan = network_and_plan(2)
    memory = "transformer/encoder/final_norm:0"
    assert passed(plan) == [{memory: (3, 5, 8), "target_positions:0": (3, 4, 8)}]


def test_the_memory_goes_to_every_stage_of_the_decoder():
    _, plan = network_and_plan(4)
    memory, stack = "transformer/encoder/final_norm:0", "transformer/decoder/block_0:0"
    assert passed(plan) == [
        {"transformer/encoder/block_0:0": (3, 5, 8), "target_positions:0": (3, 4, 8)},
        {memory: (3, 5, 8), "target_positions:0": (3, 4, 8)},
        {memory: (3, 5, 8), stack: (3, 4, 8)},
    ]
    assert "stage 2 → 3: translation_transformer/transformer/decoder/block_0:0 3×4×8" in str(plan)


def test_a_tied_table_is_copied_and_not_sent():
    network, plan = network_and_plan(2, **TIED)
    assert network.source_embedding.parts_with_copies == {1}
    # One layer embeds both: its calls have names of their own.
    assert all("embedding" not in name for border in passed(plan) for name in border)
    network, _ = network_and_plan(2)
    assert not network.target_embedding.parts_with_copies


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("options", [{}, TIED, {"positions": "learned"}], ids=str)
def test_stages_together_are_the_network(num_stages, options):
    network, plan = network_and_plan(num_stages, **options)
    with tf.GradientTape() as tape:
        expected = network(INPUTS)
        loss = tf.reduce_sum(expected**2)
    gradients = tape.gradient(loss, [w.value for w in network.trainable_variables])
    with tf.GradientTape() as tape:
        received = {}
        for stage in range(num_stages):
            names = [value.name for value in plan.received_by(stage)]
            assert sorted(received) == sorted(names)
            with placement.view(dataflow.StageView(stage, plan, received)) as view:
                outputs = network(INPUTS)
            received = view.sent
        loss = tf.reduce_sum(outputs**2)
    tf.debugging.assert_near(outputs, expected, 1e-6, 1e-6)
    found = tape.gradient(loss, [w.value for w in network.trainable_variables])
    for one, other in zip(found, gradients, strict=True):
        one, other = tf.convert_to_tensor(one), tf.convert_to_tensor(other)
        tf.debugging.assert_near(one, other, 1e-4, 1e-4)


def test_a_stage_without_weights_is_an_error():
    def on_two_of_three(network, layer_id, offset, **others):
        spread_evenly(network, layer_id, offset, **others)
        network.pipeline_stage = 0

    with pytest.raises(ValueError, match="stage 1 of 3 has no layer with weights"):
        network_and_plan(3, lambda_func=on_two_of_three)


class WithMore(TranslationTransformer):
    """A network with a layer of the user's own."""

    def __init__(self, **kwargs):
        super().__init__(20, **kwargs)
        self.more = keras.layers.Dense(8, name="more")

    def call(self, inputs, training=False):
        return self.more(super().call(inputs, training=training))


def test_a_layer_with_weights_and_without_a_place_is_an_error():
    with parallel_config(pipeline_stage=2):
        network = WithMore(**SIZES)
        with pytest.raises(ValueError, match="more has weights, but no place in the pipeline"):
            dataflow.Dataflow.of_network(network, INPUTS, 2)
