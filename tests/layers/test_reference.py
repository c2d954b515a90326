"""Hand-written gradients of the reference match numeric differentiation."""

from functools import partial

import numpy as np
import pytest

from tests.layers import reference, reference_blocks, reference_weights
from tests.tolerances import NUMERIC_DERIVATIVE

HIDDEN, HEADS, INNER = 4, 2, 3


def numeric_gradient(function, array, step=1e-5):
    """Return the central differences of a function by the elements of an array.

    `function` takes no arguments and returns a scalar. `array` is modified in place.
    """
    gradient = np.zeros_like(array)
    for index in np.ndindex(array.shape):
        value = array[index]
        array[index] = value + step
        above = function()
        array[index] = value - step
        gradient[index] = (above - function()) / (2.0 * step)
        array[index] = value
    return gradient


def check(function, inputs, weights=None):
    """Check all gradients of sum(output · random) by inputs and weights."""
    arguments = list(inputs) if weights is None else [*inputs, weights]
    output, backward = function(*arguments)
    factor = np.random.default_rng(1).normal(size=np.shape(output))
    input_grads, weight_grads = backward(factor)
    value = lambda: (function(*arguments)[0] * factor).sum()

    named = [(f"input {i}", x) for i, x in enumerate(inputs) if x.dtype == np.float64]
    actual = [(f"input {i}", g) for i, g in enumerate(input_grads)]
    if weights is not None:
        named += reference_weights.leaves(weights)
        actual += reference_weights.leaves(weight_grads)
    actual = dict(actual)
    assert set(actual) == {name for name, _ in named}
    for name, array in named:
        np.testing.assert_allclose(
            actual[name],
            numeric_gradient(value, array),
            rtol=NUMERIC_DERIVATIVE,
            atol=NUMERIC_DERIVATIVE,
            err_msg=name,
        )


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_linear_gradients_match_finite_differences(rng):
    x = rng.normal(size=(2, 3, 5))
    check(reference.linear, [x], reference_weights.linear(rng, 5, 4))
    check(reference.linear, [x], reference_weights.linear(rng, 5, 4, use_bias=False))


@pytest.mark.parametrize("name", sorted(reference.ACTIVATIONS))
def test_activation_gradients_match_finite_differences(rng, name):
    check(reference.ACTIVATIONS[name], [rng.normal(size=(3, 7))])


def test_norm_gradients_match_finite_differences(rng):
    x = rng.normal(size=(2, 3, 5))
    for epsilon in (1e-5, 0.5):
        layer_norm = partial(reference.layer_norm, epsilon=epsilon)
        check(layer_norm, [x], reference_weights.layer_norm(rng, 5))
        rms_norm = partial(reference.rms_norm, epsilon=epsilon)
        check(rms_norm, [x], reference_weights.rms_norm(rng, 5))


def test_masked_softmax_gradients_match_finite_differences(rng):
    allowed = reference_weights.attention_mask(rng, 2, 3, 5) != 0
    check(partial(reference.masked_softmax, allowed=allowed), [rng.normal(size=(2, 3, 5))])


def test_masked_softmax_of_large_scores_and_empty_rows():
    scores = np.array([[1e6, 1e6, -1e6], [1e308, -1e308, 0.0], [1.0, 2.0, 3.0]])
    allowed = np.array([[1, 1, 1], [0, 1, 0], [0, 0, 0]]) != 0
    probabilities, _ = reference.masked_softmax(scores, allowed)
    np.testing.assert_array_equal(probabilities, [[0.5, 0.5, 0], [0, 1, 0], [0, 0, 0]])


