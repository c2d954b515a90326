"""MultiHeadAttention and AttentionMask match the reference, and masks are exact."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import AttentionMask, MultiHeadAttention
from tests.layers import reference, reference_blocks, reference_weights
from tests.layers.reference_compare import assign, compare, dtype_policy, each_policy
from tests.tolerances import LAYERS, assert_all_close

# batch, queries, keys, hidden, heads
SHAPES = [(2, 5, 7, 12, 3), (1, 1, 1, 4, 1), (3, 4, 9, 15, 5), (2, 3, 2, 6, 6)]


def make_masks(rng, batch, queries, keys):
    return {
        "none": None,
        "padding": reference_weights.padding_mask(rng, batch, keys),
        "one row": reference_weights.padding_mask(rng, batch, keys)[:, None, :],
        "full": reference_weights.attention_mask(rng, batch, queries, keys),
        "nothing": np.zeros((batch, keys), np.int32),
    }


def make_layer(hidden, heads):
    return MultiHeadAttention(hidden, heads, hidden_dropout_rate=0.0, attention_dropout_rate=0.0)


def qkv(rng, batch, queries, keys, hidden):
    """Three different inputs, so a swapped gradient is detected."""
    lengths = (queries, keys, keys)
    return [reference_weights.numbers(rng, batch, length, hidden) for length in lengths]


@each_policy
@pytest.mark.parametrize("mask", ["none", "padding", "one row", "full", "nothing"])
@pytest.mark.parametrize("batch, queries, keys, hidden, heads", SHAPES)
def test_matches_the_reference(policy, mask, batch, queries, keys, hidden, heads):
    rng = np.random.default_rng(0)
    mask = make_masks(rng, batch, queries, keys)[mask]
    compare(
        policy,
        partial(make_layer, hidden, heads),
        partial(reference_blocks.attention, mask=mask),
        qkv(rng, batch, queries, keys, hidden),
        reference_weights.attention(rng, hidden, heads),
        call=lambda layer, q, k, v: layer(q, k, v, mask, training=True),
    )


@each_policy
def test_inference_has_no_dropout(policy):
    rng = np.random.default_rng(1)
    compare(
        policy,
        lambda: MultiHeadAttention(12, 3, 0.5, 0.5),
        reference_blocks.attention,
        qkv(rng, 2, 5, 7, 12),
        reference_weights.attention(rng, 12, 3),
        call=lambda layer, q, k, v: layer(q, k, v, training=False),
    )


def with_weights(policy, rng, hidden, heads, **weights):
    """A layer with random weights, except for the weights passed by name."""
    with dtype_policy(policy):
        layer = make_layer(hidden, heads)
    x = tf.zeros((1, 1, hidden))
    layer(x, x, x)
    assign(layer, {**reference_weights.attention(rng, hidden, heads), **weights})
    return layer


@each_policy
def test_masks_of_all_dtypes_are_equivalent(policy):
    rng = np.random.default_rng(2)
    layer = with_weights(policy, rng, 12, 3)
    q, k, v = qkv(rng, 2, 5, 7, 12)
    mask = reference_weights.attention_mask(rng, 2, 5, 7)
    outputs = [
        layer(q, k, v, tf.cast(mask, dtype)).numpy()
        for dtype in ("int32", "bool", "float32", "float16", "bfloat16", "int64", "uint8")
    ]
    for output in outputs[1:]:
        np.testing.assert_array_equal(output, outputs[0])


@each_policy
def test_masked_positions_have_probability_exactly_0(policy):
    """Values at masked positions change no bit of the output and have no gradient."""
    rng = np.random.default_rng(3)
    layer = with_weights(policy, rng, 12, 3)
    q, k, v = qkv(rng, 2, 5, 7, 12)
    mask = np.array([[1, 1, 0, 1, 0, 0, 1], [0, 0, 0, 0, 0, 1, 0]])
    hidden = (mask == 0)[:, :, None]
    outputs = []
    for fill in (0.0, 300.0, -300.0):
        key = tf.constant(np.where(hidden, fill, k), tf.float32)
        value = tf.constant(np.where(hidden, fill, v), tf.float32)
        with tf.GradientTape() as tape:
            tape.watch([key, value])
            output = layer(q, key, value, mask)
        for gradient in tape.gradient(output, [key, value]):
            np.testing.assert_array_equal(gradient.numpy()[mask == 0], 0.0)
            assert np.isfinite(gradient.numpy()).all()
        outputs.append(output.numpy())
    np.testing.assert_array_equal(outputs[1], outputs[0])
    np.testing.assert_array_equal(outputs[2], outputs[0])


@each_policy
def test_queries_without_visible_keys_return_the_output_bias(policy):
    rng = np.random.default_rng(4)
    layer = with_weights(policy, rng, 12, 3)
    tensors = [tf.constant(x, tf.float32) for x in qkv(rng, 2, 5, 7, 12)]
    mask = reference_weights.attention_mask(rng, 2, 5, 7)
    mask[1, 2] = 0
    empty = mask.sum(-1) == 0
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        output = layer(*tensors, mask)
    bias = np.broadcast_to(layer.output_bias.numpy(), (empty.sum(), 12))
    np.testing.assert_array_equal(output.numpy()[empty].astype(np.float32), bias)
    query_gradient, *other_gradients = tape.gradient(output, tensors)
    np.testing.assert_array_equal(query_gradient.numpy()[empty], 0.0)
    assert all(np.isfinite(gradient.numpy()).all() for gradient in other_gradients)


@each_policy
def test_queries_are_scaled_before_the_product_to_avoid_overflow(policy):
    """q · k is 64 · 40² = 102,400, above float16's range. Scaled by 1/8 it is 12,800."""
    identity = np.eye(64).reshape(64, 1, 64)
    zeros = np.zeros((1, 64))
    layer = with_weights(
        policy,
        np.random.default_rng(5),
        64,
        1,
        query_kernel=identity,
        key_kernel=identity,
        value_kernel=identity,
        output_kernel=np.eye(64)[None],
        query_bias=zeros,
        key_bias=zeros,
        value_bias=zeros,
        output_bias=zeros[0],
    )
    query = np.full((1, 1, 64), 40.0)
    key = np.stack([np.full(64, -40.0), np.full(64, 40.0)])[None]
    value = np.stack([np.full(64, 3.0), np.full(64, 5.0)])[None]
    np.testing.assert_array_equal(layer(query, key, value).numpy(), 5.0)
    np.testing.assert_array_equal(layer(-query, key, value).numpy(), 3.0)


