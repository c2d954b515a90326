"""Schedules match the published ones, never deadlock and idle as computed."""

import itertools
import json
import random

import pytest

from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.parallel.schedules import schedules
from dtransformer.parallel.schedules.instruction import (
    BACKWARD,
    COMPUTATIONS,
    FORWARD,
    RECEIVE_GRADIENTS,
    SEND_ACTIVATIONS,
    SEND_GRADIENTS,
    get_receive,
)
from dtransformer.parallel.schedules.placement import Placement
from dtransformer.parallel.schedules.simulator import ideal_timeline, simulate
from dtransformer.parallel.schedules.timeline import max_stored_micro_batches, write
from tests.parallel.pipeline_parallel.v_schedule import V_SCHEDULE

STAGES = (2, 3, 4, 8)
# Cases are (name, stages p, micro-batches m, chunks per stage v).
ALL = [
    *((name, p, m, 1) for name in ("gpipe", "1f1b") for p in STAGES for m in range(p, 4 * p + 1)),
    *(("interleaved", p, p * n, v) for p in STAGES for n in (1, 2, 3, 4) for v in (2, 3, 4)),
]
SPLIT_BACKWARD = [
    *(("zb_h1", p, m, 1) for p in STAGES for m in range(p, 4 * p + 1)),
    *(("zb_v", p, m, 2) for p in STAGES for m in (p, p + 1, 2 * p, 4 * p)),
]
V_CASES = [("v", p, m, 2) for p in STAGES for m in (p, 2 * p + 1)]


@pytest.fixture(autouse=True)
def v_schedule(monkeypatch):
    """Register the custom schedule of the tests."""
    monkeypatch.setitem(schedules.SCHEDULES, "v", V_SCHEDULE)


def plan(name, num_stages, num_micro_batches, chunks_per_stage):
    """Return a list of instructions for each stage, and the placement."""
    schedules.check(name, num_stages, num_micro_batches, chunks_per_stage)
    placement = schedules.SCHEDULES[name].place(num_stages, chunks_per_stage)
    return schedules.instructions(name, placement, num_micro_batches), placement


def computations(stage_instructions):
    return [instruction for instruction in stage_instructions if instruction.kind in COMPUTATIONS]


BY_HAND = {
    # Computations of each stage as text: kind, micro-batch and, after a dot, chunk.
    ("gpipe", 2, 2, 1): ["F0 F1 B0 B1", "F0.1 F1.1 B0.1 B1.1"],
    ("gpipe", 3, 4, 1): [
        "F0 F1 F2 F3 B0 B1 B2 B3",
        "F0.1 F1.1 F2.1 F3.1 B0.1 B1.1 B2.1 B3.1",
        "F0.2 F1.2 F2.2 F3.2 B0.2 B1.2 B2.2 B3.2",
    ],
    ("1f1b", 2, 2, 1): ["F0 F1 B0 B1", "F0.1 B0.1 F1.1 B1.1"],
    ("1f1b", 2, 4, 1): [
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1",
    ],
    ("1f1b", 3, 3, 1): [
        "F0 F1 F2 B0 B1 B2",
        "F0.1 F1.1 B0.1 F2.1 B1.1 B2.1",
        "F0.2 B0.2 F1.2 B1.2 F2.2 B2.2",
    ],
    ("1f1b", 4, 8, 1): [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0.1 F1.1 F2.1 B0.1 F3.1 B1.1 F4.1 B2.1 F5.1 B3.1 F6.1 B4.1 F7.1 B5.1 B6.1 B7.1",
        "F0.2 F1.2 B0.2 F2.2 B1.2 F3.2 B2.2 F4.2 B3.2 F5.2 B4.2 F6.2 B5.2 F7.2 B6.2 B7.2",
        "F0.3 B0.3 F1.3 B1.3 F2.3 B2.3 F3.3 B3.3 F4.3 B4.3 F5.3 B5.3 F6.3 B6.3 F7.3 B7.3",
    ],
    ("interleaved", 2, 2, 2): [
        "F0 F1 F0.2 F1.2 B0.2 B1.2 B0 B1",
        "F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 B0.1 B1.1",
    ],
    ("interleaved", 2, 4, 2): [
        "F0 F1 F0.2 F1.2 F2 B0.2 F3 B1.2 F2.2 B0 F3.2 B1 B2.2 B3.2 B2 B3",
        "F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 F2.1 B0.1 F3.1 B1.1 F2.3 B2.3 F3.3 B3.3 B2.1 B3.1",
    ],
    ("zb_h1", 2, 3, 1): [
        "F0 F1 B0 W0 F2 B1 W1 B2 W2",
        "F0.1 B0.1 F1.1 B1.1 W0.1 F2.1 B2.1 W1.1 W2.1",
    ],
    # This is figure 3 of the zero-bubble paper (Qi et al., 2023).
    ("zb_h1", 4, 8, 1): [
        "F0 F1 F2 F3 B0 W0 F4 B1 W1 F5 B2 W2 F6 B3 W3 F7 B4 W4 B5 W5 B6 W6 B7 W7",
        "F0.1 F1.1 F2.1 B0.1 F3.1 B1.1 W0.1 F4.1 B2.1 W1.1 F5.1 B3.1 W2.1 F6.1 B4.1 W3.1 "
        "F7.1 B5.1 W4.1 B6.1 W5.1 B7.1 W6.1 W7.1",
        "F0.2 F1.2 B0.2 F2.2 B1.2 F3.2 B2.2 W0.2 F4.2 B3.2 W1.2 F5.2 B4.2 W2.2 F6.2 B5.2 W3.2 "
        "F7.2 B6.2 W4.2 B7.2 W5.2 W6.2 W7.2",
        "F0.3 B0.3 F1.3 B1.3 F2.3 B2.3 F3.3 B3.3 W0.3 F4.3 B4.3 W1.3 F5.3 B5.3 W2.3 F6.3 B6.3 "
        "W3.3 F7.3 B7.3 W4.3 W5.3 W6.3 W7.3",
    ],
    ("v", 2, 2, 2): [
        "F0 F1 F0.3 F1.3 B0.3 B1.3 B0 B1",
        "F0.1 F1.1 F0.2 F1.2 B0.2 B1.2 B0.1 B1.1",
    ],
}


