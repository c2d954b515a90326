"""Dropout masks depend only on seeds, also in recomputed blocks."""

import numpy as np
import pytest
import tensorflow as tf

from dtransformer import layers
from dtransformer.layers import (
    Dropout,
    dropout_seed,
)
from tests.layers.reference_compare import each_policy
from tests.tolerances import LAYERS, assert_all_close


def dropout_mask(layer, seed, x=None):
    x = np.ones((64, 64), "float32") if x is None else x
    with dropout_seed(tf.constant(seed)):
        return layer(x, training=True).numpy()


def test_masks_depend_only_on_seed_and_layer():
    first, second = Dropout(0.3, name="first"), Dropout(0.3, name="second")
    same_name = Dropout(0.3, name="first")
    mask = dropout_mask(first, [7, 3])
    np.testing.assert_array_equal(dropout_mask(first, [7, 3]), mask)
    np.testing.assert_array_equal(dropout_mask(same_name, [7, 3]), mask)
    other_masks = [
        dropout_mask(first, [7, 4]),
        dropout_mask(first, [8, 3]),
        dropout_mask(second, [7, 3]),
    ]
    for other in other_masks:
        agree = ((other == 0) == (mask == 0)).mean()
        assert abs(agree - (0.3**2 + 0.7**2)) < 0.05, "masks are independent"


@each_policy
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_kept_fraction_and_scale(policy, rate):
    layer = Dropout(rate, dtype=policy)
    x = np.full((256, 256), 3.0, "float32")
    dropped = dropout_mask(layer, [1, 2], x).astype("float64")
    is_kept = dropped != 0
    # Five standard deviations of 65,536 draws.
    assert abs(is_kept.mean() - (1 - rate)) <= 5 * np.sqrt(rate * (1 - rate)) / 256
    np.testing.assert_allclose(dropped[is_kept], 3.0 / (1 - rate), rtol=LAYERS[policy])
    np.testing.assert_array_equal(layer(x, training=False).numpy().astype("float64"), x)


def test_without_a_seed_every_call_draws_a_new_mask():
    layer = Dropout(0.5)
    x = np.ones((64, 64), "float32")
    first, second = layer(x, training=True).numpy(), layer(x, training=True).numpy()
    assert (first != second).mean() > 0.4
    with dropout_seed(tf.constant([1, 1])):
        pass
    assert (layer(x, training=True).numpy() != second).mean() > 0.4, "the seed has ended"


@pytest.mark.parametrize("compiled", [False, True])
def test_recompute_draws_the_same_masks(compiled):
    block = layers.TransformerEncoderLayer(12, 3, 7, 0.3, 0.3, name="block")
    x = tf.constant(np.random.default_rng(0).standard_normal((2, 5, 12)), "float32")
    block(x)
    weights = [variable.value for variable in block.trainable_variables]

    def apply(x):
        return block(x, training=True)

    def gradients(seed, function):
        # Compute gradients under the same seed, like a training step.
        with dropout_seed(seed), tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.square(function(x)))
            parts = [loss, *tape.gradient(loss, [x, *weights])]
        return {str(index): part for index, part in enumerate(parts)}

    run_step = tf.function(gradients) if compiled else gradients
    seed = tf.constant([3, 4])
    expected = {name: value.numpy() for name, value in run_step(seed, apply).items()}
    assert_all_close(run_step(seed, tf.recompute_grad(apply)), expected, LAYERS["float32"])


def test_each_step_of_a_compiled_function_draws_a_new_mask():
    layer = Dropout(0.5, name="dropout")
    x = np.ones((64, 64), "float32")

    @tf.function
    def step(index):
        with dropout_seed(tf.stack([7, index])):
            return layer(x, training=True)

    masks = [step(tf.constant(index)).numpy() for index in (0, 1, 0)]
    assert (masks[0] != masks[1]).mean() > 0.4
    np.testing.assert_array_equal(masks[0], masks[2])
    np.testing.assert_array_equal(masks[0], dropout_mask(layer, [7, 0]))
