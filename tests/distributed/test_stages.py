"""Promise: stages skip together, measure together, wait for each other, and say what is wrong."""

import json

import numpy as np
import pytest

from tests.distributed import stages
from tests.distributed.launch import launch, needs_horovod
from tests.tolerances import PARITY_LOGITS, PARITY_LOSS, TRAINING

pytestmark = needs_horovod


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank gives."""
    folder = tmp_path_factory.mktemp("stages")
    code, output = launch(2, ["-m", "tests.distributed.stages", folder], timeout=400)
    assert code == 0, output[-20000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_an_overflow_on_one_stage_is_skipped_on_all(ranks):
    for rank in ranks:
        found = rank["overflow_on_one_stage"]
        assert found["skipped_steps"] == [0, 0, 1, 1, 1]
        assert found["loss_scale"][3] == found["loss_scale"][2] / 2
        weights = found["weights"]
        assert [weights[i] == weights[i - 1] for i in range(1, 5)] == [False, True, False, False]
        assert len(weights[0]) == 1  # its own stage's
    first, last = (rank["overflow_on_one_stage"]["weights"] for rank in ranks)
    assert first[-1] != last[-1]


def test_keras_metrics_are_those_of_one_process(ranks):
    expected = stages.keras_metrics()
    for rank in ranks:
        for name, values in expected.items():
            assert rank["keras_metrics"][name] == pytest.approx(values, rel=TRAINING)


def test_losses_of_every_schedule_are_those_of_one_process(ranks):
    expected = stages.losses_alone()
    for losses in ranks[0]["losses_of_sleepy_stages"].values():
        assert losses[0] == pytest.approx(expected, rel=PARITY_LOSS)


def test_sleeps_before_instructions_change_nothing(ranks):
    for schedule, (first, *others) in ranks[0]["losses_of_sleepy_stages"].items():
        assert len(others) == 4 and len(set(first)) == 10
        assert all(losses == first for losses in others), schedule
    assert ranks[0]["losses_of_sleepy_stages"] == ranks[1]["losses_of_sleepy_stages"]


def test_a_placement_of_neighbours_on_one_stage_gives_the_numbers_of_one_process(ranks):
    expected = stages.v_shaped()
    for rank, blocks in zip(ranks, (["block_0", "block_3"], ["block_1", "block_2"])):
        found = rank["v_shaped"]
        assert found["losses"] == pytest.approx(expected["losses"], rel=PARITY_LOSS)
        assert found["evaluation"] == pytest.approx(expected["evaluation"], rel=PARITY_LOSS)
        np.testing.assert_allclose(found["logits"], expected["logits"], rtol=0, atol=PARITY_LOGITS)
        assert found["blocks"] == blocks
    # Between the chunks 1 and 2, which are on one stage, nothing is sent.
    forth, back = ["blocks/block_0", False], ["blocks/block_2", True]
    assert sorted(ranks[0]["v_shaped"]["sent"]) == 4 * [forth] + 4 * [back]
    forth, back = ["blocks/block_2", False], ["blocks/block_0", True]
    assert sorted(ranks[1]["v_shaped"]["sent"]) == 4 * [back] + 4 * [forth]


def test_the_timeline_has_all_computations_and_transfers_in_order(ranks):
    assert ranks[0]["reports"]["events"] == ranks[1]["reports"]["events"]
    assert 0 < ranks[0]["reports"]["bubble"] < 1
    events = {
        (name, stage): (start, end) for name, stage, start, end in ranks[0]["reports"]["events"]
    }
    way = [("F{}", 0), ("a<{}.1", 1), ("F{}.1", 1), ("B{}.1", 1), ("g<{}", 0), ("B{}", 0)]
    assert events.keys() == {(name.format(k), stage) for name, stage in way for k in range(4)}
    for k in range(4):
        times = [events[name.format(k), stage] for name, stage in way]
        assert all(start <= end for start, end in times)
        assert all(before[0] <= after[1] for before, after in zip(times, times[1:]))
        starts = [start for start, _ in times]
        assert starts == sorted(starts)


def test_transfers_and_activations_are_reported(ranks):
    first, last = (rank["reports"] for rank in ranks)
    shape = [stages.ROWS // 4, stages.WIDTH, 16]
    num_bytes = 4 * shape[0] * shape[1] * shape[2]
    assert first["sent"] == 4 * [["blocks/block_1", shape, False, num_bytes]]
    assert last["sent"] == 4 * [["blocks/block_1", shape, True, num_bytes]]
    assert first["activations"] == 2 * last["activations"] > 0  # 1F1B: two micro-batches, one


@pytest.mark.parametrize(
    "name, words",
    [
        ("rows", ["6 rows", "micro_batch_num=4", "a multiple of 4"]),
        ("last_rows", ["5 rows", "micro_batch_num=4"]),
        ("order", ["theirs differ", "shuffle=False"]),
    ],
)
def test_every_rank_says_what_is_wrong_with_a_batch(name, words, ranks):
    for rank in ranks:
        message, is_built = rank["errors"][name]
        assert all(word in message for word in words), message
        assert is_built == (name == "order")
