"""Sharded experts match one device, and their communication matches the formula."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer import MoEConfig
from dtransformer.layers import CrossEntropyLoss, MoE
from dtransformer.models import CausalLM
from dtransformer.parallel.mesh.axis_rules import replicate
from dtransformer.parallel.mesh.batch import local_value, put_sharded
from dtransformer.parallel.mesh.function import MeshFunction
from dtransformer.parallel.runtime import job
from dtransformer.trainers import Trainer
from tests.on_mesh import on_mesh, raises, start, stop

BATCH, LENGTH, HIDDEN = 4, 8, 6
TWO = {"expert_num": 4, "num_experts_chosen": 2, "z_loss_factor": 0.01}
BY_SIGMOID = {"router_type": "sigmoid", "routing_groups": 2, "routing_groups_chosen": 1}
# Each case has fields of `MoEConfig`, arguments of the layer and fields of the parallel config.
CASES = [
    ({"capacity_factor": 0.8, **BY_SIGMOID}, {}, {"data_parallel": 2, "model_parallel": 1}),
    (
        {"capacity_factor": 0.8, "expert_group_size": 3, "shared_experts": 1},
        {"gated": True},
        {"data_parallel": 2, "model_parallel": 2, "expert_parallel": 2},
    ),
    (
        {"dropless": True},
        {"use_bias": False},
        {"data_parallel": 4, "model_parallel": 1, "expert_parallel": 4},
    ),
]


def run_layer(fields, arguments):
    """Return the output, the added loss and the gradients of the input and the weights."""
    layer = MoE(HIDDEN, 8, MoEConfig(**TWO | fields), dropout_rate=0.0, name="moe", **arguments)
    layer.build((None, None, HIDDEN))
    x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, HIDDEN)).astype("float32")
    mask = np.arange(LENGTH) < np.array([[8], [5], [0], [7]])

    def run(x, mask):
        values = [weight.value for weight in layer.weights]
        with keras.StatelessScope(list(zip(layer.weights, values)), collect_losses=True) as scope:
            with tf.GradientTape() as tape:
                tape.watch([x, *values])
                y = layer(x, mask=mask, training=True)
                (added_loss,) = scope.losses
                loss = tf.reduce_sum(y * y) + added_loss
        return [y, added_loss, *tape.gradient(loss, [x, *values])]

    if job.mesh() is None:
        return run(tf.constant(x), tf.constant(mask))
    function = MeshFunction(lambda *args: replicate(run(*args)), layer.weights, gradients=True)
    return [local_value(part) for part in function(*put_sharded((x, mask)))]


# A group of a sharded sequence may be a shard, half a shard or span several shards.
LONG_CASES = [
    (
        {"capacity_factor": 0.8, "expert_group_size": 4, "shared_experts": 1, **BY_SIGMOID},
        {"gated": True},
        {"data_parallel": 2, "context_parallel": 2, "model_parallel": 2, "expert_parallel": 2},
    ),
    (
        {"capacity_factor": 0.8, "expert_group_size": 2},
        {},
        {"context_parallel": 2, "model_parallel": 1},
    ),
    (
        {"capacity_factor": 0.8, "expert_group_size": 3},
        {},
        {"data_parallel": 2, "context_parallel": 2, "model_parallel": 1, "expert_parallel": 2},
    ),
]

# Groups of exactly one sequence, and groups with space for two.
FULL_SEQUENCES = [
    (
        {"dropless": True, "expert_group_size": LENGTH, "aux_loss_factor": 0.02},
        {},
        {"context_parallel": 2, "model_parallel": 1},
    ),
    (
        {
            "capacity_factor": 0.8,
            "expert_group_size": 2 * LENGTH,
            "shared_experts": 1,
            **BY_SIGMOID,
        },
        {"gated": True},
        {"context_parallel": 2, "model_parallel": 2},
    ),
]


@on_mesh
def test_outputs_and_gradients_match_one_device():
    assert_matches_one_device(CASES[1:2])


@pytest.mark.long
@on_mesh
def test_outputs_and_gradients_of_other_routers_match_one_device():
    assert_matches_one_device([CASES[0], CASES[2]])


@pytest.mark.long
@on_mesh
def test_groups_of_full_sequences_work_if_sequences_are_sharded():
    assert_matches_one_device(FULL_SEQUENCES)


@pytest.mark.long
@on_mesh
def test_outputs_and_gradients_of_sharded_sequences_match_one_device():
    assert_matches_one_device(LONG_CASES)


def assert_matches_one_device(cases):
    for fields, arguments, layout in cases:
        expected = run_layer(fields, arguments)
        start(**layout)
        for part, expected_part in zip(run_layer(fields, arguments), expected, strict=True):
            np.testing.assert_allclose(
                part, expected_part, rtol=1e-4, atol=1e-5, err_msg=str(fields)
            )
        stop()


@on_mesh
def test_rejects_layouts_that_do_not_fit():
    start(data_parallel=2, model_parallel=1, expert_parallel=2)
    raises(ValueError, ["`expert_parallel=2` must divide `expert_num=3`"], lambda: make(3))
    model = CausalLM(50, hidden_size=8, num_heads=2, num_layers=1)
    trainer = Trainer(model)
    trainer.compile("sgd", CrossEntropyLoss())
    ids = np.ones((BATCH, LENGTH), "int32")
    raises(ValueError, ["with experts", "moe_config"], lambda: trainer.train_on_batch(ids, ids))


def make(experts):
    return MoE(HIDDEN, 8, MoEConfig(expert_num=experts))


def sent_between_experts(**fields):
    """Check the sums of a block. Return the expected and the sent bytes of its all-to-alls."""
    start(data_parallel=2, model_parallel=2, expert_parallel=2, recompute=True, **fields)
    moe = MoEConfig(**TWO, expert_group_size=4, capacity_factor=1.0)
    model = CausalLM(
        50,
        hidden_size=8,
        num_heads=2,
        num_layers=1,
        gated=True,
        dropout_rate=0.0,
        moe_config=moe,
    )
    trainer = Trainer(model)
    trainer.compile(keras.optimizers.SGD(0.1), CrossEntropyLoss())
    ids = np.random.default_rng(0).integers(4, 50, (BATCH, LENGTH)).astype("int32")
    trainer.train_on_batch(ids, ids)
    report = trainer.communication_report()
    assert report.summed_elements("blocks/block_0") == report.formula["blocks/block_0"]
    assert all(w.specs[0] == "data" for w in model.weights if "expert" in w.logical_axes)
    assert "all-to-alls between experts" in str(report)
    (formula,) = report.exchanged.values()
    stop()
    return formula, report.exchanged_bytes("blocks/block_0")


@pytest.mark.long
@on_mesh
def test_all_to_alls_and_sums_match_the_formula():
    # A device has 2 rows of 2 groups, 4 experts, 2 slots and 8 features of 4 bytes. It sends half
    # of them to and from the experts in the forward pass, in its recomputation and in the
    # backward pass.
    expected = 2 * 2 * 4 * 2 * 8 * 4 // 2 * 6
    assert sent_between_experts() == (expected, expected)


@pytest.mark.long
@on_mesh
def test_sequence_shards_send_local_groups_only():
    expected = 2 * 1 * 4 * 2 * 8 * 4 // 2 * 6
    assert sent_between_experts(context_parallel=2) == (expected, expected)
