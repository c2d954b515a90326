"""The watchdog names the ranks that stop a job and leaves healthy jobs alone."""

import dataclasses

import pytest

from dtransformer.parallel.watchdog.activity import KINDS, Activity, is_over
from dtransformer.parallel.watchdog.watch import (
    Stragglers,
    Verdict,
    Watch,
    describe_verdict,
    stalled,
)

STALL = 50.0


def step(index=7, seconds=0.0, **fields):
    return Activity("step", index, seconds, **fields)


# Pairs of an activity and whether it exceeds its time limit.
ACTIVITIES = [
    (step(seconds=49), False),
    (step(seconds=51), True),
    (step(seconds=51, longest=20), False),  # the limit is four times the longest step
    (step(seconds=81, longest=20), True),
    (Activity("outside", 7, 300, waits_in="the barrier for rank 1", waited=51), True),
    (Activity("saving", 7, 300, waits_in="the barrier for rank 1", waited=49), False),
    (step(seconds=300, longest=20, waits_in="an all-gather for rank 1", waited=79), False),
    (Activity("compiling", 1, 300), False),
    (Activity("compiling", 1, 300, idle_seconds=51), True),  # no core compiles
    (Activity("compiling", 1, 1999), False),  # the first step may compile GPU kernels
    (Activity("compiling", 1, 2001), True),
    (Activity("compiling", 7, 501, longest=20), True),
    (Activity("validating", 7, 300), False),
    (Activity("validating", 7, 300, idle_seconds=51), True),
    (Activity("saving", 7, 300, idle_seconds=300), False),  # waiting for a disk is idle
    (Activity("callbacks", 7, 300, idle_seconds=300), False),
    (Activity("callbacks", 7, 501), True),
]


@pytest.mark.parametrize("activity, expected", ACTIVITIES)
def test_time_limit_of_activities(activity, expected):
    assert is_over(activity, 0.0, STALL) is expected


@pytest.mark.parametrize("kind", KINDS)
def test_activities_survive_serialization(kind):
    activity = Activity(kind, 3, 1.5, 0.5, 2.5, 0.3, "the barrier for rank 1", 1.2, True)
    assert Activity(**activity.as_json()) == activity
    assert "3" in str(activity)


def watch_until(seconds, activities, silent=(), size=3, begin=0.0):
    """Return the first verdict on ranks with constant activities, and its time in seconds."""
    watch = Watch(range(size), STALL, begin)
    for now in range(int(begin) + 1, int(begin + seconds) + 1):
        for rank in range(size):
            if rank not in silent or now <= begin + 2:
                activity = activities[rank]
                current = dataclasses.replace(activity, seconds=now - begin)
                if activity.waits_in:
                    current = dataclasses.replace(current, waited=now - begin)
                watch.record_message(rank, now, current)
        verdict = watch.verdict(now)
        if verdict is not None:
            return verdict, now - begin
    return None, seconds


def test_frozen_rank_is_named_within_30_seconds():
    verdict, seconds = watch_until(60, [step()] * 3, silent=[1])
    assert verdict.ranks == (1,) and seconds < 30
    assert "no heartbeat" in verdict.cause and "step 7" in verdict.cause


def test_all_ranks_of_a_disconnected_host_are_named():
    verdict, _ = watch_until(60, [step()] * 3, silent=[1, 2])
    assert verdict.ranks == (1, 2)


def waiting(kind, is_guess=False):
    """Return the activity of a rank that waits, or that only seems to wait if `is_guess`."""
    waits_in = "a function" if is_guess else f"a collective of {kind}"
    return Activity(kind, 7, waits_in=waits_in, is_guess=is_guess)


# Case -> (activities of all ranks during a stall, ranks at fault).
STALLS = {
    "unequal steps": ([step(8), step(7), step(8)], (1,)),
    "one is somewhere else": ([step(7), step(7), waiting("callbacks")], (2,)),
    "they wait for each other": ([waiting("outside"), waiting("saving"), waiting("outside")], ()),
    "a script's own function": ([waiting("outside"), *[waiting("outside", True)] * 2], ()),
    "the same step, different calls": ([step(7)] * 3, ()),
    "one has compiled nothing": ([Activity("compiling", 1, 0, 99)] * 3, ()),
}


