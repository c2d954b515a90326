"""Promise: a rank tells what it does, and in what it waits."""

import contextlib
import threading
import time

import pytest

from dtransformer.parallel.watchdog.activity_tracker import ActivityTracker


def test_the_outer_wait_is_told_with_those_who_are_waited_for():
    recorder = ActivityTracker()
    with recorder.doing("validating"), recorder.waiting("the barrier", [1, 2]):
        with recorder.waiting("an all-reduce", [1]):
            told = recorder.activity()
    assert str(told).endswith("step 0, waiting in the barrier for ranks 1, 2")
    assert recorder.activity().waits_in == ""


@pytest.mark.parametrize("kind, expected", [("saving", "written for rank 1"), ("step", "")])
def test_a_rank_that_saves_waits_in_what_its_thread_waits_in(kind, expected):
    """While it trains, a thread that writes a checkpoint may wait for as long as it likes."""
    recorder, enters, leaves = ActivityTracker(), threading.Event(), threading.Event()

    def write():
        with recorder.waiting("written", [1]):
            enters.set()
            leaves.wait(10)

    thread = threading.Thread(target=write)
    thread.start()
    enters.wait(10)
    with recorder.doing(kind):
        assert recorder.activity().waits_in == expected
    leaves.set()
    thread.join()


def test_an_error_ends_a_wait():
    recorder = ActivityTracker()
    with pytest.raises(OSError), recorder.waiting("the barrier", [1]):
        raise OSError
    assert recorder.activity().waits_in == ""


@pytest.mark.parametrize("is_told", [True, False])
def test_a_thread_that_asks_all_the_time_is_no_work(is_told):
    """Horovod's may take a quarter of a core on a busy machine, while its rank waits for others."""
    recorder, ends = ActivityTracker(), threading.Event()

    def ask():
        while not ends.wait(1e-3):
            sum(range(10_000))

    with recorder.polling_threads() if is_told else contextlib.nullcontext():
        thread = threading.Thread(target=ask)
        thread.start()
    idle = []
    for _ in range(3):
        time.sleep(0.55)
        idle.append(recorder.activity().idle_seconds)
    ends.set()
    thread.join()
    assert (idle[-1] > 1.0) == is_told, idle
