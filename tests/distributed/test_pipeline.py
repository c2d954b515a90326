"""A rank has only its pipeline stage, and all stages skip, measure and fail together."""

import itertools
import math

import numpy as np
import pytest

from dtransformer import parallel_config
from dtransformer.layers.block import BlockStack
from dtransformer.parallel.schedules import schedules
from harness.compare import weights
from harness.networks import make
from harness.runs import Run
from harness.tolerances import PARITY_LOGITS, PARITY_LOSS
from tests.distributed.parity_runs import LONG, RUNS
from tests.distributed.tasks import pipeline
from tests.distributed.test_parity import network_name, one_process_run
from tests.shared_runs import parametrize_runs
from tests.tolerances import TRAINING

PIPELINES = [run for run in RUNS if Run.from_name(run).layout.stages > 1]


@parametrize_runs(PIPELINES, LONG, lambda run: [one_process_run(run)])
def test_rank_has_only_the_weights_of_its_stage(run, rank_results):
    network, layout = network_name(run), Run.from_name(run).layout
    all_weights = weights(rank_results(one_process_run(run))[0], "final")
    stacks = _stacks(network, layout)
    has_head = any("head/" in path for path in all_weights)
    is_tied = not any(path.endswith("head/kernel") for path in all_weights)
    place = schedules.SCHEDULES[layout.schedule].place
    stage_of_chunk = place(layout.stages, layout.chunks).stage_of_chunk
    for rank, results in enumerate(rank_results(run)):
        stage = rank * layout.stages // layout.ranks
        rank_weights = weights(results, "final")
        names = {
            f"{stack.name}/{block.name}"
            for stack in stacks
            for block in stack.blocks
            if stage_of_chunk[block.pipeline_stage] == stage
        }
        output_kernels = [path for path in rank_weights if "/output_kernel" in path]
        assert {"/".join(path.split("/")[-4:-2]) for path in output_kernels} == names
        is_last = stage == stage_of_chunk[-1]
        tables = {path for path in all_weights if path.endswith("embedding/table")}
        has_tables = stage == 0 or (is_last and is_tied)
        assert {path for path in rank_weights if path in tables} == (
            tables if has_tables else set()
        )
        assert any("head/" in path for path in rank_weights) == (has_head and is_last)


def _stacks(network, layout):
    with parallel_config(pipeline_stage=layout.stages, pipeline_chunks=layout.chunks):
        model, _ = make(network)
    return [layer for layer in model._flatten_layers() if isinstance(layer, BlockStack)]


def stages(task, schedule="1f1b"):
    """Return the name of a run on two stages with four micro-batches per step."""
    return f"tests.distributed.tasks.pipeline:{task}/pp2m4-{schedule}@2x1"


def one_process(task, layout="m4@1x1"):
    """Return the name of a run in one process."""
    return f"tests.distributed.tasks.pipeline:{task}/{layout}"


@pytest.mark.runs(stages("overflow_on_one_stage"))
def test_overflow_on_one_stage_skips_the_step_on_all_stages(rank_results):
    ranks = rank_results(stages("overflow_on_one_stage"))
    for result in ranks:
        assert result["skipped_steps"] == [0, 0, 1, 1, 1]
        assert result["loss_scale"][3] == result["loss_scale"][2] / 2
        weights_by_step = result["weights"]
        assert [weights_by_step[i] == weights_by_step[i - 1] for i in range(1, 5)] == [
            False,
            True,
            False,
            False,
        ]
        assert len(weights_by_step[0]) == 2  # One weight on each stage.
    first, last = (rank["weights"][-1] for rank in ranks)
    assert first == last


@pytest.mark.runs(stages("keras_metrics"), one_process("keras_metrics"))
def test_keras_metrics_match_one_process(rank_results):
    (expected,) = rank_results(one_process("keras_metrics"))
    for rank in rank_results(stages("keras_metrics")):
        for name, values in expected.items():
            assert rank[name] == pytest.approx(values, rel=TRAINING), name


LOSSES = tuple(
    stages("losses", schedule) for schedule in ("1f1b", "gpipe", "interleaved2", "zb_h1", "zb_v2")
)
LOSSES_ALONE = one_process("losses", "alone@1x1")


@parametrize_runs(LOSSES, LOSSES, lambda run: [LOSSES_ALONE])
def test_losses_of_every_schedule_match_one_process(run, rank_results):
    (expected,) = rank_results(LOSSES_ALONE)
    losses = rank_results(run)[0]["without_sleeps"]
    assert losses == pytest.approx(expected["without_sleeps"], rel=PARITY_LOSS)


@parametrize_runs(LOSSES, LOSSES)
def test_sleeps_before_instructions_change_nothing(run, rank_results):
    for rank in rank_results(run):
        losses = rank["without_sleeps"]
        assert len(rank["with_sleeps"]) >= 1 and len(set(losses)) == 10
        assert all(delayed_losses == losses for delayed_losses in rank["with_sleeps"])
        assert rank["with_sleeps"] == rank_results(run)[0]["with_sleeps"]


