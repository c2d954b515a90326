"""Encoder and decoder blocks, their stacks and the Transformer against the reference."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import (
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from tests.layers import reference, reference_blocks, reference_weights
from tests.layers.reference_compare import (
    POLICIES,
    assign,
    compare,
    dtype_policy,
    each_policy,
)
from tests.tolerances import BLOCKS, assert_all_close

NO_DROPOUT = dict(attention_dropout_rate=0.0, hidden_dropout_rate=0.0)
# batch, target length, source length, hidden, heads, inner
SHAPES = [(2, 5, 7, 12, 3, 10), (1, 1, 1, 4, 1, 3), (3, 6, 4, 15, 5, 17)]
each_shape = pytest.mark.parametrize("shape", SHAPES)
each_arrangement = pytest.mark.parametrize("post", [False, True], ids=["pre", "post"])
# Near 0, rounding to 16 bits flips ReLU's derivative between 0 and 1, so the error is unbounded.
# test_feed_forward.py tests ReLU with exact inputs.
each_activation = pytest.mark.parametrize(
    "policy, hidden_act", [*((policy, "gelu") for policy in POLICIES), ("float32", "relu")]
)


def decoder_masks(rng, batch, target, source):
    """Causal masks with padded queries that see nothing, and a padded memory.

    In the last of several rows no query sees any of the memory.
    """
    causal = reference.causal_mask(reference_weights.padding_mask(rng, batch, target))
    memory = reference_weights.padding_mask(rng, batch, source)
    if batch > 1:
        memory[-1] = 0
    return causal, memory


@each_activation
@each_arrangement
@each_shape
def test_encoder_layer_matches_the_reference(policy, post, hidden_act, shape):
    rng = np.random.default_rng(0)
    batch, _, length, *sizes = shape
    for mask in (
        None,
        reference_weights.padding_mask(rng, batch, length),
        reference_weights.attention_mask(rng, batch, length, length),
    ):
        masks = () if mask is None else (mask,)
        options = dict(post_layernorm_residual=post, hidden_act=hidden_act)
        compare(
            policy,
            lambda: TransformerEncoderLayer(*sizes, **NO_DROPOUT, **options),
            partial(reference_blocks.encoder_layer, mask=mask, **options),
            [reference_weights.numbers(rng, batch, length, sizes[0])],
            reference_weights.encoder_layer(rng, *sizes),
            call=lambda layer, x: layer(x, *masks, training=True),
            tolerance=BLOCKS,
        )


@each_activation
@each_arrangement
@each_shape
def test_decoder_layer_matches_the_reference(policy, post, hidden_act, shape):
    rng = np.random.default_rng(1)
    batch, target, source, *sizes = shape
    causal, padding = decoder_masks(rng, batch, target, source)
    full = reference_weights.attention_mask(rng, batch, target, source)
    for decoder_mask, memory_mask in ((None, None), (causal, padding), (causal, full)):
        options = dict(post_layernorm_residual=post, hidden_act=hidden_act)
        masks = dict(decoder_mask=decoder_mask, memory_mask=memory_mask)
        compare(
            policy,
            lambda: TransformerDecoderLayer(*sizes, **NO_DROPOUT, **options),
            partial(reference_blocks.decoder_layer, **masks, **options),
            [
                reference_weights.numbers(rng, batch, target, sizes[0]),
                reference_weights.numbers(rng, batch, source, sizes[0]),
            ],
            reference_weights.decoder_layer(rng, *sizes),
            call=lambda layer, x, memory: layer(
                x, decoder_mask, memory, memory_mask, training=True
            ),
            tolerance=BLOCKS,
        )


@each_policy
@each_arrangement
@pytest.mark.parametrize("num_layers", [1, 3])
def test_encoder_matches_the_reference(policy, post, num_layers):
    rng = np.random.default_rng(2)
    mask = reference_weights.padding_mask(rng, 2, 7)
    compare(
        policy,
        lambda: TransformerEncoder(
            num_layers, 12, 3, 10, post_layernorm_residual=post, **NO_DROPOUT
        ),
        partial(reference_blocks.encoder, mask=mask, post_layernorm_residual=post),
        [reference_weights.numbers(rng, 2, 7, 12)],
        reference_weights.stack(
            rng, reference_weights.encoder_layer, num_layers, 12, 3, 10, not post
        ),
        call=lambda layer, x: layer(x, mask, training=True),
        tolerance=BLOCKS,
    )


@each_policy
@each_arrangement
@pytest.mark.parametrize("num_layers", [1, 3])
def test_decoder_matches_the_reference(policy, post, num_layers):
    rng = np.random.default_rng(3)
    causal, memory_mask = decoder_masks(rng, 2, 5, 7)
    masks = dict(decoder_mask=causal, memory_mask=memory_mask)
    compare(
        policy,
        lambda: TransformerDecoder(
            num_layers, 12, 3, 10, post_layernorm_residual=post, **NO_DROPOUT
        ),
        partial(reference_blocks.decoder, post_layernorm_residual=post, **masks),
        [reference_weights.numbers(rng, 2, 5, 12), reference_weights.numbers(rng, 2, 7, 12)],
        reference_weights.stack(
            rng, reference_weights.decoder_layer, num_layers, 12, 3, 10, not post
        ),
        call=lambda layer, x, memory: layer(x, causal, memory, memory_mask, training=True),
        tolerance=BLOCKS,
    )


def transformer(source, target, weights, mask, causal, post):
    """Encoder and decoder. Without encoder blocks the decoder attends to the source."""
    memory, encoder_backward = source, None
    if weights.get("encoder"):
        memory, encoder_backward = reference_blocks.encoder(source, weights["encoder"], mask, post)
    output, decoder_backward = reference_blocks.decoder(
        target, memory, weights["decoder"], causal, mask, post
    )

    def backward(grad):
        (grad_target, grad_source), grads = decoder_backward(grad)
        grads = {"decoder": grads}
        if encoder_backward:
            (grad_source,), grads["encoder"] = encoder_backward(grad_source)
        return (grad_source, grad_target), grads

    return output, backward


@each_policy
@each_arrangement
@pytest.mark.parametrize("encoder_layers, decoder_layers", [(2, 1), (0, 2)])
def test_transformer_matches_the_reference(policy, post, encoder_layers, decoder_layers):
    rng = np.random.default_rng(4)
    causal = reference.causal_mask(reference_weights.padding_mask(rng, 2, 5))
    mask = reference_weights.padding_mask(rng, 2, 7)
    sizes = (12, 3, 10, not post)
    weights = {
        "decoder": reference_weights.stack(
            rng, reference_weights.decoder_layer, decoder_layers, *sizes
        )
    }
    if encoder_layers:
        weights["encoder"] = reference_weights.stack(
            rng, reference_weights.encoder_layer, encoder_layers, *sizes
        )
    compare(
        policy,
        lambda: Transformer(
            encoder_layers, decoder_layers, 12, 3, 10, post_layernorm_residual=post, **NO_DROPOUT
        ),
        partial(transformer, mask=mask, causal=causal, post=post),
        [reference_weights.numbers(rng, 2, 7, 12), reference_weights.numbers(rng, 2, 5, 12)],
        weights,
        call=lambda layer, source, target: layer(source, mask, target, causal, mask, training=True),
        tolerance=BLOCKS,
    )


def test_without_decoder_returns_encoder_output():
    rng = np.random.default_rng(5)
    x, mask = reference_weights.numbers(rng, 2, 7, 12), reference_weights.padding_mask(rng, 2, 7)
    x = tf.constant(x, "float32")
    layer = Transformer(2, 0, 12, 3, 10, **NO_DROPOUT)
    output, encoder = layer(x, mask), TransformerEncoder(2, 12, 3, 10, **NO_DROPOUT)
    encoder.build(x.shape)
    encoder.set_weights(layer.get_weights())
    np.testing.assert_array_equal(output, encoder(x, mask))
    with pytest.raises(ValueError, match="`decoder_inputs` is missing"):
        Transformer(1, 1, 12, 3, 10)(x)


def test_output_has_the_shape_of_decoder_inputs():
    both, alone = Transformer(1, 1, 8, 2, 16), Transformer(1, 0, 8, 2, 16)
    source, target = (2, 5, 8), (2, 4, 8)
    assert both.compute_output_shape(source, None, target) == target
    assert both.compute_output_shape(source) == source, "as a summary asks"
    assert alone.compute_output_shape(source) == source


@pytest.mark.parametrize("mask", [None, "given as None"])
def test_works_without_masks(mask):
    """The stacks and the Transformer accept omitted masks and `None`."""
    rng = np.random.default_rng(8)
    mask_arguments = () if mask is None else (None,)
    sizes = (2, 12, 3, 10)
    compare(
        "float32",
        lambda: TransformerEncoder(*sizes, **NO_DROPOUT),
        reference_blocks.encoder,
        [reference_weights.numbers(rng, 2, 7, 12)],
        reference_weights.stack(rng, reference_weights.encoder_layer, *sizes, final_norm=True),
        call=lambda layer, x: layer(x, *mask_arguments),
        tolerance=BLOCKS,
    )
    compare(
        "float32",
        lambda: Transformer(2, *sizes, **NO_DROPOUT),
        partial(transformer, mask=None, causal=None, post=False),
        [reference_weights.numbers(rng, 2, 7, 12), reference_weights.numbers(rng, 2, 5, 12)],
        {
            "encoder": reference_weights.stack(
                rng, reference_weights.encoder_layer, *sizes, final_norm=True
            ),
            "decoder": reference_weights.stack(
                rng, reference_weights.decoder_layer, *sizes, final_norm=True
            ),
        },
        call=lambda layer, source, target: layer(source, None, target, None, *mask_arguments),
        tolerance=BLOCKS,
    )


@each_policy
def test_dtype_argument_reaches_all_sublayers(policy):
    layer = Transformer(1, 1, 12, 3, 10, dtype=policy)
    x = tf.ones((2, 4, 12))
    assert layer(x, tf.ones((2, 4)), x, None).dtype == layer.compute_dtype
    parts = layer._flatten_layers()
    assert {part.dtype_policy.name for part in parts} == {policy}
    assert {variable.dtype for variable in layer.trainable_variables} == {"float32"}


@each_policy
def test_inference_has_no_dropout(policy):
    rng = np.random.default_rng(5)
    compare(
        policy,
        lambda: TransformerDecoder(2, 12, 3, 10, hidden_dropout_rate=0.5),
        reference_blocks.decoder,
        [reference_weights.numbers(rng, 2, 5, 12), reference_weights.numbers(rng, 2, 7, 12)],
        reference_weights.stack(
            rng, reference_weights.decoder_layer, 2, 12, 3, 10, final_norm=True
        ),
        call=lambda layer, x, memory: layer(x, None, memory, None, training=False),
        tolerance=BLOCKS,
    )


@each_policy
@each_arrangement
def test_cached_decoding_matches_full_sequence(policy, post):
    """Each position's output equals its output in the full sequence."""
    rng = np.random.default_rng(6)
    weights = reference_weights.stack(rng, reference_weights.decoder_layer, 2, 12, 3, 10, not post)
    x, memory = reference_weights.numbers(rng, 2, 6, 12), reference_weights.numbers(rng, 2, 7, 12)
    memory_mask = reference_weights.padding_mask(rng, 2, 7)
    with dtype_policy(policy):
        layer = TransformerDecoder(2, 12, 3, 10, post_layernorm_residual=post)
    layer(x, None, memory, None)
    assign(layer, weights)
    cache, outputs = layer.init_cache(tf.constant(memory, tf.float32), capacity=8), []
    for start in range(6):
        new = x[:, start : start + 1]
        output, cache = layer.decode_step(new, cache, memory_mask=memory_mask)
        outputs.append(output)
    causal = reference.causal_mask(np.ones((2, 6)))
    expected, _ = reference_blocks.decoder(x, memory, weights, causal, memory_mask, post)
    assert_all_close({"output": tf.concat(outputs, 1)}, {"output": expected}, BLOCKS[policy])


