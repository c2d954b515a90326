"""MoE and its router match the reference and keep their guarantees."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer import MoEConfig, parallel_config
from dtransformer.layers import FeedForward, MoE, TransformerEncoder
from tests.layers import reference_moe, reference_weights

BATCH, LENGTH, HIDDEN, INNER = 3, 8, 6, 10
PADDING = np.arange(LENGTH) < np.array([[8], [5], [0]])
FOUR = {"expert_num": 4, "z_loss_factor": 0.01}
CONFIGS = {
    "one of four": {},
    "two of four": {"num_experts_chosen": 2, "capacity_factor": 1.0},
    "groups of tokens": {"num_experts_chosen": 2, "capacity_factor": 1.0, "expert_group_size": 4},
    "groups that do not divide": {"capacity_factor": 1.0, "expert_group_size": 3},
    "groups longer than sequences": {"capacity_factor": 1.0, "expert_group_size": 100},
    "dropless": {"num_experts_chosen": 3, "dropless": True},
    "sigmoid": {"router_type": "sigmoid", "num_experts_chosen": 2, "capacity_factor": 0.8},
    "sigmoid, one": {"router_type": "sigmoid"},
    "bias of logits": {"router_bias": True, "num_experts_chosen": 2, "dropless": True},
    "groups of experts": {
        "router_type": "sigmoid",
        "num_experts_chosen": 2,
        "routing_groups": 2,
        "routing_groups_chosen": 1,
        "expert_group_size": 8,
    },
}
DROPPING = {"two of four", "groups of tokens", "groups that do not divide", "sigmoid"}
each_config = pytest.mark.parametrize("name", CONFIGS)


def random_layer(**fields):
    """Return a layer with random weights and biases, and a dictionary of them."""
    layer = MoE(HIDDEN, INNER, MoEConfig(**FOUR | fields), dropout_rate=0.0)
    layer.build((None, None, HIDDEN))
    rng = np.random.default_rng(3)
    for weight in layer.weights:
        weight.assign(reference_weights.numbers(rng, *weight.shape))
    names = ["/".join(w.path.split("/")[1:]).replace("/", "_") for w in layer.weights]
    return layer, {name: w.numpy().astype("float64") for name, w in zip(names, layer.weights)}


def numbers(*shape):
    return reference_weights.numbers(np.random.default_rng(5), *shape)


@each_config
@pytest.mark.parametrize("mask", [None, PADDING], ids=["no padding", "padding"])
def test_outputs_and_losses_match_the_reference(name, mask):
    layer, weights = random_layer(**CONFIGS[name])
    x = numbers(BATCH, LENGTH, HIDDEN)
    mask_tensor = None if mask is None else tf.constant(mask)
    output = layer(tf.constant(x, "float32"), mask=mask_tensor, training=True)
    expected, cost, dropped = reference_moe.moe(layer.config, x, weights, mask)
    assert name not in DROPPING or dropped or mask is not None, "the case is to drop something"
    assert not dropped or not layer.config.dropless
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sum(layer.losses), cost, rtol=1e-5)


def test_compiled_layer_matches_eager():
    layer, _ = random_layer(num_experts_chosen=2, capacity_factor=1.0)
    x = tf.constant(numbers(BATCH, LENGTH, HIDDEN), "float32")
    compiled = tf.function(
        lambda x: layer(x), input_signature=[tf.TensorSpec([None, None, HIDDEN])]
    )
    np.testing.assert_allclose(compiled(x), layer(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("use_bias", [False, True])
def test_single_expert_equals_feed_forward(gated, use_bias):
    form = {"dropout_rate": 0.0, "gated": gated, "use_bias": use_bias}
    plain = FeedForward(HIDDEN, INNER, **form)
    x = tf.constant(numbers(BATCH, LENGTH, HIDDEN), "float32")
    plain.build(x.shape)
    layer = MoE(HIDDEN, INNER, MoEConfig(), **form)
    layer.build(x.shape)
    for weight in plain.weights:
        getattr(layer, weight.name).assign(weight.numpy()[None])
    # Its probability is 1, except for rounding on some processors.
    np.testing.assert_allclose(layer(x), plain(x), rtol=1e-6)
    with tf.GradientTape() as tape, tf.GradientTape() as plain_tape:
        total, plain_total = tf.reduce_sum(layer(x) ** 2), tf.reduce_sum(plain(x) ** 2)
    wanted_ones = plain_tape.gradient(plain_total, [w.value for w in plain.weights])
    gradients = tape.gradient(total, [getattr(layer, w.name).value for w in plain.weights])
    for actual, expected in zip(gradients, wanted_ones, strict=True):
        np.testing.assert_allclose(actual[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["one of four", "groups of tokens", "sigmoid"])
def test_auxiliary_loss_gradient_matches_numeric(name):
    layer, weights = random_layer(**CONFIGS[name])
    x = numbers(BATCH, LENGTH, HIDDEN)
    with tf.GradientTape() as tape:
        layer(tf.constant(x, "float32"), mask=tf.constant(PADDING), training=True)
        cost = sum(layer.losses)
    gradient = tape.gradient(cost, layer.router.kernel.value).numpy()
    kernel, step = weights["router_kernel"], 1e-5
    for position in np.ndindex(kernel.shape):
        costs = []
        for sign in (1, -1):
            moved = kernel.copy()
            moved[position] += sign * step
            changed = {**weights, "router_kernel": moved}
            costs.append(reference_moe.moe(layer.config, x, changed, PADDING)[1])
        numeric = (costs[0] - costs[1]) / (2 * step)
        np.testing.assert_allclose(gradient[position], numeric, rtol=1e-3, atol=1e-6)


@each_config
def test_gradients_match_numeric_gradients_of_the_reference(name):
    layer, weights = random_layer(**CONFIGS[name])
    arrays = {"inputs": numbers(BATCH, LENGTH, HIDDEN), **weights}
    factor = arrays["inputs"][::-1]
    x = tf.constant(arrays["inputs"], "float32")
    with tf.GradientTape() as tape:
        tape.watch(x)
        total = tf.reduce_sum(layer(x, mask=tf.constant(PADDING)) * factor.astype("float32"))
    sources = {"inputs": x, **dict(zip(weights, (w.value for w in layer.weights)))}
    sources.pop("router_bias", None)
    rng, step = np.random.default_rng(1), 1e-6
    for source, gradient in tape.gradient(total, sources).items():
        direction, totals = rng.normal(size=gradient.shape), []
        for sign in (1, -1):
            moved = {**arrays, source: arrays[source] + sign * step * direction}
            output, *_ = reference_moe.moe(layer.config, moved.pop("inputs"), moved, PADDING)
            totals.append((output * factor).sum())
        numeric = (totals[0] - totals[1]) / (2 * step)
        np.testing.assert_allclose((gradient * direction).numpy().sum(), numeric, rtol=1e-3)


def test_bias_of_overloaded_experts_decreases():
    layer, _ = random_layer(router_type="sigmoid", aux_loss_factor=0.0, z_loss_factor=0.0)
    layer.router.bias.assign([5.0, 0.0, 0.0, 0.0])  # All tokens choose the first expert.
    with tf.GradientTape() as tape:
        layer(tf.constant(numbers(BATCH, LENGTH, HIDDEN), "float32"), training=True)
        cost = sum(layer.losses)
    assert float(cost) == 0
    gradient = tape.gradient(cost, layer.router.bias.value)
    np.testing.assert_allclose(gradient, [0.75, -0.25, -0.25, -0.25], rtol=1e-6)


def test_flat_tokens_are_one_sequence():
    layer, _ = random_layer(expert_group_size=4, capacity_factor=1.0)
    x = tf.constant(numbers(BATCH * LENGTH, HIDDEN), "float32")
    np.testing.assert_array_equal(layer(x), layer(x[None])[0])


def test_shared_experts_process_every_token():
    layer, _ = random_layer(shared_experts=2)
    x = tf.constant(numbers(BATCH, LENGTH, HIDDEN), "float32")
    assert layer.shared_experts.mapping_kernel.shape == (HIDDEN, 2 * INNER)
    shared = layer.shared_experts
    total = layer(x)
    layer.shared_experts = None
    np.testing.assert_allclose(total, layer(x) + shared(x), rtol=1e-4, atol=1e-5)


def test_router_jitter_applies_only_in_training():
    layer, _ = random_layer(router_jitter=0.5)
    x = tf.constant(numbers(BATCH, LENGTH, HIDDEN), "float32")
    np.testing.assert_array_equal(layer.router(x).logits, layer.router(x).logits)
    jittered = layer.router(x, training=True).logits
    assert np.abs(jittered - layer.router(x).logits).max() > 0.1


def test_recompute_does_not_change_results():
    layer, _ = random_layer(num_experts_chosen=2, capacity_factor=1.0)
    x = tf.constant(numbers(BATCH, LENGTH, HIDDEN), "float32")

    def gradients():
        with tf.GradientTape() as tape:
            cost = tf.reduce_sum(layer(x, training=True) ** 2) + sum(layer.losses)
        return cost, tape.gradient(cost, [w.value for w in layer.trainable_weights])

    cost, stored = gradients()
    layer.recompute()
    recomputed_cost, recomputed = gradients()
    np.testing.assert_allclose(recomputed_cost, cost, rtol=1e-6)
    for actual, expected in zip(recomputed, stored):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_use_experts_selects_blocks():
    def use_experts_in_last_block(network, layer_id, layers, **_):
        network.use_experts(layer_id == layers - 1)

    moe = MoEConfig(expert_num=2)
    have = lambda **options: [
        isinstance(block.feed_forward, MoE)
        for block in TransformerEncoder(4, 8, 2, 16, moe_config=moe, **options).blocks
    ]
    assert have() == [True] * 4
    assert have(moe_every=2) == [False, True, False, True]
    assert have(lambda_func=use_experts_in_last_block) == [False, False, False, True]
    (block,) = TransformerEncoder(1, 8, 2, 16, moe_config=MoEConfig()).blocks
    assert type(block.feed_forward) is FeedForward, "one expert is a feed-forward layer"
    with pytest.raises(ValueError, match="has no experts"):
        block.use_experts()


def test_moe_config_round_trip():
    stack = TransformerEncoder(2, 8, 2, 16, moe_config=MoEConfig(expert_num=2), moe_every=2)
    restored = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(stack))
    first, second = restored.blocks
    assert type(first.feed_forward) is FeedForward
    assert second.feed_forward.config == stack.blocks[1].feed_forward.config


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"num_experts_chosen": 5}, "`num_experts_chosen=5` must not exceed `expert_num=4`"),
        ({"routing_groups": 3}, "`routing_groups=3` must divide `expert_num=4`"),
        (
            {"routing_groups_chosen": 2},
            "`routing_groups_chosen=2` must not exceed `routing_groups=1`",
        ),
        ({"routing_groups": 4, "num_experts_chosen": 2}, "`num_experts_chosen=2` must not exceed"),
    ],
)
def test_conflicting_fields_raise(fields, words):
    with pytest.raises(ValueError, match=words):
        random_layer(**fields)


@pytest.mark.parametrize(
    "layout, fields, words",
    [
        ({"expert_parallel": 3}, {}, "`expert_parallel=3` must divide `expert_num=4`"),
        ({"micro_batch_num": 2}, {}, "micro_batch_num=2.*Set `expert_group_size`"),
    ],
)
def test_unsupported_layouts_raise(layout, fields, words):
    with parallel_config(**layout), pytest.raises(ValueError, match=words):
        random_layer(**fields)
