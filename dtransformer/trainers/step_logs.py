"""Step logs: kept on the device, copied to the host at intervals, and checked there."""

import math
import time
import warnings

import numpy as np
import tensorflow as tf

from dtransformer.trainers.batch_fingerprints import compare_batches
from dtransformer.trainers.overflow import first_overflow

MAX_SKIPPED = 50
"""Number of consecutive skipped float16 steps that ends training."""


class StepCheck:
    """Check of losses and of the ranks' batches, run whenever step logs are read.

    Args:
        model: Model to search for the first overflowing layer, or `None` if its layers cannot be
            called one by one.

    Call arguments:
        logs: Dict of floats, the logs of the last step. `skipped_in_a_row` is removed.
        tables: List of the batch fingerprints of all steps since the last call.
        step: Index of the last step.
        batch: Nested tensors, the batch of the last step.

    Raises:
        ValueError: If ranks have wrong batches (see `compare_batches`), or if float16 overflows
            have skipped `MAX_SKIPPED` steps in a row.
    """

    def __init__(self, model=None):
        self._model = model
        self._has_warned = False
        self._totals = 0

    def __call__(self, logs, tables, step, batch):
        if tables:  # Only several data ranks compare fingerprints.
            self._totals = compare_batches(tables, step - len(tables), self._totals)
        num_skipped = logs.pop("skipped_in_a_row", 0)
        if num_skipped >= MAX_SKIPPED:
            self._raise_overflow(num_skipped, batch)
        loss = logs.get("step_loss", 0.0)
        if not self._has_warned and not math.isfinite(loss):
            self._has_warned = True
            warnings.warn(
                f"The loss of step {step} is {loss}. Look for inf and nan in the data, lower the "
                "learning rate, or use 'mixed_bfloat16' if the network computes in float16.",
                stacklevel=2,
            )

    def _raise_overflow(self, num_skipped, batch):
        layer = None if self._model is None else first_overflow(self._model, batch)
        cause = "" if layer is None else f" The first layer with inf or nan outputs is {layer!r}."
        raise ValueError(
            f"The last {num_skipped:g} steps were skipped because gradients overflowed in float16, "
            f"so the weights no longer change.{cause} Use the dtype policy 'mixed_bfloat16', which "
            "has the range of float32."
        )


class StepLogs:
    """Logs of an epoch's steps, copied to the host every `every` steps.

    The host blocks on each copy. In between, callers receive the values of the last copy.

    Args:
        check: `StepCheck` that is called whenever the logs are read.
        every: Interval in steps. The logs of the first step are also read.
        throughput: `Throughput` whose logs are added, or `None`.
        first_step: Number of training steps before the first one.

    Attributes:
        are_new: Whether the logs of the last step were read.
        batch: The batch of the last step.
    """

    def __init__(self, check, every, throughput=None, first_step=0):
        self._check = check
        self._every = every
        self._throughput = throughput
        self._first_step = first_step
        self._num_steps = 0
        self._pending = None
        self._tables = []
        self._values = {}
        self.are_new = False
        self.batch = None

    def add_fingerprints(self, table):
        """Keep a step's batch fingerprints until the next read."""
        self._tables.append(table)

    def add(self, logs, num_steps, batch):
        """Add the logs of the last of `num_steps` steps; return the latest values on the host.

        Args:
            logs: Dict of scalar tensors.
            num_steps: Number of steps since the last call.
            batch: The last step's batch.
        """
        before = self._num_steps
        self._num_steps += num_steps
        self._pending = logs
        self.batch = batch
        self.are_new = False
        is_due = self._num_steps // self._every > before // self._every
        if is_due or not before:
            self.read()
        return self._values

    def read(self):
        """Return the last step's logs as floats, or `{}` before the first step."""
        if self._pending is None:
            return self._values
        start = time.perf_counter()
        self._values, tables = _to_host((self._pending, self._tables))
        self._pending = None
        self._tables = []
        self.are_new = True
        if self._throughput is not None:
            self._throughput.add_read(time.perf_counter() - start)
            self._values |= self._throughput.logs()
        self._check(self._values, tables, self._first_step + self._num_steps, self.batch)
        return self._values


class Throughput:
    """Tokens and floating-point operations per second of an epoch.

    The first step of a run is not counted, because it compiles.

    Args:
        peak: Measured FLOP/s of all ranks together. If a step is faster, because other processes
            slowed down the measurement, its FLOP/s become the new peak.
    """

    def __init__(self, peak):
        self.peak = peak
        self.reset()

    def reset(self):
        """Reset all counters."""
        self.seconds = self.tokens = self.flops = self.waited = 0.0

    def add(self, seconds, tokens=0.0, flops=0.0, waited=0.0):
        """Count a step of all ranks.

        Args:
            seconds: Duration of the step.
            tokens: Number of tokens.
            flops: Number of floating-point operations.
            waited: Seconds of the step that this rank waited for data.
        """
        self.waited += waited
        self.seconds += seconds
        self.tokens += tokens
        self.flops += flops

    def add_read(self, seconds):
        """Add the seconds of reading logs to the counted steps, which end with that read."""
        self.seconds += seconds if self.seconds else 0.0

    def logs(self):
        """Return a dict with the mean rates since the last reset."""
        if not self.seconds:
            return {"tokens_per_second": 0.0}
        logs = {"tokens_per_second": self.tokens / self.seconds}
        logs["input_wait"] = self.waited / self.seconds
        if self.flops:
            logs["gflops_per_second"] = self.flops / self.seconds / 1e9
            self.peak = max(self.peak, self.flops / self.seconds)
            logs["share_of_peak"] = self.flops / self.seconds / self.peak
        return logs


def _to_host(logs):
    """Return nested tensors as floats and arrays, copied from the device together."""
    flat = [tf.cast(x, "float64") for x in tf.nest.flatten(logs)]
    values = tf.concat([tf.reshape(x, [-1]) for x in flat], 0).numpy()
    ends = np.cumsum([x.shape.num_elements() for x in flat])
    arrays = []
    for part, tensor in zip(np.split(values, ends[:-1]), flat):
        array = part.reshape(tensor.shape)
        arrays.append(array if array.shape else array.item())
    return tf.nest.pack_sequence_as(logs, arrays)
