"""The functions that Keras' loops call: steps on the batches of a call, timed by the host's clock.

Nothing waits for a device but for the logs, which are read every so many steps.
"""

import contextlib
import math
import time
import warnings

import keras
import numpy as np
import tensorflow as tf

from dtransformer.parallel.collectives.replica_consistency import check_replica_consistency
from dtransformer.parallel.runtime import job
from dtransformer.reports.throughput import measured_peak, tokens_and_flops
from dtransformer.trainers.batch_fingerprints import FINGERPRINTS, compare_batches
from dtransformer.trainers.optimizer.reduce import reduce_sum
from dtransformer.trainers.overflow import first_overflow

MAX_SKIPPED = 50  # steps in a row


class StepCheck:
    """Check of the ranks' batches and of the losses, whenever the logs of steps are read.

    Args:
        model: The trainer, or `None` if layers cannot be called one by one.

    Call arguments:
        logs: Dict of numbers, the logs of the last step. `skipped_in_a_row` is removed.
        tables: List of the fingerprints of all steps since the last call.
        step: Number of the last step.
        batch: Nested tensors, the batch of the last step.

    Raises:
        ValueError: If ranks have wrong batches, see `compare_batches`, or if float16 has skipped
            `MAX_SKIPPED` steps in a row.
    """

    def __init__(self, model=None):
        self._model, self._warned, self._totals = model, False, 0

    def __call__(self, logs, tables, step, batch):
        if tables:  # There are several data ranks.
            self._totals = compare_batches(tables, step - len(tables), self._totals)
        loss = logs.get("step_loss", 0.0)
        skipped = logs.pop("skipped_in_a_row", 0)
        if skipped >= MAX_SKIPPED:
            layer = self._model and first_overflow(self._model, batch)
            cause = f": the first layer with inf or nan outputs is {layer!r}" if layer else ""
            raise ValueError(
                f"the last {skipped:g} steps were skipped, because gradients overflowed in float16"
                f"{cause}. Nothing is trained: use the dtype policy 'mixed_bfloat16', which has the "
                "range of float32"
            )
        if not self._warned and not math.isfinite(loss):
            self._warned = True
            warnings.warn(
                f"the loss of step {step} is {loss}. Look for inf and nan in the data, lower the "
                "learning rate, or use 'mixed_bfloat16' if the network computes in float16",
                stacklevel=2,
            )


class StepLogs:
    """Step logs, kept on the device and copied to the host every `every` steps.

    The host blocks on each copy. The fingerprints of all steps come with it and are compared.

    Args:
        check: `StepCheck` that is called whenever the logs are read.
        every: Interval in steps. The logs of the first step are also read.
        throughput: `Throughput` whose logs are added, or `None`.
        step: Number of training steps before the first one.

    Attributes:
        are_new: Whether the logs of the last step were read.
        tables: List of the fingerprints of all steps since the last read.
        batch: The batch of the last step.
    """

    def __init__(self, check, every=1, throughput=None, step=0):
        self._check, self._every, self._throughput = check, every, throughput
        self._steps, self._waiting, self._read, self.are_new = 0, None, {}, False
        self.tables, self.batch, self._first = [], None, step

    def add(self, logs, steps=1):
        """Add the logs (tensors) of the last of `steps` steps; return the latest numbers."""
        before, self._steps = self._steps, self._steps + steps
        self._waiting, self.are_new = logs, False
        if not before or self._steps // self._every > before // self._every:
            self.read()
        return self._read

    def read(self):
        """Return the last step's logs as numbers, {} before the first step."""
        if self._waiting is not None:
            begin, self.are_new = time.perf_counter(), True
            self._read, tables = _as_numbers((self._waiting, self.tables))
            self._waiting, self.tables = None, []
            if self._throughput is not None:
                self._throughput.add_read(time.perf_counter() - begin)
                self._read |= self._throughput.logs()
            self._check(self._read, tables, self._first + self._steps, self.batch)
        return self._read


def _as_numbers(logs):
    """Return nested logs, tensors, as floats and arrays, which are copied together."""
    flat = [tf.cast(x, "float64") for x in tf.nest.flatten(logs)]
    values = tf.concat([tf.reshape(x, [-1]) for x in flat], 0).numpy()
    ends = np.cumsum([x.shape.num_elements() for x in flat])
    parts = [x.reshape(like.shape) for x, like in zip(np.split(values, ends[:-1]), flat)]
    return tf.nest.pack_sequence_as(logs, [x if x.shape else x.item() for x in parts])


