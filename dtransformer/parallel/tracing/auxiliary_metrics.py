"""Auxiliary metrics: token-weighted sums that layers report during the forward pass.

They are summed over calls, micro-batches and ranks, and have no gradients. Outside of `collecting`
nothing is computed.
"""

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf

from dtransformer.parallel.tracing.scoped import Scoped

_collector = Scoped("auxiliary_metrics")


@contextlib.contextmanager
def collecting(enabled: bool = True) -> Iterator[dict[str, tf.Tensor]]:
    """Collect the metrics that layers report inside the `with` block.

    Args:
        enabled: `False` discards them.

    Yields:
        A dict of metric names to tensors, filled during the block.
    """
    metrics = {}
    with _collector.set(metrics if enabled else None):
        yield metrics


def is_collecting() -> bool:
    """Return whether reported metrics are collected here."""
    return _collector.get() is not None


def report(name: str, compute: Callable[[], tf.Tensor]) -> None:
    """Report a sum. It is computed only inside of `collecting`.

    Args:
        name: Unique name in the network, such as a layer's path.
        compute: Function that returns a float32 tensor.
    """
    metrics = _collector.get()
    if metrics is not None:
        value = tf.stop_gradient(compute())
        metrics[name] = metrics[name] + value if name in metrics else value


def report_all(metrics: dict[str, tf.Tensor]) -> None:
    """Report metrics that were collected inside a traced function."""
    for name, value in metrics.items():
        report(name, lambda value=value: value)
