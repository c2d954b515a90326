"""Promise: what passes between stages is found out, and stages together are the network."""

import keras
import pytest
import tensorflow as tf

from dtransformer import parallel_config
from dtransformer.layers import Linear
from dtransformer.layers.base import Layer
from dtransformer.layers.block import spread_evenly
from dtransformer.models import TranslationTransformer
from dtransformer.parallel.pipeline_parallel.dataflow import Dataflow
from dtransformer.parallel.pipeline_parallel.stage_assignment import chunk_of
from dtransformer.parallel.pipeline_parallel.stage_dispatch import ChunkView, view
from dtransformer.parallel.schedules.placement import Placement

SIZES = {"hidden_size": 8, "num_heads": 2, "encoder_layers": 2, "decoder_layers": 2}
INPUTS = {"source": tf.reshape(tf.range(1, 16), [3, 5]), "target": tf.reshape(tf.range(12), [3, 4])}
TIED = {"shared_embeddings": True, "tied_head": True}


def network_and_dataflow(placement, **options):
    with parallel_config(pipeline_stage=placement.num_chunks):  # as many chunks, wherever they are
        network = TranslationTransformer(20, dropout_rate=0.0, **SIZES, **options)
        network.build()
        return network, Dataflow.of_network(network, INPUTS, placement)


def passed(dataflow):
    """Return for each border what passes it, without the network's name."""
    return [
        {tensor.name.split("/", 1)[1]: tensor.shape for tensor in dataflow.sent_after(chunk)}
        for chunk in range(dataflow.placement.last_chunk)
    ]


def computed_in_chunks(network, inputs, dataflow):
    """Return what the chunks of a network give one after the other."""
    received = {}
    for chunk in range(dataflow.placement.num_chunks):
        assert sorted(received) == sorted(x.name for x in dataflow.received_by(chunk))
        with view(ChunkView(chunk, dataflow, received)) as calls:
            outputs = network(inputs)
        received = calls.sent
    return outputs


def test_an_encoder_and_a_decoder():
    _, dataflow = network_and_dataflow(Placement.looped(2))
    memory = "transformer/encoder/final_norm:0"
    assert passed(dataflow) == [{memory: (3, 5, 8), "target_positions:0": (3, 4, 8)}]


def test_the_memory_goes_to_every_stage_of_the_decoder():
    _, dataflow = network_and_dataflow(Placement.looped(4))
    memory, stack = "transformer/encoder/final_norm:0", "transformer/decoder/block_0:0"
    assert passed(dataflow) == [
        {"transformer/encoder/block_0:0": (3, 5, 8), "target_positions:0": (3, 4, 8)},
        {memory: (3, 5, 8), "target_positions:0": (3, 4, 8)},
        {memory: (3, 5, 8), stack: (3, 4, 8)},
    ]
    sent = "stage 2 → stage 3: translation_transformer/transformer/decoder/block_0:0 3×4×8"
    assert sent in str(dataflow)


def test_what_passes_depends_on_the_chunks_and_not_on_where_they_are():
    _, looped = network_and_dataflow(Placement.looped(4))
    _, v_shaped = network_and_dataflow(Placement.v_shaped(2))
    assert passed(v_shaped) == passed(looped)
    assert "model chunk 2 (stage 1) → model chunk 3 (stage 0): " in str(v_shaped)


def test_a_tied_table_is_copied_and_not_sent():
    network, dataflow = network_and_dataflow(Placement.looped(2), **TIED)
    assert dataflow.copies_of(network.source_embedding) == {1}
    # One layer embeds both: its calls have names of their own.
    assert all("embedding" not in name for border in passed(dataflow) for name in border)
    network, dataflow = network_and_dataflow(Placement.looped(2))
    assert not dataflow.copies


