"""Promise: what a stage sends arrives as it is, in order, from a rank of the job and no one else."""

import concurrent.futures
import contextlib
import socket
import threading

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.parallel import rank_links

DTYPES = ("float32", "bfloat16", "float16", "int32", "bool", "float64")


class Job:
    """Ranks that are threads of this process: what `connect_ranks` asks Horovod for."""

    def __init__(self, size):
        self._size, self._own = size, {}
        self._barrier = threading.Barrier(size, timeout=20)
        self._rank = threading.local()

    def rank(self):
        return self._rank.number

    def size(self):
        return self._size

    local_size = size

    def exchange(self, own, _):
        self._own[self.rank()] = own
        self._barrier.wait()
        return [self._own[rank] for rank in range(self._size)]

    def connect(self, pairs):
        """Return the links of every rank."""

        def one(rank):
            self._rank.number = rank
            return rank_links.connect_ranks(self, pairs)

        with concurrent.futures.ThreadPoolExecutor(self._size) as pool:
            return list(pool.map(one, range(self._size)))


@pytest.fixture(params=["one host", "two hosts"])
def make_job(monkeypatch, request):
    def make(size):
        job = Job(size)
        monkeypatch.setattr(rank_links, "exchange_json", job.exchange)
        return job

    if request.param == "two hosts":
        monkeypatch.setattr(rank_links, "own_host", lambda: str(threading.get_ident()))
    monkeypatch.setattr(rank_links, "_SECONDS_FOR_THE_WATCHDOG", 0.0)
    monkeypatch.setattr(rank_links, "_SECONDS_TO_GREET", 0.5)
    return make


def test_tensors_of_every_type_and_shape_arrive_in_order(make_job):
    first, second = make_job(2).connect([(0, 1)])
    rng = np.random.default_rng(0)
    for shape in ((), (0,), (3,), (2, 3, 4), (300, 1000)):
        sent = [tf.cast(rng.normal(size=shape) * 9, dtype) for dtype in DTYPES]
        before = second.receive(0, "before")
        first.send(sent, 1, "before").result(20)
        first.send(sent[::-1], 1, "after").result(20)
        found, later = before.result(20), second.receive(0, "after").result(20)
        for x, y in zip(sent + sent[::-1], found + later, strict=True):
            assert x.dtype == y.dtype and x.shape == y.shape
            assert x.numpy().tobytes() == y.numpy().tobytes()
    for number in range(3):  # as many steps ahead as the sender likes
        first.send([tf.constant(number)], 1, "same")
    assert [int(second.receive(0, "same").result(20)[0]) for _ in range(3)] == [0, 1, 2]
    first.close()
    second.close()


def test_both_directions_and_several_ranks(make_job):
    links = make_job(4).connect([(0, 1), (1, 2), (2, 3), (0, 3)])
    for number in range(4):
        links[number].send([tf.fill([100_000], number)], (number + 1) % 4, "on")
        links[number].send([tf.fill([100_000], number)], (number - 1) % 4, "back")
    for number in range(4):
        others = {"on": (number - 1) % 4, "back": (number + 1) % 4}
        for name, other in others.items():
            (x,) = links[number].receive(other, name).result(20)
            assert set(x.numpy()) == {other}
    for one in links:
        one.close()


def test_a_rank_that_is_gone_is_named(make_job):
    first, second = make_job(2).connect([(0, 1)])
    waiting = second.receive(0, "nothing")
    first.close()
    for future in (waiting, second.receive(0, "later")):
        with pytest.raises(RuntimeError, match="connection to rank 0, .* is lost"):
            future.result(20)


def test_strangers_are_not_let_in(make_job):
    """One that says nothing, one that says what it hears, and one that does not know the token."""
    job, strangers = make_job(2), []

    def listening(hosts, **kwargs):
        listener = create_server(hosts, **kwargs)
        for said in (b"", None, b"00000000" + b"0" * 64 + b"1" * 32):
            stranger = socket.create_connection(listener.getsockname())
            strangers.append((stranger, said))
            threading.Thread(target=speak, args=(stranger, said), daemon=True).start()
        return listener

    def speak(stranger, said):
        with contextlib.suppress(OSError):
            if said is None:
                while data := stranger.recv(1024):
                    stranger.sendall(data)
            else:
                stranger.sendall(said)

    create_server, socket.create_server = socket.create_server, listening
    try:
        first, second = job.connect([(0, 1)])
    finally:
        socket.create_server = create_server
    first.send([tf.constant(7)], 1, "x")
    assert int(second.receive(0, "x").result(20)[0]) == 7
    for stranger, _ in strangers:
        stranger.close()
    first.close()
    second.close()


@pytest.mark.parametrize("make_job", ["two hosts"], indirect=True)
def test_a_rank_that_cannot_be_reached_is_named(make_job, monkeypatch):
    monkeypatch.setattr(rank_links, "_SECONDS_TO_CONNECT", 1.0)
    job = make_job(2)

    def refuse(*args):
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(RuntimeError, match="rank 0 cannot reach rank 1, .* let the hosts"):
        job.connect([(0, 1)])


def test_all_gather_of_some_ranks(make_job):
    links = make_job(3).connect([(0, 1), (0, 2), (1, 2)])
    assert links[0].join((2, 0)) and links[0].join((0, 1, 2))
    assert not links[0].join((0,)) and not links[0].join((0, 1, 3))
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        gather = lambda rank: links[rank].all_gather(tf.fill([rank + 1], rank), (2, 0, 1), "x")
        for found in pool.map(gather, range(3)):
            assert [x.numpy().tolist() for x in found] == [[2, 2, 2], [0], [1, 1]]
    for one in links:
        one.close()
