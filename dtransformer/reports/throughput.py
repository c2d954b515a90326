"""Tokens and FLOP of a step, and the peak FLOP/s of the device."""

import contextlib
import functools
import math
import time
from collections.abc import Mapping

import tensorflow as tf

from dtransformer.errors import InputError
from dtransformer.parallel.ops.low_rank import get_low_rank
from dtransformer.parallel.runtime.devices import device_type
from dtransformer.planner.models import from_network

# Matrix size and number of products before a result is read. On a GPU a product of 1024³ takes 3
# µs, as long as a kernel launch, so larger matrices are needed.
PRODUCTS = {"CPU": (1024, 1), "GPU": (8192, 8)}


@functools.cache
def measured_peak(dtype="float32", seconds=0.1):
    """Return the FLOP/s of large square products on this rank's device.

    The fastest of several measurements counts. The result is cached per process and arguments.

    Args:
        dtype: Name of the dtype.
        seconds: Duration of the measurement.
    """
    size, num_products = PRODUCTS[device_type()]
    matrix = tf.cast(tf.random.stateless_normal([size, size], [0, 0]) * size**-0.5, dtype)
    products = tf.function(
        lambda x: functools.reduce(lambda x, _: tf.matmul(x, matrix), range(num_products), x)[0, 0]
    )
    products(matrix).numpy()
    best = float("inf")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        products(matrix).numpy()
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 * num_products / best


def tokens_and_flops(network, inputs, labels, teacher=None) -> tuple[float, float]:
    """Return the tokens and the floating-point operations of a training step, from shapes only.

    Tokens include padding. If the network has the method `stream_shapes`, they are all positions of
    its stacks, otherwise the elements of integer labels, or rows. Operations come from the
    network's method `flops_per_step` if it exists. Otherwise the planner counts them for networks
    from `dtransformer.models`, with a third less under adapters, because their kernels have no
    gradients. The count is 0 for other networks.

    Args:
        network: A `keras.Model`.
        inputs, labels: Nested tensors of a batch.
        teacher: Frozen network that is computed for the same inputs. Defaults to `None`.

    Returns:
        A `(tokens, flops)` tuple of floats.
    """
    flat = [x for x in tf.nest.flatten(labels) if x is not None] or tf.nest.flatten(inputs)
    shape = tuple(flat[0].shape)
    has_ids = tf.as_dtype(flat[0].dtype).is_integer and None not in shape
    tokens = math.prod(shape) if has_ids else shape[0]
    flops = float(network.flops_per_step(inputs)) if hasattr(network, "flops_per_step") else 0.0
    if hasattr(network, "stream_shapes"):
        shapes = tf.nest.map_structure(lambda x: tuple(x.shape), inputs)
        streams = list(network.stream_shapes(shapes).values())
        tokens = sum(rows * length for rows, length, _ in streams)
        if isinstance(getattr(network, "arguments", None), Mapping) and not flops:
            (rows, source, _) = streams[0]
            (_, target, _) = streams[-1]
            rank = int(any(get_low_rank(x) and not x.trainable for x in network.variables))
            changes = {"source_length": source, "sequence_length": target}
            if isinstance(shapes, Mapping) and "masked_lm_positions" in shapes:
                changes["predicted_positions"] = shapes["masked_lm_positions"][1]
            with contextlib.suppress(InputError):  # The planner rejects networks without blocks.
                teacher_shape = None if teacher is None else from_network(teacher, **changes)
                changes |= {"adapter_rank": rank, "teacher": teacher_shape}
                flops = rows * from_network(network, **changes).flops_per_sequence()
    return float(tokens), flops
