"""Promise: schedules are the published ones, end whatever the delays, and idle as computed."""

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
from dtransformer.parallel.schedules.simulator import ideal_of, simulate
from dtransformer.parallel.schedules.timeline import most_alive, write
from tests.parallel.pipeline_parallel.v_schedule import V_SCHEDULE

STAGES = (2, 3, 4, 8)
# Name, p, m, v of everything that is tried.
ALL = [
    *((name, p, m, 1) for name in ("gpipe", "1f1b") for p in STAGES for m in range(p, 4 * p + 1)),
    *(("interleaved", p, p * n, v) for p in STAGES for n in (1, 2, 3, 4) for v in (2, 3, 4)),
]
DIVIDED = [
    *(("zb_h1", p, m, 1) for p in STAGES for m in range(p, 4 * p + 1)),
    *(("zb_v", p, m, 2) for p in STAGES for m in (p, p + 1, 2 * p, 4 * p)),
]
V_SHAPED = [("v", p, m, 2) for p in STAGES for m in (p, 2 * p + 1)]


@pytest.fixture(autouse=True)
def v_schedule(monkeypatch):
    """Let the config know a schedule of the tests' own."""
    monkeypatch.setitem(schedules.SCHEDULES, "v", V_SCHEDULE)


def plan(name, num_stages, num_micro_batches, chunks_per_stage):
    """Return the instructions of all stages, and the placement."""
    schedules.check(name, num_stages, num_micro_batches, chunks_per_stage)
    placement = schedules.SCHEDULES[name].place(num_stages, chunks_per_stage)
    return schedules.instructions(name, placement, num_micro_batches), placement


def computations(own):
    return [one for one in own if one.kind in COMPUTATIONS]


