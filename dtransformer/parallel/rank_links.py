"""Connections between ranks of a pipeline or of a mesh, on CPUs, between two ranks each.

Two ranks of one host have a socket of the host's (AF_UNIX), which takes a third of TCP's time.

They carry what passes between stages, and the few numbers that ranks tell each other in every step.
On CPUs Horovod, which serves on GPUs, looks for what is to be sent at intervals, agrees on it with
all ranks, and takes the cores from what is computed meanwhile. Here a thread of the sender gives
what is sent to the kernel at once, and one of the receiver takes it from there. Two ranks know each
other by the job's random token; what they send is not secret.
"""

import collections
import concurrent.futures
import contextlib
import hashlib
import hmac
import json
import queue
import selectors
import socket
import struct
import threading
import time
import types
from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from dtransformer.parallel.json_exchange import exchange_json
from dtransformer.parallel.watchdog.address import own_address, own_host
from dtransformer.parallel.watchdog.sealed import new_token
from dtransformer.tensor_memory import as_tensor, empty

_SECONDS_TO_CONNECT, _SECONDS_TO_GREET = 60.0, 5.0
_SECONDS_FOR_THE_WATCHDOG = 10.0  # to name the rank at fault, before this one tells of its loss
_HEAD = struct.Struct("!I")  # bytes of the description that follows
_GREETING, _PROOF = 8 + 64, 32  # bytes: a rank and a random number; what only the job can make


class RankLinks:
    """This rank's connections to those of its pipeline and of its mesh.

    Args:
        connections: dict of the number of a rank and a connected socket.
    """

    def __init__(self, connections: dict[int, socket.socket]):
        self._links = {rank: _Link(connection, rank) for rank, connection in connections.items()}

    def join(self, ranks: Iterable[int]) -> bool:
        """Return whether all of several ranks, of which this is one, have connections."""
        return len(self._links.keys() & set(ranks)) == len(set(ranks)) - 1 > 0

    def send(self, tensors: list[tf.Tensor], rank: int, name: str) -> concurrent.futures.Future:
        """Start to send tensors to a rank; return a future of None.

        Args:
            tensors: list of tensors.
            rank: number of the rank.
            name: by which the other rank receives them.
        """
        return self._links[rank].send(tensors, name)

    def receive(self, rank: int, name: str) -> concurrent.futures.Future:
        """Return a future of the list of tensors that a rank sends by a name.

        Those of the same name come in the order in which they were sent.
        """
        return self._links[rank].receive(name)

    def all_gather(self, x: tf.Tensor, ranks: tuple[int, ...], name: str) -> list[tf.Tensor]:
        """Return the tensors of some ranks that are linked to each other, in the order given.

        Args:
            x: this rank's tensor; shapes may differ.
            ranks: numbers of the ranks, with this one.
            name: the same on each of them.
        """
        for rank in ranks:
            if rank in self._links:
                self.send([x], rank, name)
        others = {r: self.receive(r, name) for r in ranks if r in self._links}
        return [others[rank].result()[0] if rank in others else x for rank in ranks]

    def close(self) -> None:
        """Close the connections; nothing may be under way."""
        for link in self._links.values():
            link.close()


class _Link:
    """A connection, and the threads that write to and read from it."""

    def __init__(self, connection, rank):
        self._connection, self._rank = connection, rank
        self._lock, self._error, self._is_closed = threading.Lock(), None, False
        self._leaving = queue.SimpleQueue()  # of (future, name, tensors)
        self._arrived = collections.defaultdict(collections.deque)  # name -> lists of tensors
        self._asked = collections.defaultdict(collections.deque)  # name -> futures
        for run in (self._write, self._read):
            threading.Thread(target=run, daemon=True).start()

    def send(self, tensors, name):
        future = concurrent.futures.Future()
        self._leaving.put((future, name, tensors))
        return future

    def receive(self, name):
        future = concurrent.futures.Future()
        with self._lock:
            if self._arrived[name]:
                future.set_result(self._arrived[name].popleft())
            elif self._error is not None:
                future.set_exception(self._error)
            else:
                self._asked[name].append(future)
        return future

    def close(self):
        self._is_closed = True
        self._leaving.put(None)
        with contextlib.suppress(OSError):  # the other end has closed it
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    # Each message has a call of its own, after which nothing keeps its tensors.

    def _write(self):
        while self._write_one(self._leaving.get()):
            pass

    def _write_one(self, one):
        if one is None:
            return False
        future, name, tensors = one
        try:
            arrays = [x.numpy() for x in tensors]
            specs = [[x.dtype.name, list(x.shape)] for x in arrays]
            described = json.dumps([name, specs]).encode()
            self._connection.sendall(_HEAD.pack(len(described)) + described)
            for array in arrays:
                self._connection.sendall(_bytes_of(np.ascontiguousarray(array)))
        except OSError as error:
            time.sleep(_SECONDS_FOR_THE_WATCHDOG)
            future.set_exception(self._lost(error))
        except BaseException as error:  # what was computed has failed
            future.set_exception(error)
        else:
            future.set_result(None)
        return True

    def _read(self):
        try:
            while True:
                self._read_one()
        except Exception as error:
            self._lose(error)

    def _read_one(self):
        (length,) = _HEAD.unpack(_read_bytes(self._connection, _HEAD.size))
        name, specs = json.loads(bytes(_read_bytes(self._connection, length)))
        tensors = [self._read_tensor(*spec) for spec in specs]
        with self._lock:
            asked = self._asked[name].popleft() if self._asked[name] else None
            if asked is None:
                self._arrived[name].append(tensors)
        if asked is not None:
            asked.set_result(tensors)

    def _read_tensor(self, dtype, shape):
        array = empty(shape, tf.as_dtype(dtype).as_numpy_dtype)
        _read_into(self._connection, _bytes_of(array))
        return as_tensor(array)

    def _lose(self, error):
        if self._is_closed:
            return
        time.sleep(_SECONDS_FOR_THE_WATCHDOG)
        with self._lock:
            self._error = self._lost(error)
            asked = [future for futures in self._asked.values() for future in futures]
            self._asked.clear()
        for future in asked:
            future.set_exception(self._error)

    def _lost(self, error):
        return RuntimeError(
            f"the connection to rank {self._rank}, of this pipeline or mesh, is lost ({error}): "
            "that rank has ended, or the network between; see what it has printed"
        )


