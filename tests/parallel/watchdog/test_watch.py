"""Promise: a job that stops is judged by who stopped it, and one that goes on is left alone."""

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


def step(number=7, seconds=0.0, **fields):
    return Activity("step", number, seconds, **fields)


# What a rank does, and whether that is too long.
ACTIVITIES = [
    (step(seconds=49), False),
    (step(seconds=51), True),
    (step(seconds=51, longest=20), False),  # steps are that slow here: four times the longest
    (step(seconds=81, longest=20), True),
    (Activity("outside", 7, 300, waits_in="the barrier for rank 1", waited=51), True),
    (Activity("saving", 7, 300, waits_in="the barrier for rank 1", waited=49), False),
    (step(seconds=300, longest=20, waits_in="an all-gather for rank 1", waited=79), False),
    (Activity("compiling", 1, 300), False),
    (Activity("compiling", 1, 300, idle_seconds=51), True),  # compiles nothing
    (Activity("compiling", 1, 1999), False),  # no step has ended: a GPU's driver compiles kernels
    (Activity("compiling", 1, 2001), True),
    (Activity("compiling", 7, 501, longest=20), True),
    (Activity("validating", 7, 300), False),
    (Activity("validating", 7, 300, idle_seconds=51), True),
    (Activity("saving", 7, 300, idle_seconds=300), False),  # a disk takes no cores
    (Activity("callbacks", 7, 300, idle_seconds=300), False),
    (Activity("callbacks", 7, 501), True),
]


@pytest.mark.parametrize("activity, expected", ACTIVITIES)
def test_how_long_an_activity_may_take(activity, expected):
    assert is_over(activity, 0.0, STALL) is expected


@pytest.mark.parametrize("kind", KINDS)
def test_activities_go_from_rank_to_rank(kind):
    activity = Activity(kind, 3, 1.5, 0.5, 2.5, 0.3, "the barrier for rank 1", 1.2, True)
    assert Activity(**activity.as_json()) == activity
    assert "3" in str(activity)


def watch_until(seconds, activities, silent=(), size=3, begin=0.0):
    """Return the first verdict, and when it came, on ranks that do the same all the time."""
    watch = Watch(range(size), STALL, begin)
    for now in range(int(begin) + 1, int(begin + seconds) + 1):
        for rank in range(size):
            if rank not in silent or now <= begin + 2:
                one = activities[rank]
                doing = dataclasses.replace(one, seconds=now - begin)
                if one.waits_in:
                    doing = dataclasses.replace(doing, waited=now - begin)
                watch.heard(rank, now, doing)
        verdict = watch.verdict(now)
        if verdict is not None:
            return verdict, now - begin
    return None, seconds


def test_a_frozen_rank_is_named_within_half_of_the_time():
    verdict, seconds = watch_until(60, [step()] * 3, silent=[1])
    assert verdict.ranks == (1,) and seconds < 30
    assert "no heartbeat" in verdict.cause and "step 7" in verdict.cause


def test_a_host_that_is_cut_off_is_named_with_all_its_ranks():
    verdict, _ = watch_until(60, [step()] * 3, silent=[1, 2])
    assert verdict.ranks == (1, 2)


def waiting(kind, is_guess=False):
    """A rank that waits; it may only look like that."""
    what = "a function" if is_guess else f"a collective of {kind}"
    return Activity(kind, 7, waits_in=what, is_guess=is_guess)


# What the ranks do when nothing goes on -> who is at fault.
STALLS = {
    "unequal steps": ([step(8), step(7), step(8)], (1,)),
    "one is somewhere else": ([step(7), step(7), waiting("callbacks")], (2,)),
    "they wait for each other": ([waiting("outside"), waiting("saving"), waiting("outside")], ()),
    "a script's own function": ([waiting("outside"), *[waiting("outside", True)] * 2], ()),
    "the same step, different calls": ([step(7)] * 3, ()),
    "one has compiled nothing": ([Activity("compiling", 1, 0, 99)] * 3, ()),
}


@pytest.mark.parametrize("activities, ranks", STALLS.values(), ids=STALLS)
def test_a_stall_ends_the_job_and_names_who_is_behind(activities, ranks):
    verdict, seconds = watch_until(100, activities)
    assert verdict.ranks == ranks and STALL < seconds < 60