@pytest.mark.parametrize("case", BY_HAND, ids=str)
def test_order_of_passes_matches_handwritten_order(case):
    all_instructions, _ = plan(*case)
    assert [
        " ".join(map(str, computations(stage_instructions)))
        for stage_instructions in all_instructions
    ] == BY_HAND[case]


def greedy_orders(num_stages, num_micro_batches, max_alive):
    """Return the orders of a scheduler that always prefers a ready backward pass.

    Each stage keeps at most `max_alive(stage)` micro-batches alive. Each pass takes one unit.
    """
    done, orders = {}, [[] for _ in range(num_stages)]
    for now in itertools.count():
        for stage, order in enumerate(orders):
            forwards = sum(kind == FORWARD for kind, _ in order)
            backwards = len(order) - forwards
            before = lambda kind, k, s: done.get((kind, k, s), now) < now
            is_last = stage == num_stages - 1
            source = (FORWARD, backwards, stage) if is_last else (BACKWARD, backwards, stage + 1)
            if backwards < forwards and before(*source):
                order.append((BACKWARD, backwards))
            elif (
                forwards < num_micro_batches
                and forwards - backwards < max_alive(stage)
                and (stage == 0 or before(FORWARD, forwards, stage - 1))
            ):
                order.append((FORWARD, forwards))
            else:
                continue
            done[*order[-1], stage] = now
        if all(len(order) == 2 * num_micro_batches for order in orders):
            return orders


@pytest.mark.parametrize("case", [case for case in ALL if case[0] == "1f1b"], ids=str)
def test_1f1b_equals_backward_first_scheduling(case):
    _, p, m, _ = case
    expected = greedy_orders(p, m, max_alive=lambda stage: p - stage)
    for stage_instructions, order in zip(plan(*case)[0], expected, strict=True):
        assert [
            (instruction.kind, instruction.micro_batch)
            for instruction in computations(stage_instructions)
        ] == order


