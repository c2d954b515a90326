"""Promise: schedules are the published ones, end whatever the delays, and idle as computed."""

import itertools
import random

import pytest

from dtransformer.parallel.pipeline import schedules
from dtransformer.parallel.pipeline.simulator import simulate
from dtransformer.parallel.pipeline.timeline import most_alive

STAGES = (2, 3, 4, 8)
# Name, p, m, v of everything that is tried.
ALL = [
    *((name, p, m, 1) for name in ("gpipe", "1f1b") for p in STAGES for m in range(p, 4 * p + 1)),
    *(("interleaved", p, p * n, v) for p in STAGES for n in (1, 2, 3, 4) for v in (2, 3, 4)),
]


def computations(own):
    return " ".join(str(i) for i in own if i.kind in (schedules.FORWARD, schedules.BACKWARD))


BY_HAND = {
    # (name, p, m, v): the computations of each stage.
    ("gpipe", 2, 2, 1): ["F0 F1 B0 B1", "F0 F1 B0 B1"],
    ("gpipe", 3, 4, 1): ["F0 F1 F2 F3 B0 B1 B2 B3"] * 3,
    ("1f1b", 2, 2, 1): ["F0 F1 B0 B1", "F0 B0 F1 B1"],
    ("1f1b", 2, 4, 1): ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"],
    ("1f1b", 3, 3, 1): ["F0 F1 F2 B0 B1 B2", "F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"],
    ("1f1b", 4, 8, 1): [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ],
    ("interleaved", 2, 2, 2): [
        "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1",
    ],
    ("interleaved", 2, 4, 2): [
        "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
    ],
}


@pytest.mark.parametrize("case", BY_HAND, ids=str)
def test_orders_are_those_by_hand(case):
    assert [computations(own) for own in schedules.instructions(*case)] == BY_HAND[case]


def by_time(num_stages, num_micro_batches, most):
    """Derive orders from a rule: of what is ready, a stage takes the backward pass first.

    A stage has at most `most(stage)` micro-batches alive; passes take one unit each.
    """
    done, orders = {}, [[] for _ in range(num_stages)]
    for now in itertools.count():
        for stage, order in enumerate(orders):
            forwards = sum(kind == schedules.FORWARD for kind, _ in order)
            backwards = len(order) - forwards
            before = lambda kind, k, s: done.get((kind, k, s), now) < now
            last = stage == num_stages - 1
            source = (
                (schedules.FORWARD, backwards, stage)
                if last
                else (schedules.BACKWARD, backwards, stage + 1)
            )
            if backwards < forwards and before(*source):
                order.append((schedules.BACKWARD, backwards))
            elif (
                forwards < num_micro_batches
                and forwards - backwards < most(stage)
                and (stage == 0 or before(schedules.FORWARD, forwards, stage - 1))
            ):
                order.append((schedules.FORWARD, forwards))
            else:
                continue
            done[*order[-1], stage] = now
        if all(len(order) == 2 * num_micro_batches for order in orders):
            return orders


@pytest.mark.parametrize("case", [case for case in ALL if case[0] == "1f1b"], ids=str)
def test_one_forward_one_backward_follows_a_rule(case):
    _, p, m, _ = case
    expected = by_time(p, m, most=lambda stage: p - stage)
    for own, order in zip(schedules.instructions(*case), expected, strict=True):
        found = [
            (i.kind, i.micro_batch)
            for i in own
            if i.kind in (schedules.FORWARD, schedules.BACKWARD)
        ]
        assert found == order


@pytest.mark.parametrize("case", ALL, ids=str)
def test_every_pass_once_and_every_message_has_two_ends(case):
    _, p, m, v = case
    everything = schedules.instructions(*case)
    expected = {
        (kind, k, c)
        for kind in (schedules.FORWARD, schedules.BACKWARD)
        for k in range(m)
        for c in range(v)
    }
    sent, received = [], []
    for stage, own in enumerate(everything):
        passes = [
            (i.kind, i.micro_batch, i.chunk)
            for i in own
            if i.kind in (schedules.FORWARD, schedules.BACKWARD)
        ]
        assert len(passes) == len(expected) and set(passes) == expected
        assert [i.kind for i in own[-2:]] == [schedules.REDUCE, schedules.UPDATE]
        for one in own:
            if one.kind.startswith("send"):
                sent.append(schedules.receiver(one, stage, p))
            elif one.kind.startswith("receive"):
                received.append((stage, one))
    assert len(sent) == len(set(sent)) == 2 * m * (p * v - 1)
    assert set(sent) == set(received) and len(received) == len(sent)


@pytest.mark.parametrize("case", ALL, ids=str)
def test_the_bubble_is_that_of_the_theory(case):
    _, p, m, v = case
    timeline = simulate(schedules.instructions(*case), forward=1.0, backward=2.0)
    assert timeline.bubble == pytest.approx((p - 1) / (v * m + p - 1))
    assert timeline.span == pytest.approx(3 * (v * m + p - 1))


@pytest.mark.parametrize("case", [case for case in ALL if case[3] == 1], ids=str)
def test_so_many_micro_batches_are_alive(case):
    name, p, m, _ = case
    for rank, own in enumerate(schedules.instructions(*case)):
        assert most_alive(own) == (m if name == "gpipe" else min(p - rank, m))


@pytest.mark.parametrize("case", random.Random(0).sample(ALL, 40), ids=str)
def test_every_schedule_ends_whatever_the_delays(case):
    generator = random.Random(1)
    lengths = {}

    def length(stage, chunk):
        return lengths.setdefault((stage, chunk), generator.expovariate(1.0))

    timeline = simulate(schedules.instructions(*case), length, length, message=generator.random())
    assert 0 <= timeline.bubble < 1


def test_a_receive_stands_before_the_computation_that_it_does_not_need():
    first = schedules.instructions("1f1b", 2, 4)[0]
    for place, one in enumerate(first):
        if one.kind == schedules.RECEIVE_GRADIENTS:
            assert first[place + 1].kind == schedules.FORWARD or one.micro_batch == 3


def test_stages_that_wait_for_each_other_are_an_error():
    everything = schedules.instructions("1f1b", 2, 2)
    own = everything[1]  # whose first message is forgotten
    del own[[i.kind for i in own].index(schedules.SEND_GRADIENTS)]
    with pytest.raises(ValueError, match="stage 0 waits for the input of B0"):
        simulate(everything)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("zigzag", 2, 2, 1), "must be one of 1f1b, gpipe, interleaved; got 'zigzag'"),
        (("1f1b", 4, 3, 1), "micro_batch_num=3 is less than pipeline_stage=4"),
        (("1f1b", 2, 4, 2), "pipeline_chunks=2 needs pipeline_schedule='interleaved'"),
        (("interleaved", 2, 4, 1), "needs pipeline_chunks of 2 or more, got 1"),
        (("interleaved", 2, 3, 2), "a multiple of pipeline_stage=2 as micro_batch_num, got 3"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        schedules.instructions(*arguments)
