"""The compile strategy of a step: one `tf.function` for all of it, or one for each part.

On one device the full step is one function, so that TensorFlow reduces the gradients of the last
blocks while it still computes the first blocks. On a mesh and in a pipeline the engine compiles
its functions separately. The rest of the step works on this rank's shards and is also compiled in
parts: in one function with the network, TensorFlow would take much longer to optimize it.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator

import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.ops.fused import enable_fusion
from dtransformer.parallel.runtime import job
from dtransformer.parallel.runtime.devices import takes_gpu_branch
from dtransformer.reports.clusters import ClusterReport

_LARGE_NETWORK = 2**20
"""Number of weight elements above which compiling the update with XLA saves time."""


class StepCompiler:
    """Compiles a trainer's functions for the current layout.

    Args:
        jit_compile: As in `Trainer.compile`.
        run_eagerly: Whether to run everything in Python, for debugging.

    Attributes:
        in_parts: True if the engine compiles its functions separately and Python calls the parts
            of a step. False if a full step is one `tf.function`.
        graphs: Dict that maps the parts of a training step to their last traced graphs, without
            the engine's graphs.
        clusters: `ClusterReport` of the first step, or `None` without clusters or before the step.
    """

    clusters = None

    def __init__(self, jit_compile: bool | str = "auto", run_eagerly: bool = False):
        self._jit = jit_compile
        self.run_eagerly = run_eagerly
        self.jit_forward = jit_compile is True
        self.in_parts = job.compiles_shapes()
        self.graphs = {}
        self._is_watched = job.watchdog() is not None

    def jit_update(self, weights: list) -> bool:
        """Return whether XLA compiles the update of these Keras variables.

        `jit_compile="auto"` compiles it from `_LARGE_NETWORK` elements on. Eager mode never does.
        """
        if self._jit == "auto" and not self.run_eagerly:
            return sum(math.prod(weight.shape) for weight in weights) >= _LARGE_NETWORK
        return self._jit is True and not self.run_eagerly

    def compile_step(self, step: Callable, trains: bool = False) -> Callable:
        """Return a function that runs a full step.

        Args:
            step: Function of a batch and its `RowSharding`.
            trains: Whether the step trains.

        Returns:
            A function of `(batch, specs, sharding)`, where `specs` are the specs of the batch's
            dataset, or `None`. The step is compiled once for each sharding.
        """
        if self.in_parts or self.run_eagerly:

            def run_eagerly(batch, specs, sharding):
                return step(batch, sharding)

            return run_eagerly
        traced = []

        @functools.cache
        def compiled(sharding):
            def sharded_step(batch):
                return step(batch, sharding)

            sharded_step.__name__ = step.__name__
            return self._compiled(sharded_step, trains)

        def run(batch, specs, sharding):
            function = compiled(sharding)
            if specs is not None and (specs, sharding) not in traced:
                # The specs leave varying dimensions open, so that one trace serves all batches.
                function.get_concrete_function(specs)
                traced.append((specs, sharding))
            return function(batch)

        return run

    def compile_part(self, function: Callable, trains: bool = True) -> Callable:
        """Return a part of a step that follows the engine, compiled if Python calls the parts."""
        return self._compiled(function, trains) if self.in_parts else function

    @contextlib.contextmanager
    def first_step(self, verbose: bool) -> Iterator[None]:
        """Record the XLA clusters of the first training step, which runs in the `with` block.

        Args:
            verbose: Whether to print the report.
        """
        if self.run_eagerly or not tf.config.optimizer.get_jit():
            yield
            return
        with _compat.collect_graphs() as graphs:
            yield
        self.clusters = ClusterReport.from_graphs(graphs)
        if verbose:
            print(self.clusters, flush=True)

    def _compiled(self, function, trains):
        @functools.wraps(function)
        def traced(*args):
            if trains and not tf.executing_eagerly():
                self.graphs[function.__name__] = tf.compat.v1.get_default_graph()
            if self._is_watched and not tf.executing_eagerly():
                job.record_compilation()
            return function(*args)

        return tf.function(traced, reduce_retracing=True, autograph=False)


def set_tensorflow_options(jit_compile: bool | str) -> None:
    """Set the graph optimizations of the whole process.

    Args:
        jit_compile: As in `Trainer.compile`.
    """
    # The arithmetic optimizer reorders sums depending on the rest of the graph, so recompute would
    # change the last bits. The function optimizer only copies functions; inlining works without it.
    tf.config.optimizer.set_experimental_options(
        {"arithmetic_optimization": False, "function_optimization": False}
    )
    enable_fusion(jit_compile == "auto")
    if takes_gpu_branch():  # XLA fuses elementwise operations, which are bound by memory there.
        tf.config.optimizer.set_jit("autoclustering" if jit_compile == "auto" else False)