@pytest.mark.parametrize("activities, ranks", STALLS.values(), ids=STALLS)
def test_stall_ends_the_job_and_names_the_slowest_ranks(activities, ranks):
    verdict, seconds = watch_until(100, activities)
    assert verdict.ranks == ranks and STALL < seconds < 60


# Activities that may take long.
HEALTHY = {
    "others wait for one that saves": [step(7), step(7), Activity("saving", 7)],
    "others wait for rank 0's callbacks": [Activity("callbacks", 7), step(8), step(8)],
    "all compile": [Activity("compiling", 1)] * 3,
    "all validate": [Activity("validating", 7)] * 3,
    "slow steps": [step(7, longest=100)] * 3,
    "nobody is in fit": [Activity("outside", 7, 0, 999)] * 3,
    "functions of scripts": [waiting("outside", True)] * 3,
    "all wait for one that saves": [waiting("saving"), waiting("saving"), Activity("saving", 7)],
    "all wait for one that reads data": [waiting("outside")] * 2 + [Activity("outside", 7)],
}


@pytest.mark.parametrize("activities", HEALTHY.values(), ids=HEALTHY)
def test_no_false_alarm(activities):
    assert watch_until(300, activities) == (None, 300)


def test_idle_program_is_not_stopped():
    assert watch_until(5000, [Activity("outside")] * 3)[0] is None


def test_lost_rank_is_named_immediately():
    watch = Watch(range(2), STALL, 0.0)
    watch.record_message(1, 0.5, step(5))
    watch.record_disconnect(1)
    verdict = watch.verdict(1.0)
    assert verdict.ranks == (1,) and "ended in step 5" in verdict.cause and not verdict.waits
    watch.record_exit(0, "an error that came of it")
    assert watch.verdict(2.0) is verdict, "the first verdict is final"


def test_lost_rank_is_reported_in_the_newest_step():
    """The last heartbeat may be many short steps old."""
    watch = Watch(range(2), STALL, 0.0)
    watch.record_message(1, 0.5, Activity("callbacks", 101))
    watch.record_disconnect(1, 110)
    assert "ended in step 110: " in watch.verdict(1.0).cause


def test_failed_rank_reports_its_error():
    watch = Watch(range(2), STALL, 0.0)
    watch.record_message(1, 0.5, step(5))
    watch.record_exit(1, "ValueError: no such column")
    watch.record_disconnect(1)  # the connection ends with the process
    verdict = watch.verdict(1.0)
    assert verdict == Verdict((1,), "failed in step 5: ValueError: no such column", waits=True)


def test_rank_that_left_is_not_reported():
    watch = Watch(range(2), STALL, 0.0)
    watch.record_exit(1)
    watch.record_disconnect(1)
    for now in range(1, 200):
        watch.record_message(0, now, Activity("callbacks", 9, now))
        assert watch.verdict(now) is None


def test_waiting_for_a_rank_that_left_ends_the_job():
    watch = Watch(range(2), STALL, 0.0)
    watch.record_message(1, 0.5, Activity("outside", 6))
    watch.record_exit(1)
    for now in range(1, 60):
        watch.record_message(0, now, step(7, now))
        verdict = watch.verdict(now)
    assert verdict.ranks == (1,) and "left the job while others wait" in verdict.cause


def test_deadlock_is_reported_with_the_wait_of_each_rank():
    waits = [("an all-gather for rank 1", 60), ("the barrier for rank 0", 55)]
    verdict = stalled(
        {rank: Activity("outside", 3, 99, 0, 0, 0, *wait) for rank, wait in enumerate(waits)}
    )
    for words in (
        "55 s",
        "rank 0 in code outside of fit, after step 3, waiting in an all-gather for rank 1",
        "rank 1 in code outside of fit, after step 3, waiting in the barrier for rank 0",
    ):
        assert words in verdict.cause