@pytest.mark.parametrize("case", [*ALL, *SPLIT_BACKWARD, *V_CASES], ids=str)
def test_every_pass_runs_once_and_every_send_is_received(case):
    _, p, m, v = case
    all_instructions, placement = plan(*case)
    assert placement.num_chunks == p * v
    sent, received = [], []
    for stage, stage_instructions in enumerate(all_instructions):
        passes = [
            (instruction.kind, instruction.micro_batch, instruction.chunk)
            for instruction in computations(stage_instructions)
        ]
        kinds = COMPUTATIONS if case in SPLIT_BACKWARD else (FORWARD, BACKWARD)
        expected = set(itertools.product(kinds, range(m), placement.get_chunks(stage)))
        assert len(passes) == len(expected) and set(passes) == expected
        for instruction in stage_instructions:
            if instruction.kind.startswith("send"):
                sent.append((instruction.peer, get_receive(instruction, placement)))
            elif instruction.kind.startswith("receive"):
                received.append((stage, instruction))
    borders = sum(not placement.is_local(c) for c in range(placement.last_chunk))
    assert len(sent) == len(set(sent)) == 2 * m * borders
    assert set(sent) == set(received) and len(received) == len(sent)


@pytest.mark.parametrize("case", ALL, ids=str)
def test_bubble_matches_the_formula(case):
    _, p, m, v = case
    timeline = simulate(*plan(*case), forward=1.0, backward=2.0)
    assert timeline.bubble == pytest.approx((p - 1) / (v * m + p - 1))
    assert timeline.span == pytest.approx(3 * (v * m + p - 1))


@pytest.mark.parametrize("case", [case for case in SPLIT_BACKWARD if case[0] == "zb_h1"], ids=str)
def test_zero_bubble_h1_cuts_the_bubble_to_a_third(case):
    _, p, m, _ = case
    timeline = simulate(*plan(*case))
    assert timeline.span == pytest.approx(3 * m + p - 1)
    assert timeline.bubble == pytest.approx((p - 1) / (3 * m + p - 1))
    assert timeline.bubble < 0.5 * simulate(*plan("1f1b", p, m, 1)).bubble


@pytest.mark.parametrize("case", [case for case in SPLIT_BACKWARD if case[0] == "zb_v"], ids=str)
def test_zero_bubble_v_idles_less_with_the_memory_of_1f1b(case):
    _, p, m, _ = case
    all_instructions, placement = plan(*case)
    timeline = simulate(all_instructions, placement)
    assert timeline.span <= 6 * m + 2 * (p - 1)
    assert timeline.bubble < simulate(*plan("zb_h1", p, m, 1)).bubble or m == p
    assert max(map(max_stored_micro_batches, all_instructions)) <= 2 * p


@pytest.mark.parametrize("case", [case for case in SPLIT_BACKWARD if case[0] == "zb_h1"], ids=str)
def test_zero_bubble_h1_needs_the_memory_of_the_first_1f1b_stage(case):
    _, p, m, _ = case
    assert [
        max_stored_micro_batches(stage_instructions) for stage_instructions in plan(*case)[0]
    ] == p * [min(p, m)]


@pytest.mark.parametrize("case", [case for case in ALL if case[3] == 1], ids=str)
def test_number_of_live_micro_batches(case):
    name, p, m, _ = case
    for rank, stage_instructions in enumerate(plan(*case)[0]):
        assert max_stored_micro_batches(stage_instructions) == (
            m if name == "gpipe" else min(p - rank, m)
        )


@pytest.mark.parametrize(
    "case", [*random.Random(0).sample([*ALL, *SPLIT_BACKWARD], 60), *V_CASES], ids=str
)
def test_every_schedule_ends_for_random_delays(case):
    generator = random.Random(1)
    lengths = {}

    def length(stage, chunk):
        return lengths.setdefault((stage, chunk), generator.expovariate(1.0))

    timeline = simulate(*plan(*case), length, length, transfer=generator.random())
    assert 0 <= timeline.bubble < 1


