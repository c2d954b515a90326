"""Auxiliary metrics: token-weighted sums that layers report during the forward pass.

They add up over calls, micro-batches and ranks, and have no gradients. Outside of `collecting`
nothing is computed.
"""

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf

from dtransformer.parallel.tracing import trace


@contextlib.contextmanager
def collecting(enabled: bool = True) -> Iterator[dict[str, tf.Tensor]]:
    """Collect what layers report inside the `with` block: a dict of names and tensors.

    Args:
        enabled: False to collect nothing.
    """
    metrics = {} if enabled else None
    with trace.scope(auxiliary_metrics=metrics):
        yield {} if metrics is None else metrics


def is_collecting() -> bool:
    """Return whether reports are collected here."""
    return trace.current().auxiliary_metrics is not None


def report(name: str, compute: Callable[[], tf.Tensor]) -> None:
    """Report a sum, which is computed where reports are collected only.

    Args:
        name: unique in the network, such as a layer's path.
        compute: a function that returns a float32 tensor.
    """
    metrics = trace.current().auxiliary_metrics
    if metrics is not None:
        new = tf.stop_gradient(compute())
        metrics[name] = new if name not in metrics else metrics[name] + new


def report_all(metrics: dict[str, tf.Tensor]) -> None:
    """Report what was collected inside a function."""
    for name, value in metrics.items():
        report(name, lambda value=value: value)
