"""What layers tell of a computation besides their results: sums over tokens, for the logs.

They add up over calls, micro-batches and ranks, and have no gradients. Where nobody listens,
nothing is computed.
"""

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf

from dtransformer.parallel import trace


@contextlib.contextmanager
def listening(listens: bool = True) -> Iterator[dict[str, tf.Tensor]]:
    """Collect what layers tell inside the `with` block: a dict of names and tensors.

    Args:
        listens: False, so that nothing is told.
    """
    told = {} if listens else None
    with trace.scope(told=told):
        yield {} if told is None else told


def is_listening() -> bool:
    """Return whether anybody listens here."""
    return trace.current().told is not None


def tell(name: str, compute: Callable[[], tf.Tensor]) -> None:
    """Tell what a function computes, a float32 tensor; it is called if somebody listens.

    Args:
        name: unique in the network, such as a layer's path.
        compute: the function.
    """
    told = trace.current().told
    if told is not None:
        new = tf.stop_gradient(compute())
        told[name] = new if name not in told else told[name] + new


def tell_all(told: dict[str, tf.Tensor]) -> None:
    """Tell what was collected in a function."""
    for name, value in told.items():
        tell(name, lambda value=value: value)
