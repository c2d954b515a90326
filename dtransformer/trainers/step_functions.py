"""The functions that Keras' loops call: steps on the batches of a call, timed by the host's clock.

Nothing waits for a device but for the logs, which are read every so many steps.
"""

import contextlib
import time

import keras
import numpy as np
import tensorflow as tf

from dtransformer.parallel.runtime import job
from dtransformer.reports.throughput import measured_peak, tokens_and_flops
from dtransformer.trainers.optimizer.reduce import reduce_sum


class StepLogs:
    """The logs of steps, of which the host reads some: each time one copy, for which it waits.

    Args:
        every: number of steps between two reads. The first step's are read, too.
        throughput: the `Throughput` of the steps, whose logs join them; None without.

    Attributes:
        are_new: whether those of the last step were read.
    """

    def __init__(self, every=1, throughput=None):
        self._every, self._throughput = every, throughput
        self._steps, self._waiting, self._read, self.are_new = 0, None, {}, False

    def add(self, logs, steps=1):
        """Take the logs of the last of a few steps, tensors; return the numbers that were read last."""
        before, self._steps = self._steps, self._steps + steps
        self._waiting, self.are_new = logs, False
        if not before or self._steps // self._every > before // self._every:
            self.read()
        return self._read

    def read(self):
        """Return the last step's logs as numbers, {} before the first step."""
        if self._waiting is not None:
            begin, self.are_new = time.perf_counter(), True
            self._read, self._waiting = _as_numbers(self._waiting), None
            if self._throughput is not None:
                self._throughput.add_read(time.perf_counter() - begin)
                self._read |= self._throughput.logs()
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

    A subclass has Keras' `train_step`, `test_step` and `predict_step`; `_check_batch`, which is called
    before each; `_step` and its `_compiler`; `_throughput`, a `Throughput`; and `_work`, a dict.

    Attributes:
        num_steps: of the optimizer, as the host counts them.
    """

    _step = _compiler = _throughput = None
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
            first = tf.nest.map_structure(_none_if_optional, batches[0])
            self._check_batch(first)
            outputs = [step(batch, None) for batch in batches]
            return tf.nest.map_structure(lambda *xs: tf.concat(xs, 0), *outputs)

        self.predict_function = predict
        return self.predict_function

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
        specs = tf.nest.map_structure(_none_if_optional, getattr(iterator, "element_spec", None))
        logs, number = None, 0
        while number < self.steps_per_execution:
            begin, batch = time.perf_counter(), next(iterator, None)
            if batch is None:
                break
            there, number = time.perf_counter(), number + 1
            batch = tf.nest.map_structure(_none_if_optional, batch)
            self._check_batch(batch)
            logs = step(batch, specs)
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
        self._logs = StepLogs(self._log_every, self._throughput)

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


def _none_if_optional(value):
    """Return an input, or its spec; None for one that Keras packed as there was none."""
    return None if isinstance(value, (tf.experimental.Optional, tf.OptionalSpec)) else value