@pytest.mark.parametrize(
    "placement", [*map(Placement.looped, (2, 3, 4)), Placement.v_shaped(2)], ids=str
)
@pytest.mark.parametrize("options", [{}, TIED, {"positions": "learned"}], ids=str)
def test_stages_together_are_the_network(placement, options):
    network, dataflow = network_and_dataflow(placement, **options)
    with tf.GradientTape() as tape:
        expected = network(INPUTS)
        loss = tf.reduce_sum(expected**2)
    gradients = tape.gradient(loss, [w.value for w in network.trainable_variables])
    with tf.GradientTape() as tape:
        outputs = computed_in_chunks(network, INPUTS, dataflow)
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
        network_and_dataflow(Placement.looped(3), lambda_func=on_two_of_three)


# Shape rules: placeholder outputs of other stages come from them.


class Stack(keras.Model):
    """Layers one after the other, each on a stage of its own."""

    def __init__(self, *layers, **kwargs):
        super().__init__(**kwargs)
        self.stack = list(layers)
        for stage, layer in enumerate(layers):
            layer.pipeline_stage = stage

    def call(self, inputs, training=False):
        for layer in self.stack:
            inputs = layer(inputs)
        return inputs


class Halves(Layer):
    """Adds the halves of its input, without a shape rule."""

    def build(self, shape):
        self.scale = self.add_weight((shape[-1] // 2,), "ones", axes=(None,), name="scale")

    def call(self, x):
        return self.scale * tf.add(*tf.split(x, 2, -1))


class HalvesByRule(Halves):
    def compute_output_shape(self, shape):
        return (*shape[:-1], shape[-1] // 2)


class WrongRule(Halves):
    def compute_output_shape(self, shape):
        return shape


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize(
    "make, sizes",
    [
        (lambda policy: [Linear(6, dtype=policy), Linear(7, dtype=policy)], [6]),
        (lambda policy: [HalvesByRule(dtype=policy), Linear(4, dtype=policy)], [4]),
        (lambda policy: [Halves(dtype=policy), Linear(4, dtype=policy)], [4]),
    ],
)
def test_layers_that_change_the_shape(make, sizes, policy):
    network, x = Stack(*make(policy), dtype=policy), tf.ones([3, 5, 8])
    expected = network(x)
    dataflow = Dataflow.of_network(network, x, Placement.looped(2))
    (tensor,) = dataflow.sent_after(0)
    assert tensor.shape == (3, 5, *sizes) and tensor.dtype == network.compute_dtype
    tf.debugging.assert_equal(computed_in_chunks(network, x, dataflow), expected)


class Shifts(Layer):
    """Takes inputs of any size."""

    def build(self, input_shape):
        self.shift = self.add_weight((1,), axes=(None,), name="shift", initializer="zeros")

    def call(self, x):
        return x + tf.cast(self.shift, x.dtype)

    def compute_output_shape(self, shape):
        return shape


def test_a_wrong_shape_rule_is_an_error():
    network, x = Stack(WrongRule(), Shifts()), tf.ones([3, 5, 8])
    network(x)
    dataflow = Dataflow.of_network(network, x, Placement.looped(2))
    rule = r"wrong_rule is float32 \(3, 5, 4\).*declares float32 \(3, 5, 8"
    with pytest.raises(ValueError, match=rule):
        computed_in_chunks(network, x, dataflow)


def test_a_tables_type_is_that_of_its_weight():
    network, dataflow = network_and_dataflow(Placement.looped(2), dtype="mixed_float16", **TIED)
    embeddings, table = network.source_embedding.compute_output_spec(INPUTS["source"])
    assert (embeddings.dtype, table.dtype) == ("float16", "float32")
    assert {tensor.dtype for tensor in dataflow.tensors} == {"float16"}


@pytest.mark.parametrize("stage", [5, -3])
def test_a_stage_that_there_is_not_is_an_error(stage):
    layer = keras.layers.Dense(2, name="dense")
    layer.pipeline_stage = stage
    with pytest.raises(
        ValueError, match=f"`pipeline_stage={stage}` of dense is out of range: there are 2 stages"
    ):
        chunk_of(layer, Placement.looped(2))
