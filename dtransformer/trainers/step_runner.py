"""Runs steps on the batches of an iterator, without waiting for the device."""

import contextlib
import time

import keras
import tensorflow as tf

from dtransformer.parallel.collectives.replica_consistency import check_replica_consistency
from dtransformer.parallel.runtime import job
from dtransformer.reports.throughput import Throughput, measured_peak, tokens_and_flops
from dtransformer.trainers.batch_fingerprints import FINGERPRINTS
from dtransformer.trainers.objective import without_padding
from dtransformer.trainers.optimizer.reduce import reduce_sum
from dtransformer.trainers.step_logs import StepCheck, StepLogs


class StepRunner:
    """Compiled training and evaluation steps of a trainer.

    Args:
        step: The `Step`.
        network: The `keras.Model` that is trained.
        compiler: The `StepCompiler`.
        check: `StepCheck` of the training steps.
        log_every: Interval in steps between reading logs from the device.
        steps_per_execution: Maximum number of steps per call.

    Attributes:
        num_steps: Number of optimizer steps so far, counted on the host.
        logs: `StepLogs` of the current epoch.
    """

    def __init__(self, step, network, compiler, check, log_every, steps_per_execution):
        self._step = step
        self._network = network
        self._compiler = compiler
        self._check = check
        self._log_every = log_every
        self._steps_per_execution = steps_per_execution
        self._throughput = None
        self._work = {}  # Shapes of a batch -> its tokens and FLOP.
        self._is_watched = job.watchdog() is not None
        self._step_ended = 0.0
        self.num_steps = 0
        self.recompile()
        self.start_logs(log_every)

    @property
    def expert_loads(self):
        """`ExpertLoads` of the current epoch."""
        return self._step.expert_loads

    def recompile(self):
        """Trace all steps again in their next calls."""
        self._train = self._compiler.compile_step(self._step.train, trains=True)
        self._test = self._compiler.compile_step(self._step.test)
        self._is_compiled = False

    def start_training(self):
        """Prepare training from a step that a checkpoint may have restored."""
        self.num_steps = self._step.num_updates()
        self._step.take_seed()
        if self._throughput is None:
            peak = tf.constant(measured_peak(self._network.compute_dtype), "float32")
            self._throughput = Throughput()
            self._throughput.start(float(reduce_sum({"peak": peak}, "peak")["peak"]))

    def new_epoch(self):
        """Reset the logs, the throughput and the expert loads."""
        self._throughput.reset()
        self._step.expert_loads.reset()
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
            if self._is_watched:
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
        specs = _without_optionals(getattr(iterator, "element_spec", None))
        num_steps = 0
        while num_steps < self._steps_per_execution:
            start = time.perf_counter()
            batch = next(iterator, None)
            if batch is None:
                break
            batch_ready = time.perf_counter()
            batch = _without_optionals(batch)
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
            if self._is_watched:
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
            self._work[key] = tokens_and_flops(self._network, inputs, labels)
        tokens, flops = self._work[key]
        return tokens * sharding.num_batches_per_step, flops * sharding.num_batches_per_step


class Predictor:
    """Compiled prediction of an engine.

    Args:
        engine: The `Engine`, built.
        network: The `keras.Model`.
        compiler: The `StepCompiler`.
        sharding: `RowSharding` of the batches.

    Call arguments:
        batches: List of batches, tuples of inputs, labels and sample weights.

    Returns:
        Nested tensors [rows, ...], the outputs of all batches. For global batches every rank
        returns all rows.
    """

    def __init__(self, engine, network, compiler, sharding):
        self._engine = engine
        self._network = network
        self._sharding = sharding
        self._compiled = compiler.compile_step(self._predict)

    def __call__(self, batches):
        if self._sharding.is_global:
            batches = _without_optionals(batches)
            check_replica_consistency(batches, job.data_parallel_group(), "a prediction")
        outputs = [self._compiled(batch, None, self._sharding) for batch in batches]
        return tf.nest.map_structure(lambda *xs: tf.concat(xs, 0), *outputs)

    def _predict(self, batch, sharding):
        if sharding.is_global:
            batch = sharding.local_rows(batch)
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        outputs = sharding.gather_rows(self._engine.predict(inputs))
        return without_padding(outputs, self._network)


def _without_optionals(batch):
    """Return a batch, or its specs, with `None` for each input that Keras packed as missing."""
    optional = tf.experimental.Optional, tf.OptionalSpec
    return tf.nest.map_structure(lambda x: None if isinstance(x, optional) else x, batch)
