"""Send and receive between the stages of a pipeline, while the stages compute."""

import concurrent.futures
import threading
import time

import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.collectives import transport
from dtransformer.parallel.runtime import job


class _Waited(concurrent.futures.Future):
    """A future of which the watchdog knows who waits for it, and for whom."""

    def __init__(self, what, rank):
        super().__init__()
        self._what, self._rank = what, rank

    def result(self, timeout=None):
        """As a future's."""
        with job.waiting(self._what, [self._rank]):
            return super().result(timeout)


def peers() -> "PeerToPeer":
    """Return what this rank sends and receives with: the one place that chooses how."""
    return PeerToPeer()


class PeerToPeer:
    """Sends and receives lists of tensors.

    Each is a broadcast between two ranks, which its name pairs, and waits in a thread of its own. So
    no order of sends and receives can stop the job; nor can one keep a rank that fails from ending.

    Attributes:
        ended: dict of the name of a send or a receive and when it was done, in seconds.
    """

    def __init__(self):
        self.ended = {}
        self._functions = {}

    def send(self, tensors: list[tf.Tensor], peer: int, name: str) -> concurrent.futures.Future:
        """Start to send tensors; return a future, which does not keep them.

        Args:
            tensors: list of tensors.
            peer: number of the stage that receives them.
            name: str, the same there, and no other send's that is under way.
        """
        return self._start(tensors, peer, True, name)

    def receive(self, specs: list[tuple], peer: int, name: str) -> concurrent.futures.Future:
        """Start to receive tensors of known shapes; return a future of a list of them.

        Args:
            specs: list of (shape, dtype).
            peer: number of the stage that sends them.
            name: as `send`'s.
        """
        return self._start([tf.zeros(shape, dtype) for shape, dtype in specs], peer, False, name)

    def _start(self, tensors, peer, sends, name):
        # Horovod takes an operation's name from its graph: eager ones of a kind have the same.
        key = sends, name
        if key not in self._functions:
            function = tf.function(
                lambda tensors: _broadcast(tensors, peer, sends, name),
                reduce_retracing=True,
                autograph=False,
            )
            self._functions[key] = _compat.expect_many_traces(function)
        future = _Waited(f"send/recv {name!r}", _rank_of(peer))
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


def _rank_of(stage):
    """Return the rank of another stage of this pipeline."""
    return job.pipeline_group().ranks[stage]


def _broadcast(tensors, peer, sends, name):
    """Broadcast tensors between this rank and that of another stage."""
    pair = job.known_group(sorted((job.rank(), _rank_of(peer))))
    root = pair.index if sends else 1 - pair.index
    return transport.broadcast_together(tensors, root, pair, name)