@each_policy
def test_softmax_of_many_equal_scores_sums_to_1(policy):
    """A bfloat16 sum of ones stops at 256, so the softmax must be computed in float32."""
    rng = np.random.default_rng(6)
    layer = with_weights(
        policy, rng, 4, 1, value_kernel=np.zeros((4, 1, 4)), value_bias=np.ones((1, 4))
    )
    x = np.ones((1, 3000, 4))
    output = layer(x[:, :1], x, x)
    kernel, bias = layer.output_kernel.numpy(), layer.output_bias.numpy()
    expected = (kernel.sum((0, 1)) + bias)[None, None]
    assert_all_close({"output": output}, {"output": expected}, LAYERS[policy])


def test_dynamic_shapes_in_one_compiled_function():
    rng = np.random.default_rng(7)
    weights = reference_weights.attention(rng, 12, 3)
    layer = with_weights("float32", rng, 12, 3, **weights)
    inputs = tf.TensorSpec([None, None, 12])
    compiled = tf.function(
        lambda q, k, v, mask: layer(q, k, v, mask),
        input_signature=[inputs, inputs, inputs, tf.TensorSpec([None, None, None], tf.int32)],
    )
    for batch, queries, keys in ((2, 5, 7), (1, 3, 2)):
        arrays = qkv(rng, batch, queries, keys, 12)
        mask = reference_weights.attention_mask(rng, batch, queries, keys)
        actual = compiled(*[tf.constant(x, tf.float32) for x in arrays], mask)
        expected, _ = reference_blocks.attention(*arrays, weights, mask)
        assert_all_close({"output": actual}, {"output": expected}, LAYERS["float32"])


@each_policy
@pytest.mark.parametrize("dtype", ["int32", "bool", "float32"])
def test_attention_mask_is_lower_triangle_of_outer_product(policy, dtype):
    padding = np.array([[1, 1, 1, 0, 0], [0, 1, 0, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    with dtype_policy(policy):
        layer = AttentionMask()
    mask = tf.cast(layer(tf.cast(padding, dtype)), tf.int32).numpy()
    np.testing.assert_array_equal(mask, reference.causal_mask(padding))


@pytest.mark.parametrize(
    "shape", [(1, 3), (3, 3), (2, 4), (2, 4, 1), (1, 4, 3), (2, 3, 4), (2, 3, 4, 3), (3,)]
)
def test_masks_that_would_broadcast_raise(shape):
    query, key = tf.ones((2, 4, 8)), tf.ones((2, 3, 8))
    with pytest.raises(ValueError, match=r"mask has shape .* expected \[2, 3\], \[2, 4, 3\]"):
        MultiHeadAttention(8, 2)(query, key, key, tf.ones(shape))


@pytest.mark.parametrize(
    ["key", "value"], [((1, 3, 8), None), ((2, 3, 4), None), (None, (2, 5, 8))]
)
def test_keys_and_values_of_wrong_shape_raise(key, value):
    key, value = key or (2, 3, 8), value or (2, 3, 8)
    with pytest.raises(ValueError, match=r"(key|value)` has shape"):
        MultiHeadAttention(8, 2)(tf.ones((2, 4, 8)), tf.ones(key), tf.ones(value))


def test_initial_scores_do_not_depend_on_query_scale():
    """Otherwise T5, which does not scale queries, would initially attend to one position."""
    x = tf.constant(np.random.default_rng(4).normal(size=(2, 5, 16)), "float32")
    plain = MultiHeadAttention(16, 4, name="own")(x, x, x)
    for scale in (1.0, 0.25):
        layer = MultiHeadAttention(16, 4, query_scale=scale, name="own")
        np.testing.assert_allclose(layer(x, x, x), plain, rtol=0, atol=1e-6)
