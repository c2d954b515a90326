"""The seed that dropout masks are derived from, so that they can be drawn again."""

import contextlib
import types
from collections.abc import Iterator

import tensorflow as tf

from dtransformer.parallel import trace


@contextlib.contextmanager
def dropout_seed(seed: tf.Tensor) -> Iterator[None]:
    """Derive every dropout mask inside the `with` block from `seed`.

    A training step opens it with a seed made of the job's seed, the step, the
    micro-batch and the data shard; computing a block again inside it gives the same
    masks again.

    Args:
        seed: int32 tensor [2].
    """
    with trace.scope(dropout_seed=seed):
        yield


def current_dropout_seed() -> tf.Tensor:
    """Return the seed of `dropout_seed`; outside of it one of TensorFlow's global generator."""
    seed = trace.current().dropout_seed
    if seed is not None:
        return seed
    return tf.random.uniform([2], maxval=tf.int32.max, dtype=tf.int32)


@contextlib.contextmanager
def dropout_numbers(numbers: dict[int, tf.Tensor]) -> Iterator[None]:
    """Let layers inside the `with` block draw their masks by other numbers than their own.

    Args:
        numbers: dict of the id of a layer and its number, an int32 scalar.
    """
    with trace.scope(dropout_numbers=types.MappingProxyType(numbers)):
        yield


def layer_number(layer) -> int | tf.Tensor:
    """Return the number that a dropout layer's masks are drawn by.

    Args:
        layer: it has an int `number`.
    """
    return trace.current().dropout_numbers.get(id(layer), layer.number)