def test_embedding_gradients_match_finite_differences(rng):
    ids = np.array([[0, 3, 3], [2, 0, 3]])
    check(reference.embedding, [ids], {"table": rng.normal(size=(5, 2))})


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(label_smoothing=0.1),
        dict(ignore_id=-100),
        dict(vocab_size=4),
        dict(label_smoothing=0.2, ignore_id=1, vocab_size=4, mask=[[1, 0, 1], [1, 1, 1]]),
        dict(mask=[[0, 0, 0], [0, 0, 0]]),
    ],
)
def test_cross_entropy_gradients_match_finite_differences(rng, options):
    labels = np.array([[3, 0, 1], [2, 1, -100]])
    if options.get("ignore_id") != -100:
        labels = np.maximum(labels, 0)
    loss = lambda logits: reference.cross_entropy(logits, labels, **options)
    check(loss, [rng.normal(size=(2, 3, 6))])


def test_cross_entropy_of_equal_logits_is_log_num_classes():
    logits, labels = np.zeros((3, 8)), np.array([0, 2, 4])
    for smoothing in (0.0, 0.3):
        loss, _ = reference.cross_entropy(logits, labels, None, smoothing, None, 5)
        np.testing.assert_allclose(loss, np.log(5.0))


def test_causal_mask_is_lower_triangular():
    expected = [[[1, 0, 0], [1, 1, 0], [0, 0, 0]]]
    np.testing.assert_array_equal(reference.causal_mask([[1, 1, 0]]), expected)


@pytest.mark.parametrize("mask", [None, "padding", "one row", "full"])
def test_attention_gradients_match_finite_differences(rng, mask):
    query = rng.normal(size=(2, 3, HIDDEN))
    key, value = rng.normal(size=(2, 2, 5, HIDDEN))
    masks = {
        "padding": reference_weights.padding_mask(rng, 2, 5),
        "one row": reference_weights.padding_mask(rng, 2, 5)[:, None, :],
        "full": reference_weights.attention_mask(rng, 2, 3, 5),
    }
    function = partial(reference_blocks.attention, mask=masks.get(mask))
    check(function, [query, key, value], reference_weights.attention(rng, HIDDEN, HEADS))


def test_attention_without_allowed_keys_is_the_output_bias(rng):
    x = rng.normal(size=(1, 2, HIDDEN))
    weights = reference_weights.attention(rng, HIDDEN, HEADS)
    output, _ = reference_blocks.attention(x, x, x, weights, np.array([[0, 0]]))
    np.testing.assert_array_equal(output, np.broadcast_to(weights["output_bias"], x.shape))


@pytest.mark.parametrize("hidden_act", sorted(reference.ACTIVATIONS))
def test_feed_forward_gradients_match_finite_differences(rng, hidden_act):
    function = partial(reference_blocks.feed_forward, hidden_act=hidden_act)
    check(
        function,
        [rng.normal(size=(2, 3, HIDDEN))],
        reference_weights.feed_forward(rng, HIDDEN, INNER),
    )


@pytest.mark.parametrize("post", [False, True])
def test_encoder_gradients_match_finite_differences(rng, post):
    mask = reference_weights.padding_mask(rng, 2, 3)
    function = partial(reference_blocks.encoder, mask=mask, post_layernorm_residual=post)
    weights = reference_weights.stack(
        rng, reference_weights.encoder_layer, 2, HIDDEN, HEADS, INNER, final_norm=not post
    )
    check(function, [rng.normal(size=(2, 3, HIDDEN))], weights)


@pytest.mark.parametrize("post", [False, True])
def test_decoder_gradients_match_finite_differences(rng, post):
    function = partial(
        reference_blocks.decoder,
        decoder_mask=reference.causal_mask(reference_weights.padding_mask(rng, 2, 3)),
        memory_mask=reference_weights.padding_mask(rng, 2, 5),
        post_layernorm_residual=post,
    )
    weights = reference_weights.stack(
        rng, reference_weights.decoder_layer, 2, HIDDEN, HEADS, INNER, final_norm=not post
    )
    inputs = [rng.normal(size=(2, 3, HIDDEN)), rng.normal(size=(2, 5, HIDDEN))]
    check(function, inputs, weights)
