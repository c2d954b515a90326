"""Auxiliary metrics: token-weighted sums that layers report during the forward pass.

They are summed over calls, micro-batches and ranks, and have no gradients. Outside of `collecting`
they are not computed.
"""

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf

from dtransformer.parallel.tracing import trace


@contextlib.contextmanager
def collecting(enabled: bool = True) -> Iterator[dict[str, tf.Tensor]]:
    """Collect the metrics that layers report inside the `with` block.

    Args:
        enabled: Boolean. `False` disables metrics inside the block. Defaults to `True`.

    Yields:
        A dict from metric names to tensors, which the block fills.
    """
    metrics = {}
    with trace.auxiliary_metrics.set(metrics if enabled else None):
        yield metrics


def is_collecting() -> bool:
    """Return whether the current code runs inside an enabled `collecting` block."""
    return trace.auxiliary_metrics.get() is not None


def report(name: str, compute: Callable[[], tf.Tensor]) -> None:
    """Add a value to a metric. Outside of `collecting`, do nothing.

    Args:
        name: String that is unique in the network, such as one that starts with a layer's path.
        compute: Function without arguments that returns a float32 tensor.
    """
    metrics = trace.auxiliary_metrics.get()
    if metrics is not None:
        value = tf.stop_gradient(compute())
        metrics[name] = metrics[name] + value if name in metrics else value


def report_all(metrics: dict[str, tf.Tensor]) -> None:
    """Report metrics that a traced function returned, a dict from names to tensors."""
    for name, value in metrics.items():
        report(name, lambda value=value: value)