@pytest.mark.parametrize("jit_compile", [False, True])
def test_compiled_results_and_gradients_match_eager(jit_compile):
    """Results are equal in `tf.function`, with dynamic shapes and, under XLA, static shapes."""
    rng = np.random.default_rng(7)
    weights = reference_weights.stack(
        rng, reference_weights.decoder_layer, 1, 12, 3, 10, final_norm=True
    )
    x, memory = reference_weights.numbers(rng, 2, 5, 12), reference_weights.numbers(rng, 2, 7, 12)
    causal, memory_mask = decoder_masks(rng, 2, 5, 7)
    layer = TransformerDecoder(1, 12, 3, 10, **NO_DROPOUT)
    layer(x, None, memory, None)
    variables = assign(layer, weights)
    size = lambda n: n if jit_compile else None
    specs = [
        tf.TensorSpec([size(2), size(5), 12]),
        tf.TensorSpec([size(2), size(7), 12]),
        tf.TensorSpec([size(2), size(5), size(5)], tf.int32),
        tf.TensorSpec([size(2), size(7)], tf.int32),
    ]

    @tf.function(input_signature=specs, jit_compile=jit_compile)
    def step(x, memory, causal, memory_mask):
        with tf.GradientTape() as tape:
            tape.watch([x, memory])
            output = layer(x, causal, memory, memory_mask, training=True)
            # The gradient of half the sum of squares is the output.
            loss = 0.5 * tf.reduce_sum(tf.square(output))
        sources = {"input 0": x, "input 1": memory}
        sources.update((name, variable.value) for name, variable in variables.items())
        return output, tape.gradient(loss, sources)

    inputs = [tf.constant(x, tf.float32), tf.constant(memory, tf.float32), causal, memory_mask]
    output, gradients = step(*inputs)
    expected, backward = reference_blocks.decoder(x, memory, weights, causal, memory_mask)
    input_gradients, weight_gradients = backward(expected)
    expected_gradients = {f"input {i}": g for i, g in enumerate(input_gradients)}
    expected_gradients.update(reference_weights.leaves(weight_gradients))
    assert_all_close({"output": output}, {"output": expected}, BLOCKS["float32"])
    assert_all_close(gradients, expected_gradients, BLOCKS["float32"])
