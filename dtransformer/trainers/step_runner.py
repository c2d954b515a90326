"""Compiles steps, and runs them on the batches of an iterator without waiting for the device.

On one device the full step is one `tf.function`, so that TensorFlow reduces the gradients of the last
blocks while it still computes the first blocks. On a mesh and in a pipeline the engine compiles
its functions separately. The rest of the step works on this rank's shards and is also compiled in
parts: in one function with the network, TensorFlow would take much longer to optimize it.
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.runtime import job
from dtransformer.parallel.tracing import trace
from dtransformer.reports.clusters import ClusterReport
from dtransformer.reports.throughput import measured_peak, tokens_and_flops
from dtransformer.trainers.batch_fingerprints import FINGERPRINTS
from dtransformer.trainers.optimizer.reduction import reduce_sum
from dtransformer.trainers.step_logs import StepCheck, StepLogs, Throughput

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
        traced_bytes: Dict of the bytes of `"gradients"` and `"logits"` in the first training step.
        is_watched: Whether the watchdog monitors this process.
        clusters: `ClusterReport` of the first step, or `None` without clusters or before the step.
    """

    clusters = None

    def __init__(self, jit_compile: bool | str = "auto", run_eagerly: bool = False):
        self._jit = jit_compile
        self.run_eagerly = run_eagerly
        self.jit_forward = jit_compile is True
        self.in_parts = job.compiles_shapes()
        self.graphs = {}
        self.traced_bytes = {}
        self.is_watched = job.watchdog() is not None

    def jit_update(self, weights: list) -> bool:
        """Return whether XLA compiles the update of these Keras variables.

        `jit_compile="auto"` compiles it from `_LARGE_NETWORK` elements on. Eager mode never does.
        """
        if self.run_eagerly:
            return False
        if self._jit == "auto":
            return sum(math.prod(weight.shape) for weight in weights) >= _LARGE_NETWORK
        return self.jit_forward

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
        """Record sizes and XLA clusters of the first training step, which runs in the `with` block.

        Args:
            verbose: Whether to print the report.
        """
        has_clusters = not self.run_eagerly and tf.config.optimizer.get_jit()
        collecting = _compat.collect_graphs() if has_clusters else contextlib.nullcontext()
        with trace.traced_bytes.set(self.traced_bytes), collecting as graphs:
            yield
        if graphs is None:
            return
        self.clusters = ClusterReport.from_graphs(graphs)
        if verbose:
            print(self.clusters, flush=True)

    def _compiled(self, function, trains):
        @functools.wraps(function)
        def traced(*args):
            if trains and not tf.executing_eagerly():
                self.graphs[function.__name__] = tf.compat.v1.get_default_graph()
            if self.is_watched and not tf.executing_eagerly():
                job.record_compilation()
            return function(*args)

        return tf.function(traced, reduce_retracing=True, autograph=False)


