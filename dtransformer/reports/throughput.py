"""Tokens per second, FLOP/s, and their share of what the machine can do."""

import functools
import time

import tensorflow as tf


@functools.cache
def measured_peak(dtype="float32", size=1024, seconds=0.1):
    """Return the FLOP/s of large square products on this rank's device.

    Measured once per process and type, by the best of several products.

    Args:
        dtype: name of the type that is computed in.
        size: number of rows and columns of the matrices.
        seconds: how long to measure.
    """
    matrix = tf.cast(tf.random.stateless_normal([size, size], [0, 0]), dtype)
    product = tf.function(lambda x: tf.matmul(x, matrix))
    product(matrix).numpy()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        product(matrix).numpy()
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


def moment_of(batch):
    """Return when a batch was there, in seconds since 1970, a float64 scalar tensor."""
    with _once_there(batch):
        return tf.timestamp()


def seconds_until(batch, moment):
    """Return the seconds from a moment, from `moment_of`, until a batch was there.

    Nothing waits for this clock. TensorFlow's own, as all that has an effect, comes after what a
    function does before it, such as the sums over the ranks, and before all that follows.
    """
    with _once_there(batch):
        return tf.numpy_function(
            lambda moment: time.time() - moment, [moment], tf.float64, stateful=False
        )


def _once_there(batch):
    tensors = tf.nest.flatten(batch, expand_composites=True)  # sparse and ragged ones, too
    return tf.control_dependencies([x for x in tensors if tf.is_tensor(x)])


def after(moment, batch):
    """Return a batch that nothing looks at before a moment, from `moment_of`, has been taken."""
    if tf.executing_eagerly():
        return batch
    keep = lambda x: tf.identity(x) if tf.is_tensor(x) else x
    with tf.control_dependencies([moment]):
        return tf.nest.map_structure(keep, batch, expand_composites=True)


class Throughput:
    """Counts tokens and FLOP of an epoch against the clock.

    The first step of a run, which compiles, is not counted.

    Args:
        peak: FLOP/s that all ranks were measured to do together. Where others used the machine
            meanwhile, steps may be faster: what they do is the peak, then.
    """

    def __init__(self, peak):
        self.peak = peak
        self.reset()

    def reset(self):
        """Forget what was counted."""
        self.seconds = self.tokens = self.flops = self.waited = 0.0

    def add(self, seconds, tokens, flops, waited=0.0):
        """Count a step of all ranks, of whose seconds this one waited some for its data."""
        self.waited += waited
        self.seconds += seconds
        self.tokens += tokens
        self.flops += flops

    def logs(self):
        """Return the means since the last reset, by the name they are logged under."""
        if not self.seconds:
            return {"tokens_per_second": 0.0}
        logs = {"tokens_per_second": self.tokens / self.seconds}
        logs["input_wait"] = self.waited / self.seconds
        if self.flops:
            logs["gflops_per_second"] = self.flops / self.seconds / 1e9
            self.peak = max(self.peak, self.flops / self.seconds)
            logs["share_of_peak"] = self.flops / self.seconds / self.peak
        return logs
