"""FeedForward and Linear match the reference."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import FeedForward, Linear
from tests.layers import reference, reference_blocks, reference_weights
from tests.layers.reference_compare import compare, each_policy

SHAPES = [(2, 5, 12, 10), (1, 1, 3, 1), (3, 7, 5, 17)]


@each_policy
@pytest.mark.parametrize("hidden_act", ["gelu", "relu"])
@pytest.mark.parametrize("batch, length, hidden, inner", SHAPES)
def test_feed_forward_matches_the_reference(policy, hidden_act, batch, length, hidden, inner):
    rng = np.random.default_rng(0)
    compare(
        policy,
        lambda: FeedForward(hidden, inner, dropout_rate=0.0, hidden_act=hidden_act),
        partial(reference_blocks.feed_forward, hidden_act=hidden_act),
        [reference_weights.numbers(rng, batch, length, hidden)],
        reference_weights.feed_forward(rng, hidden, inner),
    )


@each_policy
def test_feed_forward_defaults_are_gelu_and_no_dropout_at_inference(policy):
    rng = np.random.default_rng(1)
    compare(
        policy,
        lambda: FeedForward(12, 10),
        partial(reference_blocks.feed_forward, hidden_act="gelu"),
        [reference_weights.numbers(rng, 2, 5, 12)],
        reference_weights.feed_forward(rng, 12, 10),
        call=lambda layer, x: layer(x, training=False),
    )


def test_feed_forward_drops_out_in_training_only():
    layer = FeedForward(64, 64, dropout_rate=0.5)
    x = tf.random.stateless_normal((4, 16, 64), (0, 1))
    dropped = layer(x, training=True).numpy()
    undropped = layer(x, training=False).numpy()
    zeros = dropped == 0.0
    assert 0.45 < zeros.mean() < 0.55
    np.testing.assert_allclose(dropped[~zeros], 2.0 * undropped[~zeros], rtol=1e-5)


@each_policy
@pytest.mark.parametrize("parallel", ["column", "row"])
@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("shape, units", [((2, 5, 12), 7), ((3, 4), 1), ((2, 3, 1, 5), 6)])
def test_linear_matches_the_reference(policy, parallel, use_bias, shape, units):
    rng = np.random.default_rng(2)
    compare(
        policy,
        lambda: Linear(units, use_bias=use_bias, parallel=parallel),
        reference.linear,
        [reference_weights.numbers(rng, *shape)],
        reference_weights.linear(rng, shape[-1], units, use_bias),
        call=lambda layer, x: layer(x),
    )