class StepRunner:
    """Compiled training and evaluation steps of a trainer.

    Args:
        step: The `Step`.
        network: The `keras.Model` that is trained.
        teacher: The frozen `keras.Model` of a distillation, or `None`.
        compiler: The `StepCompiler`.
        check: `StepCheck` of the training steps.
        log_every: Interval in steps between reading logs from the device.
        steps_per_execution: Maximum number of steps per call.

    Attributes:
        step: The `Step`.
        num_steps: Number of optimizer steps so far, counted on the host.
        logs: `StepLogs` of the current epoch.
    """

    def __init__(self, step, network, teacher, compiler, check, log_every, steps_per_execution):
        self.step = step
        self._network = network
        self._teacher = teacher
        self._compiler = compiler
        self._check = check
        self._log_every = log_every
        self._steps_per_execution = steps_per_execution
        self._throughput = None
        self._work = {}  # Shapes of a batch -> its tokens and FLOP.
        self._step_ended = 0.0
        self.num_steps = 0
        self.recompile()
        self.start_logs(log_every)

    def recompile(self):
        """Trace all steps again in their next calls."""
        self._train = self._compiler.compile_step(self.step.train, trains=True)
        self._test = self._compiler.compile_step(self.step.test)
        self._is_compiled = False

    def start_training(self):
        """Prepare training from a step that a checkpoint may have restored."""
        self.num_steps = self.step.num_updates()
        self.step.take_seed()
        if self._throughput is None:
            peak = tf.constant(measured_peak(self._network.compute_dtype), "float32")
            self._throughput = Throughput(float(reduce_sum({"peak": peak}, "peak")["peak"]))

    def new_epoch(self):
        """Reset the logs, the throughput and the expert loads."""
        self._throughput.reset()
        self.step.expert_loads.reset()
        self.start_logs(self._log_every)

    def start_logs(self, log_every):
        """Start new logs that are read from the device every `log_every` steps."""
        self.logs = StepLogs(self._check, log_every, self._throughput, self.num_steps)

    def train(self, iterator, sharding, verbose=False):
        """Train on up to `steps_per_execution` batches.

        Args:
            iterator: Iterator of batches.
            sharding: `RowSharding` of the batches.
            verbose: Whether to print the XLA clusters of the first step on a GPU.

        Returns:
            A dict of floats, the logs that were read last.

        Raises:
            StopIteration: If no batch is left.
        """
        with contextlib.ExitStack() as stack:
            if self._compiler.is_watched:
                activity = "step" if self._is_compiled else "compiling"
                stack.enter_context(job.record_activity(activity, self.num_steps + 1))
            if not self._is_compiled:
                stack.enter_context(self._compiler.first_step(verbose))
            logs = self._run(self._train, iterator, sharding, self.logs, self._count)
        self._step_ended = time.perf_counter()
        return logs

    def test(self, iterator, sharding, logs):
        """Evaluate up to `steps_per_execution` batches; as `train`.

        Args:
            iterator: Iterator of batches.
            sharding: `RowSharding` of the batches.
            logs: `StepLogs` of the evaluation, see `new_evaluation`.
        """
        return self._run(self._test, iterator, sharding, logs)

    def train_batch(self, batch, sharding):
        """Train on one batch and return its logs.

        Args:
            batch: Tuple of inputs, labels and sample weights.
            sharding: `RowSharding` of the batch.
        """
        self.start_training()
        self.start_logs(log_every=1)
        return self.train(iter([batch]), sharding)

    def test_batch(self, batch, sharding):
        """Evaluate one batch and return its logs; arguments as in `train_batch`."""
        return self.test(iter([batch]), sharding, self.new_evaluation(1))

    def new_evaluation(self, log_every=None):
        """Return the `StepLogs` of an evaluation."""
        return StepLogs(StepCheck(), log_every or self._log_every)

    def _run(self, step, iterator, sharding, logs, count=None):
        specs = without_optionals(getattr(iterator, "element_spec", None))
        num_steps = 0
        while num_steps < self._steps_per_execution:
            start = time.perf_counter()
            batch = next(iterator, None)
            if batch is None:
                break
            batch_ready = time.perf_counter()
            batch = without_optionals(batch)
            step_logs = step(batch, specs, sharding)
            if FINGERPRINTS in step_logs:
                logs.add_fingerprints(step_logs.pop(FINGERPRINTS))
            if count is not None:
                count(batch, sharding, start, batch_ready)
            num_steps += 1
        if not num_steps:
            raise StopIteration
        return logs.add(step_logs, num_steps, batch)

    def _count(self, batch, sharding, start, batch_ready):
        """Add a step to the throughput, except for the first one, which compiles."""
        if self._is_compiled:
            if self._compiler.is_watched:
                job.record_local_seconds(batch_ready - self._step_ended)
            tokens, flops = self._tokens_and_flops(batch, sharding)
            seconds = time.perf_counter() - start
            self._throughput.add(seconds, tokens, flops, batch_ready - start)
        self._is_compiled = True
        self._step_ended = time.perf_counter()
        self.num_steps += 1

    def _tokens_and_flops(self, batch, sharding):
        """Return the tokens and FLOP of the global batch, from the batch's shapes alone."""
        inputs, labels, _ = keras.utils.unpack_x_y_sample_weight(batch)
        key = tuple(tuple(x.shape) for x in tf.nest.flatten((inputs, labels)) if x is not None)
        if key not in self._work:
            self._work[key] = tokens_and_flops(self._network, inputs, labels, self._teacher)
        tokens, flops = self._work[key]
        return tokens * sharding.num_batches_per_step, flops * sharding.num_batches_per_step


def without_optionals(batch):
    """Return a batch, or its specs, with `None` for each input that Keras packed as missing."""
    optional = tf.experimental.Optional, tf.OptionalSpec
    return tf.nest.map_structure(lambda x: None if isinstance(x, optional) else x, batch)