def connect_ranks(hvd: types.ModuleType, pairs: Iterable[tuple[int, int]]) -> RankLinks:
    """Return this rank's connections. Every rank of the job has to call.

    Args:
        hvd: the module `horovod.tensorflow`, started.
        pairs: pairs of ranks that send each other something; each once.

    Raises:
        RuntimeError: a rank cannot be reached.
    """
    rank, host = hvd.rank(), own_address(is_local=hvd.local_size() == hvd.size())
    peers = {other for pair in pairs if rank in pair for other in pair} - {rank}
    backlog = len(peers) + 64
    by_tcp = socket.create_server((host, 0), backlog=backlog)
    with by_tcp, socket.socket(socket.AF_UNIX) as within_host:
        within_host.bind(f"\0dtransformer-{new_token()}")  # a name of no file, which ends with it
        within_host.listen(backlog)
        own = {
            "address": by_tcp.getsockname()[:2],
            "host": own_host(),
            "name": within_host.getsockname().decode(),
            "token": new_token(),
        }
        gather = lambda text: hvd.allgather(text, name="dtransformer.links")
        everyone = exchange_json(own, gather)
        token, connections = everyone[0]["token"].encode(), {}
        lower = {peer for peer in peers if peer < rank}  # they connect, and this rank listens
        for peer in sorted(peers - lower):
            address = everyone[peer]["address"]
            try:
                connection = _connected(everyone[peer])
                _greeted(connection, token, rank, {peer}, _SECONDS_TO_CONNECT)
            except OSError as error:
                raise RuntimeError(
                    f"rank {rank} cannot reach rank {peer}, of its pipeline or mesh, at "
                    f"{address[0]}:{address[1]} ({error}): let the hosts of the job reach each other "
                    "at any port"
                ) from None
            connections[peer] = connection
        connections |= _accepted([by_tcp, within_host], token, rank, lower)
    for connection in connections.values():
        connection.settimeout(None)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return RankLinks(connections)


def _connected(peer):
    """Return a connection to a rank: within the host where it is on this one."""
    if peer["host"] == own_host():
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(peer["name"])
        except OSError:  # hosts of one name, or containers that share no network
            connection.close()
        else:
            return connection
    return socket.create_connection(tuple(peer["address"]), _SECONDS_TO_CONNECT)


def _accepted(listeners, token, rank, peers):
    """Return a dict of ranks and the connections that they make; those of strangers are closed."""
    end, found = time.monotonic() + _SECONDS_TO_CONNECT, {}
    with selectors.DefaultSelector() as selector:
        for listener in listeners:
            selector.register(listener, selectors.EVENT_READ)
        while missing := peers - set(found):
            ready = selector.select(max(end - time.monotonic(), 0.01))
            if not ready:
                raise RuntimeError(
                    f"rank {rank} is not reached by the ranks {sorted(missing)}, of its pipeline or "
                    f"mesh, within {_SECONDS_TO_CONNECT:.0f} s: let the hosts of the job reach each "
                    "other at any port"
                )
            for key, _ in ready:
                connection, _ = key.fileobj.accept()
                try:
                    number = _greeted(connection, token, rank, missing, _SECONDS_TO_GREET)
                except OSError:
                    connection.close()
                else:
                    found[number] = connection
                    missing -= {number}
    return found


def _greeted(connection, token, rank, peers, seconds):
    """Return which of some ranks is at the other end, which knows the token.

    Raises:
        OSError: none of them is.
    """
    connection.settimeout(seconds)
    own = f"{rank:08d}{new_token()}".encode()
    connection.sendall(own)
    other = bytes(_read_bytes(connection, _GREETING))
    connection.sendall(hmac.digest(token, own + other, hashlib.sha256))
    proof = bytes(_read_bytes(connection, _PROOF))
    number = other[:8].decode("ascii", "replace")
    # Its own rank is never among them: so it cannot be made to greet itself.
    if not hmac.compare_digest(proof, hmac.digest(token, other + own, hashlib.sha256)):
        raise OSError("the other end is no rank of this job")
    if not number.isdecimal() or int(number) not in peers:
        raise OSError(f"the other end is rank {number}, expected one of {sorted(peers)}")
    return int(number)


def _read_bytes(connection, size):
    buffer = bytearray(size)
    _read_into(connection, memoryview(buffer))
    return buffer


def _read_into(connection, buffer):
    """Fill a buffer.

    Raises:
        OSError: the other end has closed.
    """
    while len(buffer):
        count = connection.recv_into(buffer)
        if not count:
            raise ConnectionError("closed by the other end")
        buffer = buffer[count:]


def _bytes_of(array):
    """Return the memory of an array in C order as bytes, without a copy."""
    return memoryview(array.reshape(-1).view("u1"))