# What goes on for long, with good reason.
GOES_ON = {
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


@pytest.mark.parametrize("activities", GOES_ON.values(), ids=GOES_ON)
def test_no_false_alarm(activities):
    assert watch_until(300, activities) == (None, 300)


def test_a_program_that_does_nothing_for_days_is_left_alone():
    assert watch_until(5000, [Activity("outside")] * 3)[0] is None


def test_a_rank_that_ends_is_named_at_once():
    watch = Watch(range(2), STALL, 0.0)
    watch.heard(1, 0.5, step(5))
    watch.lost(1)
    verdict = watch.verdict(1.0)
    assert verdict.ranks == (1,) and "ended in step 5" in verdict.cause and not verdict.waits
    watch.left(0, "an error that came of it")
    assert watch.verdict(2.0) is verdict, "the first one stays"


def test_a_rank_that_ends_was_in_the_others_step():
    """What its last heartbeat told is older: by many steps where these are short."""
    watch = Watch(range(2), STALL, 0.0)
    watch.heard(1, 0.5, Activity("callbacks", 101))
    watch.lost(1, 110)
    assert "ended in step 110: " in watch.verdict(1.0).cause


def test_a_rank_that_fails_tells_why():
    watch = Watch(range(2), STALL, 0.0)
    watch.heard(1, 0.5, step(5))
    watch.left(1, "ValueError: no such column")
    watch.lost(1)  # its connection ends with it
    verdict = watch.verdict(1.0)
    assert verdict == Verdict((1,), "failed in step 5: ValueError: no such column", waits=True)


def test_a_rank_that_has_left_is_not_missed():
    watch = Watch(range(2), STALL, 0.0)
    watch.left(1)
    watch.lost(1)
    for now in range(1, 200):
        watch.heard(0, now, Activity("callbacks", 9, now))
        assert watch.verdict(now) is None


def test_ranks_that_wait_for_one_that_has_left_end():
    watch = Watch(range(2), STALL, 0.0)
    watch.heard(1, 0.5, Activity("outside", 6))
    watch.left(1)
    for now in range(1, 60):
        watch.heard(0, now, step(7, now))
        verdict = watch.verdict(now)
    assert verdict.ranks == (1,) and "left the job while others wait" in verdict.cause


def test_ranks_that_wait_for_each_other_are_named_with_what_each_waits_for():
    waits = [("an all-gather for rank 1", 60), ("the barrier for rank 0", 55)]
    cause = stalled({r: Activity("outside", 3, 99, 0, 0, 0, *one) for r, one in enumerate(waits)})
    for words in (
        "55 s",
        "rank 0 in code outside of fit, after step 3, waiting in an all-gather for rank 1",
        "rank 1 in code outside of fit, after step 3, waiting in the barrier for rank 0",
    ):
        assert words in cause.cause


def test_a_process_that_was_stopped_itself_blames_nobody():
    """A job that is suspended and goes on: all clocks jump."""
    watch = Watch(range(2), STALL, 0.0)
    assert watch.verdict(1.0) is None
    assert watch.verdict(4000.0) is None
    assert watch.verdict(4001.0) is None
    for now in range(4002, 4040):
        verdict = watch.verdict(now)
    assert verdict is not None, "and watches on"


def test_the_verdict_names_hosts():
    hosts = ["a", "a", "b", "b"]
    assert describe_verdict(Verdict((2,), "ended"), hosts) == "rank 2 on host b: ended"
    assert describe_verdict(Verdict((0, 3), "ended"), hosts) == "ranks 0, 3 on hosts a, b: ended"
    assert describe_verdict(Verdict((), "no rank made progress"), hosts) == "no rank made progress"
    many = describe_verdict(
        Verdict(tuple(range(1000)), "ended"), [f"host{rank}" for rank in range(1000)]
    )
    assert len(many) < 100


def test_what_a_stalled_rank_did_is_told():
    verdict = stalled({0: step(8, 60), 1: Activity("callbacks", 7, 600)})
    assert "callbacks after step 7" in verdict.cause and "rank 0 is in step 8" in verdict.cause


@pytest.mark.parametrize("given, environment, expected", [
    (None, None, 50.0), (None, "120", 120.0), (0, "120", 0.0), (30, None, 30.0), (None, "0", 0.0),
])  # fmt: skip
@pytest.mark.tensorflow
def test_the_setting(given, environment, expected, monkeypatch):
    from dtransformer.parallel.initialize import resolve_stall_seconds

    monkeypatch.delenv("DTRANSFORMER_STALL_SECONDS", raising=False)
    if environment is not None:
        monkeypatch.setenv("DTRANSFORMER_STALL_SECONDS", environment)
    assert resolve_stall_seconds(given) == expected


@pytest.mark.parametrize("given, environment", [
    (-1, ""), (3, ""), (float("nan"), ""), (True, ""), ([], ""), (None, "soon"), (None, "inf"),
])  # fmt: skip
@pytest.mark.tensorflow
def test_a_setting_that_makes_no_sense_is_refused(given, environment, monkeypatch):
    from dtransformer.parallel.initialize import resolve_stall_seconds

    monkeypatch.setenv("DTRANSFORMER_STALL_SECONDS", environment)
    with pytest.raises(ValueError, match="stall_seconds"):
        resolve_stall_seconds(given)


# Seconds of a step by rank, at each look -> who is named, and how often.
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
def test_a_rank_that_holds_up_the_others_is_named(looks, expected):
    stragglers = Stragglers()
    found = [stragglers.check(dict(enumerate(own))) for own in looks]
    assert [one[0] for one in found if one] == expected
