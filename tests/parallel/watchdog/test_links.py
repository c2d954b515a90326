"""Watchdogs exchange the state of ranks over authenticated connections.

The watchdogs of several ranks run in this process and connect through the loopback interface.
"""

import contextlib
import json
import queue
import socket
import threading
import time

import pytest

from dtransformer.parallel.watchdog.activity import Activity
from dtransformer.parallel.watchdog.links import Hub, Member, Seals, new_token
from dtransformer.parallel.watchdog.stop_barrier import Agreement, StopBarriers
from dtransformer.parallel.watchdog.thread import Watchdog

TOKEN = new_token()
HOSTS = ["one", "one", "two"]


class FakeTracker:
    """Activity tracker that reports a fixed activity."""

    def __init__(self):
        self.now = Activity("step", 4)

    def activity(self):
        return self.now


class Job:
    """Watchdogs of three ranks.

    Attributes:
        ended: Queue of `(rank, message)` pairs of the ranks that ended.
    """

    def __init__(self, stall_seconds):
        listener = socket.create_server(("127.0.0.1", 0))
        self.address, self.ended = listener.getsockname(), queue.Queue()
        self.doing, self.gates = [FakeTracker() for _ in HOSTS], [StopBarriers() for _ in HOSTS]
        self.watchdogs = [self._start(0, Hub(listener, TOKEN, len(HOSTS)), stall_seconds)]
        self.links = [None]
        for rank in (1, 2):
            self.links.append(Member(self.address, TOKEN, rank, 10))
            self.watchdogs.append(self._start(rank, self.links[rank], stall_seconds))

    def _start(self, rank, link, stall_seconds):
        end = lambda words, seconds: self.ended.put((rank, words))
        doing, gates = self.doing[rank], self.gates[rank]
        return Watchdog(rank, HOSTS, link, stall_seconds, doing, gates, end)

    def wait_for_heartbeats(self):
        """Wait until rank 0 has received a heartbeat of every rank, and every rank one of rank 0."""
        states = [state for dog in self.watchdogs for state in dog._watch._ranks.values()]
        end = time.monotonic() + 30
        while any(state.activity.step != 4 for state in states):
            assert time.monotonic() < end
            time.sleep(0.01)

    def last_words(self, count):
        return dict(self.ended.get(timeout=30) for _ in range(count))


@pytest.fixture
def job(request):
    job = Job(getattr(request, "param", 50))
    job.wait_for_heartbeats()
    yield job
    for watchdog in reversed(job.watchdogs):
        watchdog.leave()


def test_regular_exit_reports_no_failure(job):
    for watchdog in job.watchdogs:
        watchdog.leave()
    assert job.ended.empty()


def disconnect(link):
    """Close a connection, as the kernel does for a killed process."""
    link._links_by_rank[0].connection.shutdown(socket.SHUT_RDWR)


def test_killed_rank_ends_the_others_with_its_name(job):
    disconnect(job.links[2])
    messages = job.last_words(3)  # rank 2 still runs and loses rank 0
    for rank in (0, 1):
        assert "rank 2 on host two: ended in" in messages[rank], messages
        assert f"rank {rank} on host one was in step 4" in messages[rank]
    assert "rank 0 on host one: ended in step 4" in messages[2]
    _, _, stacks = messages[0].rpartition(": ")
    with open(stacks) as file:
        text = file.read()
    assert "rank 2 on host two" in text and "in test_killed_rank_ends" in text


@pytest.mark.parametrize("job", [10], indirect=True)
def test_silent_rank_ends_the_job_on_every_rank(job):
    """The rank is frozen, or its heartbeats are lost although it receives others."""
    job.links[1].send = lambda rank, value: None
    messages = job.last_words(3)
    assert sorted(messages) == [0, 1, 2]
    for message in messages.values():
        assert "rank 1 on host one: no heartbeat for" in message


@pytest.mark.parametrize("job", [10], indirect=True)
def test_stall_ends_the_job_on_every_rank(job):
    for tracker in job.doing:
        tracker.now = Activity("step", 5, seconds=20)
    job.doing[2].now = Activity("callbacks", 4, seconds=100)
    messages = job.last_words(3)
    for message in messages.values():
        assert (
            "rank 2 on host two: blocked the job" in message and "callbacks after step 4" in message
        )


def test_failed_rank_reports_its_error_itself(job):
    """The other ranks wait until horovodrun has printed the error, and then end."""
    job.watchdogs[1].leave("ValueError: no such column")
    messages = job.last_words(2)
    assert "rank 1 on host one: failed in" in messages[0] and "no such column" in messages[2]


def test_messages_of_strangers_are_ignored(job):
    """No message of a stranger marks a rank as lost or stops a job."""
    stop = Seals("another token", 1, "rank").seal({"stop": True})
    same_token = Seals(TOKEN, 1, "rank").seal({"stop": True})  # equals a line of rank 1
    lines = (b"0", b"3", b"[" * 5000, b"9" * 5000, b"1\n" + stop, b"1\n" + same_token, b"2\n{}")
    for data in (b"", b"\n", b"\xff" * 100, b"x" * 100_000, *(line + b"\n" for line in lines)):
        with contextlib.suppress(OSError), socket.create_connection(job.address) as stranger:
            stranger.sendall(data)
            stranger.settimeout(5)
            while stranger.recv(4096):  # until the hub closes the connection
                if data in (b"", b"\n"):
                    break
    assert job.ended.empty()
    assert all(gates["fit"].passes() for gates in job.gates)


def test_seals_reject_changed_and_repeated_lines():
    sender, receiver = Seals(TOKEN, 1, "rank"), Seals(TOKEN, 1, "rank")
    first = sender.seal({"beat": None}).rstrip()
    assert receiver.open(first) == {"beat": None}
    for line in (first, sender.seal({"x": 1}).rstrip().replace(b"1}", b"2}"), b"", b"x y"):
        with pytest.raises(ValueError, match="seal"):
            receiver.open(line)
    assert json.dumps(TOKEN).encode() not in first


# Stop barriers.


def test_ranks_stop_at_the_same_barrier(job):
    """Ranks pass barriers at full speed and stay within one step of each other."""
    passed, asks = [0] * len(HOSTS), threading.Event()
    together = threading.Barrier(len(HOSTS))

    def train(rank):
        while job.gates[rank]["fit"].passes():
            passed[rank] += 1
            together.wait(10)  # stands for the collectives of a step
            if rank == 2 and passed[rank] == 20:
                job.watchdogs[2].ask_to_stop("fit")
                asks.set()

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(len(HOSTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert asks.is_set()
    assert passed[0] >= 20 and passed == [passed[0]] * len(HOSTS)
    assert job.gates[0]["leave"].passes(), "barriers of another purpose stay open"


@pytest.mark.parametrize("answers, expected", [
    ([(0, 5), (1, 5), (2, 5)], 5),
    ([(2, 6), (0, 5), (1, 6)], 6),
    ([(1, 5), (2, None), (0, 4)], 5),
])  # fmt: skip
def test_ranks_stop_after_the_largest_answer(answers, expected):
    agreement = Agreement(range(3))
    results = [agreement.answer(*answer) for answer in answers]
    assert results == [None, None, expected]
    assert agreement.answer(0, 9) is None, "the agreement is final"