BY_HAND = {
    # (name, p, m, v): the computations of each stage, with the numbers of micro-batch and chunk.
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
    # Figure 3 of the paper.
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
def test_orders_are_those_by_hand(case):
    everything, _ = plan(*case)
    assert [" ".join(map(str, computations(own))) for own in everything] == BY_HAND[case]


def by_time(num_stages, num_micro_batches, most):
    """Derive orders from a rule: of what is ready, a stage takes the backward pass first.

    A stage has at most `most(stage)` micro-batches alive; passes take one unit each.
    """
    done, orders = {}, [[] for _ in range(num_stages)]
    for now in itertools.count():
        for stage, order in enumerate(orders):
            forwards = sum(kind == FORWARD for kind, _ in order)
            backwards = len(order) - forwards
            before = lambda kind, k, s: done.get((kind, k, s), now) < now
            last = stage == num_stages - 1
            source = (FORWARD, backwards, stage) if last else (BACKWARD, backwards, stage + 1)
            if backwards < forwards and before(*source):
                order.append((BACKWARD, backwards))
            elif (
                forwards < num_micro_batches
                and forwards - backwards < most(stage)
                and (stage == 0 or before(FORWARD, forwards, stage - 1))
            ):
                order.append((FORWARD, forwards))
            else:
                continue
            done[*order[-1], stage] = now
        if all(len(order) == 2 * num_micro_batches for order in orders):
            return orders


@pytest.mark.parametrize("case", [case for case in ALL if case[0] == "1f1b"], ids=str)
def test_one_forward_one_backward_follows_a_rule(case):
    _, p, m, _ = case
    expected = by_time(p, m, most=lambda stage: p - stage)
    for own, order in zip(plan(*case)[0], expected, strict=True):
        assert [(one.kind, one.micro_batch) for one in computations(own)] == order


@pytest.mark.parametrize("case", [*ALL, *DIVIDED, *V_SHAPED], ids=str)
def test_every_pass_once_and_every_send_is_received(case):
    _, p, m, v = case
    everything, placement = plan(*case)
    assert placement.num_chunks == p * v
    sent, received = [], []
    for stage, own in enumerate(everything):
        passes = [(one.kind, one.micro_batch, one.chunk) for one in computations(own)]
        kinds = COMPUTATIONS if case in DIVIDED else (FORWARD, BACKWARD)
        expected = set(itertools.product(kinds, range(m), placement.chunks_of(stage)))
        assert len(passes) == len(expected) and set(passes) == expected
        for one in own:
            if one.kind.startswith("send"):
                sent.append((one.peer, get_receive(one, placement)))
            elif one.kind.startswith("receive"):
                received.append((stage, one))
    borders = sum(not placement.is_local(c) for c in range(placement.last_chunk))
    assert len(sent) == len(set(sent)) == 2 * m * borders
    assert set(sent) == set(received) and len(received) == len(sent)


@pytest.mark.parametrize("case", ALL, ids=str)
def test_the_bubble_is_that_of_the_theory(case):
    _, p, m, v = case
    timeline = simulate(*plan(*case), forward=1.0, backward=2.0)
    assert timeline.bubble == pytest.approx((p - 1) / (v * m + p - 1))
    assert timeline.span == pytest.approx(3 * (v * m + p - 1))


@pytest.mark.parametrize("case", [case for case in DIVIDED if case[0] == "zb_h1"], ids=str)
def test_the_bubble_is_a_third_where_weights_gradients_fill_it(case):
    _, p, m, _ = case
    timeline = simulate(*plan(*case))
    assert timeline.span == pytest.approx(3 * m + p - 1)
    assert timeline.bubble == pytest.approx((p - 1) / (3 * m + p - 1))
    assert timeline.bubble < 0.5 * simulate(*plan("1f1b", p, m, 1)).bubble


@pytest.mark.parametrize("case", [case for case in DIVIDED if case[0] == "zb_v"], ids=str)
def test_a_v_idles_still_less_with_the_memory_of_1f1b(case):
    _, p, m, _ = case
    everything, placement = plan(*case)
    timeline = simulate(everything, placement)
    assert timeline.span <= 6 * m + 2 * (p - 1)
    assert timeline.bubble < simulate(*plan("zb_h1", p, m, 1)).bubble or m == p
    assert max(map(most_alive, everything)) <= 2 * p


@pytest.mark.parametrize("case", [case for case in DIVIDED if case[0] == "zb_h1"], ids=str)
def test_no_more_than_the_first_stage_of_1f1b_are_alive(case):
    _, p, m, _ = case
    assert [most_alive(own) for own in plan(*case)[0]] == p * [min(p, m)]


@pytest.mark.parametrize("case", [case for case in ALL if case[3] == 1], ids=str)
def test_so_many_micro_batches_are_alive(case):
    name, p, m, _ = case
    for rank, own in enumerate(plan(*case)[0]):
        assert most_alive(own) == (m if name == "gpipe" else min(p - rank, m))


@pytest.mark.parametrize(
    "case", [*random.Random(0).sample([*ALL, *DIVIDED], 60), *V_SHAPED], ids=str
)
def test_every_schedule_ends_whatever_the_delays(case):
    generator = random.Random(1)
    lengths = {}

    def length(stage, chunk):
        return lengths.setdefault((stage, chunk), generator.expovariate(1.0))

    timeline = simulate(*plan(*case), length, length, transfer=generator.random())
    assert 0 <= timeline.bubble < 1


def test_a_timeline_is_written_beside_the_ideal_one(tmp_path):
    everything, placement = plan("1f1b", 2, 4, 1)
    slow = simulate(everything, placement, transfer=1.0)
    write(slow, ideal_of(slow, everything), tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    titles = [x["args"]["name"] for x in events if x["name"] == "process_name"]
    assert titles == [f"measured: {slow.bubble:.1%} idle", "with instant transfers: 20.0% idle"]
    passes = [x for x in events if x["name"] == "B3" and x["tid"] == 0]
    assert [x["pid"] for x in passes] == [0, 1] and passes[0]["ts"] > passes[1]["ts"]
    with pytest.raises(ValueError, match="must end with .json, got 'step.png'"):
        write(slow, slow, "step.png")


def test_a_receive_stands_before_the_computation_that_it_does_not_need():
    first = plan("1f1b", 2, 4, 1)[0][0]
    for place, one in enumerate(first):
        if one.kind == RECEIVE_GRADIENTS:
            assert first[place + 1].kind == FORWARD or one.micro_batch == 3


def test_stages_that_wait_for_each_other_are_an_error():
    everything, placement = plan("1f1b", 2, 2, 1)
    own = everything[1]  # whose first send is forgotten
    del own[[i.kind for i in own].index(SEND_GRADIENTS)]
    with pytest.raises(ValueError, match="Stage 0 waits for the input of B0"):
        simulate(everything, placement)


def test_a_stage_that_computes_before_its_own_neighbour_is_an_error():
    everything, placement = plan("v", 2, 2, 2)
    everything[1].sort(key=lambda one: one.chunk != 2)  # chunk 2 needs chunk 1, both on stage 1
    with pytest.raises(ValueError, match="Stage 1 waits for the input of F0.2"):
        simulate(everything, placement)


# Placements


def test_where_chunks_are():
    looped = Placement.looped(3, 2)
    assert looped.stage_of_chunk == (0, 1, 2, 0, 1, 2)
    assert looped.stage_pairs == [(0, 1), (0, 2), (1, 2)]
    assert [looped.stage_before(c) for c in range(6)] == [None, 0, 1, 2, 0, 1]
    v = Placement.v_shaped(3)
    assert v.stage_of_chunk == (0, 1, 2, 2, 1, 0)
    assert v.stage_pairs == [(0, 1), (1, 2)]
    assert [v.chunks_of(stage) for stage in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [v.stage_after(c) for c in range(6)] == [1, 2, 2, 1, 0, None]
    assert [v.is_local(c) for c in range(6)] == [False, False, True, False, False, False]
    assert Placement((0,)).stage_pairs == []


def test_a_stage_without_a_chunk_is_an_error():
    with pytest.raises(ValueError, match="Each stage from 0 on needs a model chunk"):
        Placement((0, 2))


def test_a_chunk_whose_neighbour_is_on_its_stage_sends_it_nothing():
    """Stage 1 of a V has the chunks 1 and 2: it sends stage 0 chunk 2's, and takes chunk 1's."""
    _, second = plan("v", 2, 2, 2)[0]
    sends = {(one.kind, one.chunk, one.peer) for one in second if one.kind.startswith("send")}
    assert sends == {(SEND_ACTIVATIONS, 2, 0), (SEND_GRADIENTS, 1, 0)}
    # Its four forward passes of each chunk follow each other without a wait.
    timeline = simulate(*plan("v", 2, 2, 2), forward=1.0, backward=2.0, transfer=10.0)
    starts = {str(event.instruction): event.start for event in timeline.of_stage(1)}
    assert starts["F0.2"] == max(starts["F1.1"], starts["F0.1"]) + 1


def test_the_config_takes_every_schedule_of_the_table():
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
def test_what_cannot_be_carried_out_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        schedules.check(*arguments)
