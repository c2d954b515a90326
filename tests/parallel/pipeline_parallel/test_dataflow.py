"""Tensors sent between stages are detected, and chunks in sequence equal the network."""

import keras
import pytest
import tensorflow as tf

from dtransformer import parallel_config
from dtransformer.layers import Linear
from dtransformer.layers.base import Layer
from dtransformer.layers.block import spread_evenly
from dtransformer.models import TranslationTransformer
from dtransformer.parallel.pipeline_parallel.dataflow import Dataflow
from dtransformer.parallel.pipeline_parallel.stage_assignment import get_chunk
from dtransformer.parallel.pipeline_parallel.stage_dispatch import ChunkView, view
from dtransformer.parallel.schedules.placement import Placement

SIZES = {"hidden_size": 8, "num_heads": 2, "encoder_layers": 2, "decoder_layers": 2}
INPUTS = {"source": tf.reshape(tf.range(1, 16), [3, 5]), "target": tf.reshape(tf.range(12), [3, 4])}
TIED = {"shared_embeddings": True, "tied_head": True}


def network_and_dataflow(placement, **options):
    # One stage per chunk spreads the layers over all chunks of the placement.
    with parallel_config(pipeline_stage=placement.num_chunks):
        network = TranslationTransformer(20, dropout_rate=0.0, **SIZES, **options)
        network.build()
        return network, Dataflow.from_network(network, INPUTS, placement)


def sent_shapes(dataflow):
    """Return a `{tensor name: shape}` dict for each chunk boundary, without the network's name."""
    return [
        {tensor.name.split("/", 1)[1]: tensor.shape for tensor in dataflow.sent_after(chunk)}
        for chunk in range(dataflow.placement.last_chunk)
    ]


def run_chunks(network, inputs, dataflow):
    """Run all chunks of a network in sequence and return the outputs of the last one."""
    received = {}
    for chunk in range(dataflow.placement.num_chunks):
        assert sorted(received) == sorted(x.name for x in dataflow.received_by(chunk))
        with view(ChunkView(chunk, dataflow, received)) as calls:
            outputs = network(inputs)
        received = calls.sent
    return outputs


def test_encoder_output_and_decoder_input_are_sent():
    _, dataflow = network_and_dataflow(Placement.looped(2))
    memory = "transformer/encoder/final_norm:0"
    assert sent_shapes(dataflow) == [{memory: (3, 5, 8), "target_positions:0": (3, 4, 8)}]


def test_encoder_output_is_sent_to_every_decoder_stage():
    _, dataflow = network_and_dataflow(Placement.looped(4))
    memory, stack = "transformer/encoder/final_norm:0", "transformer/decoder/block_0:0"
    assert sent_shapes(dataflow) == [
        {"transformer/encoder/block_0:0": (3, 5, 8), "target_positions:0": (3, 4, 8)},
        {memory: (3, 5, 8), "target_positions:0": (3, 4, 8)},
        {memory: (3, 5, 8), stack: (3, 4, 8)},
    ]
    line = "stage 2 → stage 3: translation_transformer/transformer/decoder/block_0:0 3×4×8"
    assert line in str(dataflow)


def test_sent_tensors_do_not_depend_on_the_placement():
    _, looped = network_and_dataflow(Placement.looped(4))
    _, v_shaped = network_and_dataflow(Placement.v_shaped(2))
    assert sent_shapes(v_shaped) == sent_shapes(looped)
    assert "model chunk 2 (stage 1) → model chunk 3 (stage 0): " in str(v_shaped)


def test_tied_embedding_is_copied_and_not_sent():
    network, dataflow = network_and_dataflow(Placement.looped(2), **TIED)
    assert dataflow.get_copy_chunks(network.source_embedding) == {1}
    # One layer embeds source and target, so no embedding is sent.
    assert all("embedding" not in name for border in sent_shapes(dataflow) for name in border)
    network, dataflow = network_and_dataflow(Placement.looped(2))
    assert not dataflow.copies