def test_writes_measured_and_ideal_timeline(tmp_path):
    all_instructions, placement = plan("1f1b", 2, 4, 1)
    slow = simulate(all_instructions, placement, transfer=1.0)
    write(slow, ideal_timeline(slow, all_instructions), tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    titles = [x["args"]["name"] for x in events if x["name"] == "process_name"]
    assert titles == [f"measured: {slow.bubble:.1%} idle", "with instant transfers: 20.0% idle"]
    passes = [x for x in events if x["name"] == "B3" and x["tid"] == 0]
    assert [x["pid"] for x in passes] == [0, 1] and passes[0]["ts"] > passes[1]["ts"]
    with pytest.raises(ValueError, match="must end with .json, got 'step.png'"):
        write(slow, slow, "step.png")


def test_receives_are_posted_one_computation_early():
    first_stage = plan("1f1b", 2, 4, 1)[0][0]
    for i, instruction in enumerate(first_stage):
        if instruction.kind == RECEIVE_GRADIENTS:
            assert first_stage[i + 1].kind == FORWARD or instruction.micro_batch == 3


def test_simulator_reports_a_deadlock():
    all_instructions, placement = plan("1f1b", 2, 2, 1)
    second_stage = all_instructions[1]
    # Forget the first send of the second stage.
    del second_stage[[instruction.kind for instruction in second_stage].index(SEND_GRADIENTS)]
    with pytest.raises(ValueError, match="Stage 0 waits for the input of B0"):
        simulate(all_instructions, placement)


def test_simulator_reports_a_local_chunk_that_runs_too_early():
    all_instructions, placement = plan("v", 2, 2, 2)
    all_instructions[1].sort(
        key=lambda instruction: instruction.chunk != 2
    )  # chunk 2 needs chunk 1, both on stage 1
    with pytest.raises(ValueError, match="Stage 1 waits for the input of F0.2"):
        simulate(all_instructions, placement)


# Placements.


def test_placement_of_chunks_on_stages():
    looped = Placement.looped(3, 2)
    assert looped.stage_of_chunk == (0, 1, 2, 0, 1, 2)
    assert looped.stage_pairs == [(0, 1), (0, 2), (1, 2)]
    assert [looped.stage_before(c) for c in range(6)] == [None, 0, 1, 2, 0, 1]
    v = Placement.v_shaped(3)
    assert v.stage_of_chunk == (0, 1, 2, 2, 1, 0)
    assert v.stage_pairs == [(0, 1), (1, 2)]
    assert [v.get_chunks(stage) for stage in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [v.stage_after(c) for c in range(6)] == [1, 2, 2, 1, 0, None]
    assert [v.is_local(c) for c in range(6)] == [False, False, True, False, False, False]
    assert Placement((0,)).stage_pairs == []


def test_every_stage_needs_a_chunk():
    with pytest.raises(ValueError, match="Each stage from 0 on needs a model chunk"):
        Placement((0, 2))


def test_neighboring_chunks_on_one_stage_exchange_no_messages():
    """Stage 1 of a V has chunks 1 and 2. It sends only to chunks 3 and 0, both on stage 0."""
    _, second_stage = plan("v", 2, 2, 2)[0]
    sends = {
        (instruction.kind, instruction.chunk, instruction.peer)
        for instruction in second_stage
        if instruction.kind.startswith("send")
    }
    assert sends == {(SEND_ACTIVATIONS, 2, 0), (SEND_GRADIENTS, 1, 0)}
    # Chunk 2 starts right after chunk 1, without a transfer.
    timeline = simulate(*plan("v", 2, 2, 2), forward=1.0, backward=2.0, transfer=10.0)
    starts = {str(event.instruction): event.start for event in timeline.get_stage_events(1)}
    assert starts["F0.2"] == max(starts["F1.1"], starts["F0.1"]) + 1


def test_config_accepts_registered_schedules():
    config = TransformerOpParallelConfig(
        pipeline_stage=2, micro_batch_num=2, pipeline_schedule="v", pipeline_chunks=2
    )
    assert config.placement == Placement((0, 1, 1, 0))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("1f1b", 4, 3, 1), "`micro_batch_num=3` is less than `pipeline_stage=4`"),
        (("1f1b", 2, 4, 3), "Set `pipeline_chunks` to 1, or `pipeline_schedule` to 'interleaved'"),
        (("1f1b", 2, 4, 2), "or `pipeline_schedule` to 'interleaved' or 'zb_v'"),
        (("v", 2, 4, 3), "`pipeline_chunks=3` does not work with `pipeline_schedule='v'`"),
        (("zb_h1", 2, 4, 2), "`pipeline_chunks=2` does not work with `pipeline_schedule='zb_h1'`"),
        (
            ("zb_v", 2, 4, 1),
            "Set `pipeline_chunks` to 2, or `pipeline_schedule` to '1f1b' or 'gpipe'",
        ),
        (
            ("interleaved", 2, 4, 1),
            "Set `pipeline_chunks` to 2 or more, or `pipeline_schedule` to '1f1b'",
        ),
        (("interleaved", 2, 3, 2), "`micro_batch_num=3` must be a multiple of `pipeline_stage=2`"),
    ],
)
def test_rejects_impossible_schedules(arguments, words):
    with pytest.raises(ValueError, match=words):
        schedules.check(*arguments)
