"""Compiler of a step, chosen once: one `tf.function` of all of it, or functions of its parts.

On one device all of a step is one function, so that gradients of the last blocks are reduced while
those of the first are computed. On a mesh and in a pipeline the engine compiles functions of its
own, and what follows are ordinary functions of this rank's shards: in one with the network they
take TensorFlow as long to optimize as the network.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator

import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.runtime import job
from dtransformer.parallel.runtime.devices import takes_gpu_branch
from dtransformer.reports.clusters import ClusterReport

# Number of elements of the weights from which on XLA's start pays for the update.
_LARGE_NETWORK = 2**20


class StepCompiler:
    """Compiles a trainer's functions, under the current layout.

    Args:
        jit_compile: as of `Trainer.compile`.
        run_eagerly: whether nothing is compiled, to debug.

    Attributes:
        in_parts: whether the engine compiles its own functions, and a step is called from Python.
        graphs: dict of the graphs that the parts of a training step were traced in last, without the
            engine's.
        clusters: the `ClusterReport` of the first step; None without clusters, and before.
    """

    clusters = None

    def __init__(self, jit_compile: bool | str = "auto", run_eagerly: bool = False):
        self._jit, self.run_eagerly = jit_compile, run_eagerly
        self.jit_forward = jit_compile is True
        self._is_watched = job.watchdog() is not None  # by other ranks
        self.in_parts, self.graphs = job.compiles_shapes(), {}

    def jit_update(self, weights: list) -> bool:
        """Return whether XLA compiles the update of weights, a list of Keras variables."""
        if self._jit == "auto" and not self.run_eagerly:
            return sum(math.prod(weight.shape) for weight in weights) >= _LARGE_NETWORK
        return self._jit is True and not self.run_eagerly

    def whole(self, step: Callable, trains: bool = False) -> Callable:
        """Return a function that runs a step.

        Args:
            step: Function of a batch.
            trains: Whether it trains.

        Returns:
            A function of a batch, of the specs of its data, or `None`, and of a key. The step is
            compiled separately for each key.
        """
        if self.in_parts or self.run_eagerly:
            return lambda batch, specs, key: step(batch)
        traced = []

        @functools.cache
        def compiled(key):
            return self._compiled(step, trains)

        def run(batch, specs, key):
            if specs is not None and (specs, key) not in traced:
                # Dimensions that vary are left open.
                compiled(key).get_concrete_function(specs)
                traced.append((specs, key))
            return compiled(key)(batch)

        return run

    def part(self, function: Callable, trains: bool = True) -> Callable:
        """Return what follows the engine in a step: compiled where that is called from Python."""
        return self._compiled(function, trains) if self.in_parts else function

    @contextlib.contextmanager
    def first_step(self, tells: bool) -> Iterator[None]:
        """Inside the `with` block, the first step of training, count what XLA makes clusters of.

        Args:
            tells: whether it is printed.
        """
        if self.run_eagerly or not tf.config.optimizer.get_jit():
            yield
            return
        with _compat.graphs_collected() as graphs:
            yield
        self.clusters = ClusterReport.of(graphs)
        if tells:
            print(self.clusters, flush=True)

    def _compiled(self, function, trains):
        @functools.wraps(function)
        def traced(*args):
            if trains and not tf.executing_eagerly():
                self.graphs[function.__name__] = tf.compat.v1.get_default_graph()
            if self._is_watched and not tf.executing_eagerly():
                job.compiles()
            return function(*args)

        return tf.function(traced, reduce_retracing=True, autograph=False)


def set_tensorflow_options(jit_compile: bool | str) -> None:
    """Set how TensorFlow optimizes functions, of all of the process.

    Args:
        jit_compile: as of `Trainer.compile`.
    """
    # TensorFlow would reorder sums and products by what else a step computes: recompute
    # changes that, and is not to change one bit of the results. Functions are inlined without
    # the other, but for those that are to stay calls; it copies them all, and changes nothing.
    tf.config.optimizer.set_experimental_options(
        {"arithmetic_optimization": False, "function_optimization": False}
    )
    if takes_gpu_branch():  # where elementwise operations would all go through memory
        tf.config.optimizer.set_jit("autoclustering" if jit_compile == "auto" else False)