@pytest.mark.runs(stages("v_shaped"), one_process("v_shaped"))
def test_neighboring_chunks_on_one_stage_match_one_process(rank_results):
    (expected,), ranks = rank_results(one_process("v_shaped")), rank_results(stages("v_shaped"))
    for result, blocks in zip(ranks, (["block_0", "block_3"], ["block_1", "block_2"])):
        assert result["losses"] == pytest.approx(expected["losses"], rel=PARITY_LOSS)
        assert result["evaluation"] == pytest.approx(expected["evaluation"], rel=PARITY_LOSS)
        np.testing.assert_allclose(result["logits"], expected["logits"], rtol=0, atol=PARITY_LOGITS)
        assert result["blocks"] == blocks
    # Chunks 1 and 2 are on the same stage, so nothing is sent between them.
    forth, back = ["blocks/block_0", False], ["blocks/block_2", True]
    assert sorted(ranks[0]["sent"]) == 4 * [forth] + 4 * [back]
    forth, back = ["blocks/block_2", False], ["blocks/block_0", True]
    assert sorted(ranks[1]["sent"]) == 4 * [back] + 4 * [forth]


STORED_WEIGHTS = tuple(
    f"tests.distributed.tasks.pipeline:stored_weights/{layout}+shard3"
    for layout in ("dp2m2-interleaved2@2x1", "dp2mp2m2-interleaved2@1x4")
)


# parallel/zero/test_units.py tests the same for blocks.
@parametrize_runs(STORED_WEIGHTS, STORED_WEIGHTS)
def test_chunks_store_no_gathered_weights_between_their_passes(run, rank_results):
    for result in rank_results(run):
        assert [52, 24] in result["shapes"] and len(result["shapes"]) >= 5
        assert result["with_units"] == []
        assert len(result["without_units"]) >= 5


@pytest.mark.runs(stages("frozen"), one_process("frozen"))
def test_frozen_stage_matches_one_process(rank_results):
    (expected,), ranks = rank_results(one_process("frozen")), rank_results(stages("frozen"))
    assert len(set(expected["loss"])) == 5
    for result in ranks:
        np.testing.assert_allclose(result["before"], expected["before"], atol=PARITY_LOGITS)
        assert result["loss"] == pytest.approx(expected["loss"], rel=PARITY_LOSS)
        assert result["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=TRAINING)


@pytest.mark.runs(stages("reports"))
def test_timeline_has_all_computations_and_transfers_in_order(rank_results):
    first, last = rank_results(stages("reports"))
    assert first["events"] == last["events"]
    assert 0 < first["bubble"] < 1
    events = {(name, stage): (start, end) for name, stage, start, end in first["events"]}
    path = [("F{}", 0), ("a<{}.1", 1), ("F{}.1", 1), ("B{}.1", 1), ("g<{}", 0), ("B{}", 0)]
    assert events.keys() == {(name.format(k), stage) for name, stage in path for k in range(4)}
    for k in range(4):
        times = [events[name.format(k), stage] for name, stage in path]
        assert all(start <= end for start, end in times)
        assert all(
            before[0] <= weights_by_step[1] for before, weights_by_step in itertools.pairwise(times)
        )
        starts = [start for start, _ in times]
        assert starts == sorted(starts)


@pytest.mark.runs(stages("reports"))
def test_transfers_and_activations_are_reported(rank_results):
    first, last = rank_results(stages("reports"))
    shape = [pipeline.ROWS // 4, pipeline.WIDTH, 16]
    num_bytes = 4 * shape[0] * shape[1] * shape[2]
    assert first["sent"] == 4 * [["blocks/block_1", shape, False, num_bytes]]
    assert last["sent"] == 4 * [["blocks/block_1", shape, True, num_bytes]]
    assert first["activations"] == 2 * last["activations"] > 0  # 1F1B keeps two and one.


@pytest.mark.runs(stages("reports"))
def test_sum_of_a_tied_table_is_reported(rank_results):
    shape = [pipeline.VOCAB_SIZE, 16]
    num_bytes = 4 * math.prod(shape)  # Each of two ranks sends the size of the table.
    expected = ["causal_lm/embedding/table", "all-reduce", shape, num_bytes]
    for result in rank_results(stages("reports")):
        assert [row for row in result["shared"] if row[0] != "sum_of_stages"] == [expected]


@pytest.mark.runs(stages("reports"))
def test_plan_lists_the_layers_of_each_stage(rank_results):
    for result in rank_results(stages("reports")):
        assert result["stages"] == [
            ["embedding", "positions", "blocks/block_0", "blocks/block_1"],
            ["embedding", "blocks/block_2", "blocks/block_3", "blocks/final_norm", "head"],
        ]


@pytest.mark.runs(stages("shapes"), one_process("shapes"))
def test_varying_shapes_are_traced_twice(rank_results):
    (expected,) = rank_results(one_process("shapes"))
    first, last = rank_results(stages("shapes"))
    assert (first["traces"], last["traces"]) == (0, 2)
    assert first["loss"] == pytest.approx(expected["loss"], rel=PARITY_LOSS)


@pytest.mark.runs(stages("errors"))
@pytest.mark.parametrize(
    "name, words",
    [
        ("rows", ["6 rows", "micro_batch_num=4", "a multiple of 4"]),
        ("last_rows", ["5 rows", "micro_batch_num=4"]),
        ("order", ["have different batches", "the same order"]),
    ],
)
def test_every_rank_raises_an_error_that_explains_the_wrong_batch(name, words, rank_results):
    for rank in rank_results(stages("errors")):
        message, is_built = rank[name]
        assert all(word in message for word in words), message
        assert is_built == (name == "order")
