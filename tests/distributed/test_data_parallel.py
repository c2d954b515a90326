"""Two data-parallel ranks give the losses and weights of one process."""

import keras
import numpy as np
import pytest

from dtransformer.datasets import TranslationBatches
from dtransformer.parallel.runtime import job
from dtransformer.trainers.rank_agreement import prepare_callbacks
from dtransformer.trainers.row_sharding import RowSharding
from harness.tasks import TASKS
from harness.tolerances import PARITY_LOSS, PARITY_WEIGHTS
from tests.shared_runs import on_ranks, parametrize_runs

IN_16_BITS = ("gradients_in_16_bits", "all_gradients_in_16_bits")
# The ranks' rows have another order than in one process, so `dropout` has other masks.
NOT_EXACT = ("dropout", "mixed_float16", "master_weights", *IN_16_BITS)


def two_ranks(name):
    return f"harness.tasks:{name}/dp2@2x1"


# Task -> task with the same results in one process.
SAME_ALONE = {
    "micro_batches": "untied",
    "sharded_sums_of_micro_batches": "untied",
    "gradients_in_16_bits": "untied",
    "all_gradients_in_16_bits": "untied",
    "plain_keras_in_micro_batches": "plain_keras",
}


def one_process(run):
    """Return the run of the same or an equivalent task in one process."""
    name = run.removeprefix("harness.tasks:").removesuffix("/dp2@2x1")
    return f"harness.tasks:{SAME_ALONE.get(name, name)}/alone@1x1"


LONG = [
    two_ranks(name)
    for name in (
        "tied",
        "master_weights",
        "mixed_float16",
        "all_gradients_in_16_bits",
        "level_3_recomputed",
        "level_3_plain_keras_loss",
        "plain_keras_in_micro_batches",
        "steps_per_execution",
        "micro_batches",
        "gradients_in_16_bits",
        "overflow_at_level_2",
        "dropout",
        "sharded_sums_of_micro_batches",
    )
]
ALL = [two_ranks(name) for name in TASKS]
OVERFLOWS = [two_ranks(name) for name in TASKS if name.startswith("overflow")]
EXACT = [
    two_ranks(name) for name in TASKS if not name.startswith("overflow") and name not in NOT_EXACT
]


@parametrize_runs(EXACT, LONG, lambda run: [one_process(run)])
def test_losses_and_weights_match_one_process(run, rank_results):
    (expected,) = rank_results(one_process(run))
    for rank in rank_results(run):
        np.testing.assert_allclose(rank["step_losses"], expected["step_losses"], rtol=PARITY_LOSS)
        np.testing.assert_allclose(rank["gradient_norms"], expected["gradient_norms"], rtol=1e-4)
        for key in {"loss", "accuracy", "hit_rate"} & set(expected["history"]):
            np.testing.assert_allclose(
                rank["history"][key], expected["history"][key], rtol=PARITY_LOSS
            )
        for key, value in expected["evaluation"].items():
            assert rank["evaluation"][key] == pytest.approx(value, rel=PARITY_LOSS), key
        assert rank["weights"] == pytest.approx(expected["weights"], rel=PARITY_WEIGHTS)


@parametrize_runs(ALL, LONG)
def test_ranks_agree_bit_for_bit(run, rank_results):
    first, second = rank_results(run)
    assert first["step_losses"] == second["step_losses"]
    assert first["weights"] == second["weights"]


@parametrize_runs(EXACT, LONG)
def test_losses_decrease(run, rank_results):
    losses = rank_results(run)[0]["step_losses"]
    half = len(losses) // 2  # `steps_per_execution` logs only every fifth step.
    assert np.mean(losses[half:]) < np.mean(losses[:half])


@pytest.mark.long
@pytest.mark.runs(two_ranks("mixed_float16"), two_ranks("master_weights"))
def test_sharded_master_weights_give_the_losses_of_replicated_weights(rank_results):
    replicated = rank_results(two_ranks("mixed_float16"))[0]
    sharded = rank_results(two_ranks("master_weights"))[0]
    assert sharded["step_losses"] == replicated["step_losses"], "to the last bit"
    assert sharded["weights"] == replicated["weights"]
    for planned, measured in sharded["memory"].values():
        assert planned == measured
    # Bytes per parameter: a 16-bit copy of a weight takes 2 bytes instead of 4. A master weight and
    # two states take 12 bytes, and a rank has half of them. The limits are higher because tables
    # and norms, a sixth of this network, compute in float32.

    parameters = replicated["memory"]["weights"][0] / 4
    for kind, allowed in (("weights", 2.6), ("gradients", 2.6), ("optimizer states", 6)):
        assert sharded["memory"][kind][0] < allowed * parameters


@parametrize_runs([two_ranks("mixed_float16")], LONG, lambda run: [one_process(run)])
def test_16_bit_losses_match_one_process(run, rank_results):
    (expected,), (result, _) = rank_results(one_process(run)), rank_results(run)
    np.testing.assert_allclose(result["step_losses"], expected["step_losses"], rtol=5e-3)


@parametrize_runs([two_ranks("untied"), two_ranks("mixed_float16")], LONG)
def test_each_gradient_is_sent_once(run, rank_results):
    for rank in rank_results(run):
        other_elements = rank["sent"] - rank["parameters"]
        assert 0 < other_elements < 20, "the remaining elements are counters and sums of the logs"


@parametrize_runs(OVERFLOWS, LONG)
def test_overflow_on_one_rank_skips_the_step_on_all_ranks(run, rank_results):
    for rank in rank_results(run):
        weights, scales = rank["weights_by_step"], rank["loss_scale"]
        assert weights[2] == weights[1], "to the last bit"
        assert weights[1] != weights[0] and weights[3] != weights[2] != weights[4]
        assert scales == [*[scales[0]] * 3, *[scales[0] / 2] * 2]
        assert rank["skipped_steps"] == [0, 0, 1, 1, 1]
        is_finite = np.isfinite(rank["loss"]).tolist()
        assert is_finite == [True, True, False, True, True], "each step's own loss, as in Keras"


@parametrize_runs(list(map(two_ranks, IN_16_BITS)), LONG, lambda run: [one_process(run)])
def test_gradients_can_be_reduced_in_16_bits(run, rank_results):
    losses = rank_results(run)[0]["step_losses"]
    expected = rank_results(one_process(run))[0]["step_losses"][: len(losses)]
    assert len(losses) == 3
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
    assert losses != expected


@parametrize_runs([two_ranks("untied")])
def test_all_20_steps_have_different_losses(run, rank_results):
    losses = rank_results(run)[0]["step_losses"]
    assert len(losses) == len(set(losses)) == 20


@on_ranks("dp2@2x1")
def test_global_batches_are_sharded_like_arrays():
    ids = (np.arange(5, 13, dtype="int32"), np.arange(9))
    global_batches = TranslationBatches(ids, ids, batch_size=4)
    index, count = job.data_shard()
    local_batches = TranslationBatches(ids, ids, batch_size=4, shard_index=index, num_shards=count)
    assert [RowSharding.from_data(x).is_global for x in (ids, global_batches, local_batches)] == [
        True,
        True,
        False,
    ]


@on_ranks("dp2@2x1")
def test_each_rank_logs_to_a_separate_tensorboard_folder():
    board = keras.callbacks.TensorBoard("logs")
    for _ in range(2):  # `fit` prepares the callbacks each time.
        prepare_callbacks([board])
    assert board.log_dir == ("logs" if job.is_chief() else "logs/rank_1")