class StepFunctions(keras.Model):
    """Makes Keras' train, test and predict functions of a trainer's steps.

    A subclass has Keras' `train_step`, `test_step` and `predict_step`; `_step` and its
    `_compiler`; `_throughput`, a `Throughput`; `_step_check`, a `StepCheck`; and `_work`, a dict.

    Attributes:
        num_steps: of the optimizer, as the host counts them.
    """

    _step = _compiler = _throughput = _step_check = None
    _logs = None  # the `StepLogs` of what is running
    _log_every, num_steps = 1, 0
    _beginning = None  # of the fit that is running
    _tells = False  # whether this rank prints what it does
    _shards_rows = False  # whether batches are global ones, of which a data shard takes its rows

    def make_train_function(self, force=False):
        if self.train_function is not None and not force:
            return self.train_function
        peak = tf.constant(measured_peak(self.network.compute_dtype), "float32")
        self._throughput.start(float(reduce_sum({"peak": peak}, "peak")["peak"]))
        step, compiled, ended = self._compiler.whole(self.train_step, trains=True), False, 0.0
        is_watched = job.watchdog() is not None  # by other ranks

        def done(batch, begin, there):
            nonlocal compiled, ended
            if compiled:
                if is_watched:
                    job.computed_for(there - ended)
                self._throughput.add(
                    time.perf_counter() - begin, *self._tokens_and_flops(batch), there - begin
                )
            compiled, ended = True, time.perf_counter()
            self.num_steps += 1

        def train(iterator):
            nonlocal ended
            if self._beginning is not None and self._beginning.batch:  # in an epoch's middle
                self._beginning.count_step()
            doing = counted = contextlib.nullcontext()
            if is_watched:
                doing = job.doing("step" if compiled else "compiling", self.num_steps + 1)
            if not compiled:
                counted = self._compiler.first_step(self._tells)
            with doing, counted:
                logs = self._run(step, iterator, done)
            ended = time.perf_counter()
            return logs

        self.train_function = train
        return self.train_function

    def make_test_function(self, force=False):
        if self.test_function is None or force:
            step = self._compiler.whole(self.test_step)
            self.test_function = lambda iterator: self._run(step, iterator)
        return self.test_function

    def make_predict_function(self, force=False):
        if self.predict_function is not None and not force:
            return self.predict_function
        step = self._compiler.whole(self.predict_step)

        def predict(batches):
            if self._shards_rows:
                batches = _without_optionals(batches)
                check_replica_consistency(batches, job.data_parallel_group(), "a prediction")
            outputs = [step(batch, None, self._shards_rows) for batch in batches]
            return tf.nest.map_structure(lambda *xs: tf.concat(xs, 0), *outputs)

        self.predict_function = predict
        return predict

    def _run(self, step, iterator, done=lambda *_: None):
        """Run a step with each batch of a call of Keras' loop; return the logs that were read last.

        Args:
            step: a function, see `StepCompiler.whole`.
            iterator: of batches, `steps_per_execution` of which are taken, or what is left.
            done: a function that is called after each step with the batch, and by
                `time.perf_counter` when it was asked for, and when it was there.

        Raises:
            StopIteration: there is no batch.
        """
        specs = _without_optionals(getattr(iterator, "element_spec", None))
        logs, number = None, 0
        while number < self.steps_per_execution:
            begin, batch = time.perf_counter(), next(iterator, None)
            if batch is None:
                break
            there, number = time.perf_counter(), number + 1
            batch = _without_optionals(batch)
            logs = step(batch, specs, self._shards_rows)
            if FINGERPRINTS in logs:
                self._logs.tables.append(logs.pop(FINGERPRINTS))
            self._logs.batch = batch
            done(batch, begin, there)
        if logs is None:
            raise StopIteration
        return self._logs.add(logs, number)

    def _get_metrics_result_or_logs(self, logs):
        """Return the logs of an epoch, or of an evaluation: those of its last step."""
        return self._logs.read() or logs

    def _begin_epoch(self):
        """Count an epoch's speed and the loads of its experts anew."""
        self._throughput.reset()
        self._step.expert_loads.forget()
        self._logs = StepLogs(self._step_check, self._log_every, self._throughput, self.num_steps)

    @property
    def logs_are_new(self) -> bool:
        """Whether the logs that callbacks are given are the last step's."""
        return self._logs.are_new

    def _tokens_and_flops(self, batch):
        """Return what a step of all ranks has of tokens and of FLOP, by the shapes of a batch."""
        inputs, labels, _ = keras.utils.unpack_x_y_sample_weight(batch)
        key = tuple(tuple(x.shape) for x in tf.nest.flatten((inputs, labels)) if x is not None)
        if key not in self._work:
            self._work[key] = tokens_and_flops(self.network, inputs, labels)
        times = 1 if self._shards_rows else job.data_shard()[1]
        return [times * number for number in self._work[key]]


def _without_optionals(batch):
    """Return a batch, or its specs, with `None` for each input that Keras packed as missing."""
    kinds = tf.experimental.Optional, tf.OptionalSpec
    return tf.nest.map_structure(lambda x: None if isinstance(x, kinds) else x, batch)