@pytest.mark.parametrize(
    "placement", [*map(Placement.looped, (2, 3, 4)), Placement.v_shaped(2)], ids=str
)
@pytest.mark.parametrize("options", [{}, TIED, {"positions": "learned"}], ids=str)
def test_chunks_in_sequence_equal_the_network(placement, options):
    network, dataflow = network_and_dataflow(placement, **options)
    with tf.GradientTape() as tape:
        expected = network(INPUTS)
        loss = tf.reduce_sum(expected**2)
    gradients = tape.gradient(loss, [w.value for w in network.trainable_variables])
    with tf.GradientTape() as tape:
        outputs = run_chunks(network, INPUTS, dataflow)
        loss = tf.reduce_sum(outputs**2)
    tf.debugging.assert_near(outputs, expected, 1e-6, 1e-6)
    chunk_gradients = tape.gradient(loss, [w.value for w in network.trainable_variables])
    for actual, expected_gradient in zip(chunk_gradients, gradients, strict=True):
        actual, expected_gradient = (
            tf.convert_to_tensor(actual),
            tf.convert_to_tensor(expected_gradient),
        )
        tf.debugging.assert_near(actual, expected_gradient, 1e-4, 1e-4)


def test_every_stage_needs_weights():
    def use_two_of_three_stages(network, layer_id, offset, **kwargs):
        spread_evenly(network, layer_id, offset, **kwargs)
        network.pipeline_stage = 0

    with pytest.raises(ValueError, match="stage 1 of 3 has no layer with weights"):
        network_and_dataflow(Placement.looped(3), lambda_func=use_two_of_three_stages)


# Shape rules, which provide the placeholder outputs of other stages.


class Stack(keras.Model):
    """Sequence of layers with one stage for each layer."""

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
    """Layer without a shape rule that adds the two halves of its input."""

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
def test_placeholders_follow_layers_that_change_the_shape(make, sizes, policy):
    network, x = Stack(*make(policy), dtype=policy), tf.ones([3, 5, 8])
    expected = network(x)
    dataflow = Dataflow.from_network(network, x, Placement.looped(2))
    (tensor,) = dataflow.sent_after(0)
    assert tensor.shape == (3, 5, *sizes) and tensor.dtype == network.compute_dtype
    tf.debugging.assert_equal(run_chunks(network, x, dataflow), expected)


class Shifts(Layer):
    """Layer that accepts inputs of any size."""

    def build(self, input_shape):
        self.shift = self.add_weight((1,), axes=(None,), name="shift", initializer="zeros")

    def call(self, x):
        return x + tf.cast(self.shift, x.dtype)

    def compute_output_shape(self, shape):
        return shape


def test_rejects_a_wrong_shape_rule():
    network, x = Stack(WrongRule(), Shifts()), tf.ones([3, 5, 8])
    network(x)
    dataflow = Dataflow.from_network(network, x, Placement.looped(2))
    rule = r"wrong_rule is float32 \(3, 5, 4\).*declares float32 \(3, 5, 8"
    with pytest.raises(ValueError, match=rule):
        run_chunks(network, x, dataflow)


def test_embedding_table_keeps_the_dtype_of_its_weight():
    network, dataflow = network_and_dataflow(Placement.looped(2), dtype="mixed_float16", **TIED)
    embeddings, table = network.source_embedding.compute_output_spec(INPUTS["source"])
    assert (embeddings.dtype, table.dtype) == ("float16", "float32")
    assert {tensor.dtype for tensor in dataflow.tensors} == {"float16"}


@pytest.mark.parametrize("stage", [5, -3])
def test_rejects_a_nonexistent_stage(stage):
    layer = keras.layers.Dense(2, name="dense")
    layer.pipeline_stage = stage
    with pytest.raises(
        ValueError, match=f"`pipeline_stage={stage}` of dense is out of range: there are 2 stages"
    ):
        get_chunk(layer, Placement.looped(2))
