"""The activity tracker reports a rank's activity and its current wait."""

import contextlib
import threading
import time

import pytest

from dtransformer.parallel.watchdog.activity_tracker import ActivityTracker


def test_outer_wait_is_reported_with_its_ranks():
    recorder = ActivityTracker()
    with recorder.record_activity("validating"), recorder.record_wait("the barrier", [1, 2]):
        with recorder.record_wait("an all-reduce", [1]):
            message = recorder.activity()
    assert str(message).endswith("step 0, waiting in the barrier for ranks 1, 2")
    assert recorder.activity().waits_in == ""


@pytest.mark.parametrize("kind, expected", [("saving", "written for rank 1"), ("step", "")])
def test_saving_rank_reports_the_wait_of_its_writer_thread(kind, expected):
    """During training, the wait of a checkpoint's writer thread does not count."""
    tracker, enters, leaves = ActivityTracker(), threading.Event(), threading.Event()

    def write():
        with tracker.record_wait("written", [1]):
            enters.set()
            leaves.wait(10)

    thread = threading.Thread(target=write)
    thread.start()
    enters.wait(10)
    with tracker.record_activity(kind):
        assert tracker.activity().waits_in == expected
    leaves.set()
    thread.join()


def test_exception_ends_a_wait():
    tracker = ActivityTracker()
    with pytest.raises(OSError), tracker.record_wait("the barrier", [1]):
        raise OSError
    assert tracker.activity().waits_in == ""


@pytest.mark.parametrize("is_declared", [True, False])
def test_polling_threads_do_not_count_as_work(is_declared):
    """Horovod's polling may use a quarter of a core while its rank waits for others."""
    tracker, ends = ActivityTracker(), threading.Event()

    def poll():
        while not ends.wait(1e-3):
            sum(range(10_000))

    with tracker.polling_threads() if is_declared else contextlib.nullcontext():
        thread = threading.Thread(target=poll)
        thread.start()
    idle = []
    for _ in range(3):
        time.sleep(0.55)
        idle.append(tracker.activity().idle_seconds)
    ends.set()
    thread.join()
    assert (idle[-1] > 1.0) == is_declared, idle
