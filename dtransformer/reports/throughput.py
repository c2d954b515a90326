"""Tokens per second, FLOP/s, and their share of what the machine can do."""

import contextlib
import functools
import math
import time
from collections.abc import Mapping

import tensorflow as tf

from dtransformer.errors import InputError
from dtransformer.parallel.ops.low_rank import low_rank_of
from dtransformer.parallel.runtime.devices import device_type
from dtransformer.planner.models import from_network

# Rows and columns, and how many before one element is read: on a GPU 1024³ takes 3 µs, a launch as long.
PRODUCTS = {"CPU": (1024, 1), "GPU": (8192, 8)}


@functools.cache
def measured_peak(dtype="float32", size=None, seconds=0.1):
    """Return the FLOP/s of large square products on this rank's device.

    Measured once per process and type, by the best of several products.

    Args:
        dtype: name of the type that is computed in.
        size: number of rows and columns of the matrices; by default those of `PRODUCTS`.
        seconds: how long to measure.
    """
    usual, times = PRODUCTS[device_type()]
    size = size or usual
    matrix = tf.cast(tf.random.stateless_normal([size, size], [0, 0]) * size**-0.5, dtype)
    products = tf.function(
        lambda x: functools.reduce(lambda x, _: tf.matmul(x, matrix), range(times), x)[0, 0]
    )
    products(matrix).numpy()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        products(matrix).numpy()
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 * times / best


def tokens_and_flops(network, inputs, labels) -> tuple[float, float]:
    """Return what a training step has of tokens, padded ones too, and of FLOP, by shapes alone.

    Args:
        network: a `keras.Model`. Where it has the method `stream_shapes`, all positions of its
            stacks are tokens; elsewhere labels that are integers, or rows. FLOP are those of the
            method `flops_per_step`, or as the planner counts a network of `dtransformer.models`:
            beside adapters a third less, as their kernels have no gradients.
        inputs, labels: nested tensors of a batch.
    """
    flat = [x for x in tf.nest.flatten(labels) if x is not None] or tf.nest.flatten(inputs)
    shape = tuple(flat[0].shape)
    are_ids = tf.as_dtype(flat[0].dtype).is_integer and None not in shape
    tokens = math.prod(shape) if are_ids else shape[0]
    flops = float(network.flops_per_step(inputs)) if hasattr(network, "flops_per_step") else 0.0
    if hasattr(network, "stream_shapes"):
        shapes = tf.nest.map_structure(lambda x: tuple(x.shape), inputs)
        streams = list(network.stream_shapes(shapes).values())
        tokens = sum(rows * length for rows, length, _ in streams)
        if isinstance(getattr(network, "arguments", None), Mapping) and not flops:
            (rows, source, _), (_, target, _) = streams[0], streams[-1]
            rank = int(any(low_rank_of(x) and not x.trainable for x in network.variables))
            given = {"source_length": source, "sequence_length": target, "adapter_rank": rank}
            with contextlib.suppress(InputError):  # the planner has no network without blocks
                flops = rows * from_network(network, **given).flops_per_sequence()
    return float(tokens), flops


class Throughput:
    """Counts tokens and FLOP of an epoch against the clock.

    The first step of a run, which compiles, is not counted.

    Attributes:
        peak: FLOP/s that all ranks were measured to do together. Where others used the machine
            meanwhile, steps may be faster: what they do is the peak, then.
    """

    def __init__(self):
        self.start(0.0)

    def start(self, peak):
        """Begin anew, with a peak."""
        self.peak = peak
        self.reset()

    def reset(self):
        """Forget what was counted."""
        self.seconds = self.tokens = self.flops = self.waited = 0.0

    def add(self, seconds, tokens=0.0, flops=0.0, waited=0.0):
        """Count a step of all ranks, of whose seconds this one waited some for its data."""
        self.waited += waited
        self.seconds += seconds
        self.tokens += tokens
        self.flops += flops

    def add_read(self, seconds):
        """Count what steps that have been added took longer: they end when their logs are read."""
        self.seconds += seconds if self.seconds else 0.0

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
