"""Send and receive between pipeline stages in the background."""

import concurrent.futures
import threading
import time

import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.collectives import transport
from dtransformer.parallel.runtime import job


class _Waited(concurrent.futures.Future):
    """Future that reports its waiting thread to the watchdog."""

    def __init__(self, description, rank):
        super().__init__()
        self._description = description
        self._rank = rank

    def result(self, timeout=None):
        """Wait for the result and report the wait."""
        with job.record_wait(self._description, [self._rank]):
            return super().result(timeout)


def peers() -> "PeerToPeer":
    """Return the object for sends and receives. This is the only place that selects its class."""
    return PeerToPeer()


class PeerToPeer:
    """Sender and receiver of lists of tensors.

    Each transfer is a broadcast between two ranks, paired by name, in a separate thread. Therefore
    no order of sends and receives can deadlock, and no transfer keeps a failed rank alive.

    Attributes:
        ended: Dict that maps the names of transfers to their end times in seconds.
    """

    def __init__(self):
        self.ended = {}
        self._functions = {}

    def send(self, tensors: list[tf.Tensor], peer: int, name: str) -> concurrent.futures.Future:
        """Start to send tensors and return a future, which does not keep the tensors.

        Args:
            tensors: List of tensors.
            peer: Integer. Index of the receiving stage.
            name: String, identical on both stages and unique among pending transfers.
        """
        return self._start(tensors, peer, True, name)

    def receive(self, specs: list[tuple], peer: int, name: str) -> concurrent.futures.Future:
        """Start to receive tensors of known shapes and return a future with the list.

        Args:
            specs: List of `(shape, dtype)` tuples.
            peer: Integer. Index of the sending stage.
            name: See `send`.
        """
        return self._start([tf.zeros(shape, dtype) for shape, dtype in specs], peer, False, name)

    def _start(self, tensors, peer, sends, name):
        # Horovod takes an operation's name from its graph, and eager operations of a kind share it.
        key = sends, name
        if key not in self._functions:
            function = tf.function(
                lambda tensors: _broadcast(tensors, peer, sends, name),
                reduce_retracing=True,
                autograph=False,
            )
            self._functions[key] = _compat.expect_many_traces(function)
        future = _Waited(f"send/recv {name!r}", _get_rank(peer))
        threading.Thread(target=self._run, args=(future, key, tensors), daemon=True).start()
        return future

    def _run(self, future, key, tensors):
        sends, name = key
        try:
            results = self._functions[key](tensors)
        except BaseException as error:
            future.set_exception(error)
        else:
            self.ended[name] = time.time()
            future.set_result(None if sends else results)


def _get_rank(stage):
    """Return the rank of another stage in this pipeline."""
    return job.pipeline_group().ranks[stage]


def _broadcast(tensors, peer, sends, name):
    """Broadcast tensors between this rank and the peer stage's rank."""
    pair = job.known_group(sorted((job.rank(), _get_rank(peer))))
    root = pair.index if sends else 1 - pair.index
    return transport.broadcast_together(tensors, root, pair, name)