def test_suspended_process_blames_no_rank():
    """All clocks jump if a job is suspended and continued."""
    watch = Watch(range(2), STALL, 0.0)
    assert watch.verdict(1.0) is None
    assert watch.verdict(4000.0) is None
    assert watch.verdict(4001.0) is None
    for now in range(4002, 4040):
        verdict = watch.verdict(now)
    assert verdict is not None, "the watchdog must continue after a suspension"


def test_verdict_names_hosts():
    hosts = ["a", "a", "b", "b"]
    assert describe_verdict(Verdict((2,), "ended"), hosts) == "rank 2 on host b: ended"
    assert describe_verdict(Verdict((0, 3), "ended"), hosts) == "ranks 0, 3 on hosts a, b: ended"
    assert describe_verdict(Verdict((), "no rank made progress"), hosts) == "no rank made progress"
    many = describe_verdict(
        Verdict(tuple(range(1000)), "ended"), [f"host{rank}" for rank in range(1000)]
    )
    assert len(many) < 100


def test_verdict_describes_the_activity_of_stalled_ranks():
    verdict = stalled({0: step(8, 60), 1: Activity("callbacks", 7, 600)})
    assert "callbacks after step 7" in verdict.cause and "rank 0 is in step 8" in verdict.cause


@pytest.mark.parametrize("argument, environment, expected", [
    (None, None, 50.0), (None, "120", 120.0), (0, "120", 0.0), (30, None, 30.0), (None, "0", 0.0),
])  # fmt: skip
@pytest.mark.tensorflow
def test_stall_seconds_follow_argument_and_environment(
    argument, environment, expected, monkeypatch
):
    from dtransformer.parallel.initialize import resolve_stall_seconds

    monkeypatch.delenv("DTRANSFORMER_STALL_SECONDS", raising=False)
    if environment is not None:
        monkeypatch.setenv("DTRANSFORMER_STALL_SECONDS", environment)
    assert resolve_stall_seconds(argument) == expected


@pytest.mark.parametrize("argument, environment", [
    (-1, ""), (3, ""), (float("nan"), ""), (True, ""), ([], ""), (None, "soon"), (None, "inf"),
])  # fmt: skip
@pytest.mark.tensorflow
def test_invalid_stall_seconds_raise_an_error(argument, environment, monkeypatch):
    from dtransformer.parallel.initialize import resolve_stall_seconds

    monkeypatch.setenv("DTRANSFORMER_STALL_SECONDS", environment)
    with pytest.raises(ValueError, match="stall_seconds"):
        resolve_stall_seconds(argument)


# Case -> (step seconds of all ranks for each look, named ranks in order).
STRAGGLERS = {
    "half as fast": ([[0.2, 0.2, 0.4]] * 10, [2]),
    "of two": ([[0.41, 0.2]] * 10, [0]),
    "once more after it was well": ([[0.2, 0.4]] * 5 + [[0.2, 0.2]] + [[0.2, 0.4]] * 5, [1, 1]),
    "a moment": ([[0.2, 0.4], [0.2, 0.4], [0.2, 0.2]] * 4, []),
    "now this one, now that": ([[0.2, 0.4], [0.4, 0.2]] * 6, []),
    "a little": ([[0.2, 0.27]] * 10, []),
    "quick steps": ([[0.001, 0.004]] * 10, []),
    "not known": ([[0.0, 0.4]] * 10, []),
    "all alike": ([[0.4, 0.4, 0.4]] * 10, []),
}


@pytest.mark.parametrize("looks, expected", STRAGGLERS.values(), ids=STRAGGLERS)
def test_straggler_is_named(looks, expected):
    stragglers = Stragglers()
    result = [stragglers.check(dict(enumerate(seconds))) for seconds in looks]
    assert [item[0] for item in result if item] == expected
