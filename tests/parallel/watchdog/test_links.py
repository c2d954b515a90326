"""Promise: ranks exchange messages over authenticated connections.

The watchdogs of several ranks run in this process here, with connections of the loopback.
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


class Doing:
    """The activity that a rank reports."""

    def __init__(self):
        self.now = Activity("step", 4)

    def activity(self):
        return self.now


class Job:
    """Watchdogs of ranks; `ended` has pairs of a rank and its last words."""

    def __init__(self, stall_seconds):
        listener = socket.create_server(("127.0.0.1", 0))
        self.address, self.ended = listener.getsockname(), queue.Queue()
        self.doing, self.gates = [Doing() for _ in HOSTS], [StopBarriers() for _ in HOSTS]
        self.watchdogs = [self._start(0, Hub(listener, TOKEN, len(HOSTS)), stall_seconds)]
        self.links = [None]
        for rank in (1, 2):
            self.links.append(Member(self.address, TOKEN, rank, 10))
            self.watchdogs.append(self._start(rank, self.links[rank], stall_seconds))

    def _start(self, rank, link, stall_seconds):
        end = lambda words, seconds: self.ended.put((rank, words))
        doing, gates = self.doing[rank], self.gates[rank]
        return Watchdog(rank, HOSTS, link, stall_seconds, doing, gates, end)

    def wait_until_known(self):
        """Wait until rank 0 has heard all, and all have heard rank 0."""
        known = [one for dog in self.watchdogs for one in dog._watch._ranks.values()]
        end = time.monotonic() + 30
        while any(one.activity.step != 4 for one in known):
            assert time.monotonic() < end
            time.sleep(0.01)

    def final_message(self, number):
        return dict(self.ended.get(timeout=30) for _ in range(number))


@pytest.fixture
def job(request):
    job = Job(getattr(request, "param", 50))
    job.wait_until_known()
    yield job
    for watchdog in reversed(job.watchdogs):
        watchdog.leave()


def test_a_job_that_is_left_in_good_order_ends_without_a_word(job):
    for watchdog in job.watchdogs:
        watchdog.leave()
    assert job.ended.empty()


def cut(link):
    """End a connection, as the kernel does for a process that is killed."""
    link._links_by_rank[0].connection.shutdown(socket.SHUT_RDWR)


def test_a_rank_that_is_killed_ends_all_others_with_its_name(job):
    cut(job.links[2])
    told = job.final_message(3)  # it is not dead here, and loses rank 0
    for rank in (0, 1):
        assert "rank 2 on host two: ended in" in told[rank], told
        assert f"rank {rank} on host one was in step 4" in told[rank]
    assert "rank 0 on host one: ended in step 4" in told[2]
    _, _, stacks = told[0].rpartition(": ")
    with open(stacks) as file:
        text = file.read()
    assert "rank 2 on host two" in text and "in test_a_rank_that_is_killed" in text


@pytest.mark.parametrize("job", [10], indirect=True)
def test_a_rank_that_is_silent_ends_the_job_on_every_rank(job):
    """Frozen, or nothing of it comes through, though it hears the others."""
    job.links[1].send = lambda rank, value: None
    told = job.final_message(3)
    assert sorted(told) == [0, 1, 2]
    for words in told.values():
        assert "rank 1 on host one: no heartbeat for" in words


@pytest.mark.parametrize("job", [10], indirect=True)
def test_a_stall_ends_the_job_on_every_rank(job):
    for doing in job.doing:
        doing.now = Activity("step", 5, seconds=20)
    job.doing[2].now = Activity("callbacks", 4, seconds=100)
    told = job.final_message(3)
    for words in told.values():
        assert "rank 2 on host two: blocked the job" in words and "callbacks after step 4" in words


def test_a_rank_that_fails_says_it_itself(job):
    """The others wait for its own words, which horovodrun prints, and end then."""
    job.watchdogs[1].leave("ValueError: no such column")
    told = job.final_message(2)
    assert "rank 1 on host one: failed in" in told[0] and "no such column" in told[2]


def test_strangers_are_not_heard(job):
    """No message makes a rank count as lost, or asks it to stop."""
    stop = Seals("another token", 1, "rank").seal({"stop": True})
    again = Seals(TOKEN, 1, "rank").seal({"stop": True})  # as the rank that is there would send it
    lines = (b"0", b"3", b"[" * 5000, b"9" * 5000, b"1\n" + stop, b"1\n" + again, b"2\n{}")
    for data in (b"", b"\n", b"\xff" * 100, b"x" * 100_000, *(line + b"\n" for line in lines)):
        with contextlib.suppress(OSError), socket.create_connection(job.address) as stranger:
            stranger.sendall(data)
            stranger.settimeout(1)
            while stranger.recv(4096):  # until it is closed, or says no more
                if data in (b"", b"\n"):
                    break
    assert job.ended.empty()
    assert all(gates["fit"].passes() for gates in job.gates)


def test_lines_can_neither_be_changed_nor_sent_again():
    sender, receiver = Seals(TOKEN, 1, "rank"), Seals(TOKEN, 1, "rank")
    first = sender.seal({"beat": None}).rstrip()
    assert receiver.open(first) == {"beat": None}
    for line in (first, sender.seal({"x": 1}).rstrip().replace(b"1}", b"2}"), b"", b"x y"):
        with pytest.raises(ValueError, match="seal"):
            receiver.open(line)
    assert json.dumps(TOKEN).encode() not in first


# Where all stop together.


def test_ranks_stop_at_the_same_gate(job):
    """Each passes gates as fast as it can, and none waits for another, but at a gate."""
    passed, asks = [0] * len(HOSTS), threading.Event()
    together = threading.Barrier(len(HOSTS))

    def train(rank):
        while job.gates[rank]["fit"].passes():
            passed[rank] += 1
            together.wait(10)  # a step: nobody is ahead of another by more than one
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
    assert job.gates[0]["leave"].passes(), "those of another purpose stay open"


@pytest.mark.parametrize("answers, expected", [
    ([(0, 5), (1, 5), (2, 5)], 5),
    ([(2, 6), (0, 5), (1, 6)], 6),
    ([(1, 5), (2, None), (0, 4)], 5),
])  # fmt: skip
def test_the_last_gate_is_the_greatest_of_all_answers(answers, expected):
    agreement = Agreement(range(3))
    results = [agreement.answer(*answer) for answer in answers]
    assert results == [None, None, expected]
    assert agreement.answer(0, 9) is None, "it is settled"
