"""Context of the computation that is traced, such as whether it has gradients.

`Scoped` values contain the context. `with` blocks replace them, separately in each thread.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import tensorflow as tf

_code_changing = []


class Scoped:
    """Value that `with` blocks replace, separately in each thread.

    Define a scoped value next to the code that reads it. Layers do not read scoped values. They
    call functions that do.

    Args:
        name: String. Name for debugging.
        default: Value outside of all `with` blocks. Defaults to `None`.
        changes_code: Boolean, whether layers are traced differently for different values, see
            `context_signature`. Defaults to `False`.

    Example:

    >>> seed = Scoped("seed")
    >>> with seed.set(3):
    ...     seed.get()
    3
    >>> print(seed.get())
    None
    """

    def __init__(self, name: str, default: object = None, changes_code: bool = False):
        self._variable = contextvars.ContextVar(f"dtransformer_{name}", default=default)
        if changes_code:
            _code_changing.append(self)

    def get(self):
        """Return the current value."""
        return self._variable.get()

    @contextlib.contextmanager
    def set(self, value) -> Iterator:
        """Replace the value inside the `with` block and yield the new value."""
        token = self._variable.set(value)
        try:
            yield value
        finally:
            self._variable.reset(token)


_on_mesh = Scoped("on_mesh", False, changes_code=True)
_has_gradients = Scoped("has_gradients", True, changes_code=True)
_in_training_step = Scoped("in_training_step", False, changes_code=True)
_in_decoding_loop = Scoped("in_decoding_loop", False)
_tape_graph = Scoped("tape_graph")
dropout_seed = Scoped("dropout_seed")
"""Seed of dropout masks, an integer tensor; see `dropout_seed.py`. `None` draws a random one."""
auxiliary_metrics = Scoped("auxiliary_metrics")
"""Dict of the metrics that layers report; see `auxiliary_metrics.py`. `None` disables them."""
traced_bytes = Scoped("traced_bytes")
"""Dict that `record_bytes` extends, or `None`."""


def is_on_mesh() -> bool:
    """Return whether tensors are DTensors. Only then `constrain` has an effect."""
    return _on_mesh.get()


def on_mesh(enabled: bool = True) -> contextlib.AbstractContextManager:
    """Trace the `with` block with DTensors."""
    return _on_mesh.set(enabled)


def has_gradients() -> bool:
    """Return whether gradients of the traced computation may be requested."""
    return _has_gradients.get()


def with_gradients(enabled: bool) -> contextlib.AbstractContextManager:
    """Trace the `with` block for a computation with or without gradients."""
    return _has_gradients.set(enabled)


def is_training_step() -> bool:
    """Return whether a training step of a trainer is traced.

    Noise on embeddings and dropout in adapters depend on this, because they have no `training`
    argument.
    """
    return _in_training_step.get()


def training_step(enabled: bool = True) -> contextlib.AbstractContextManager:
    """Trace the `with` block as part of a training step."""
    return _in_training_step.set(enabled)


@contextlib.contextmanager
def training_forward(seed: tf.Tensor, inputs: object) -> Iterator[dict[str, tf.Tensor]]:
    """Trace the forward pass of a training step in the `with` block.

    Args:
        seed: Int64 tensor [3], or [4] on a mesh: seed, first row and coordinate, see `dropout_seed`.
        inputs: Nested tensors [b, ...], whose rows are counted.

    Yields:
        A dict from names to the auxiliary metrics that layers report in the block.
    """
    num_rows = tf.cast(tf.shape(tf.nest.flatten(inputs)[0])[0], seed.dtype)
    seed = tf.concat([seed[:3], tf.expand_dims(num_rows, 0), seed[3:]], 0)
    with training_step(), dropout_seed.set(seed), auxiliary_metrics.set({}) as metrics:
        yield metrics


def is_decoding_loop() -> bool:
    """Return whether a compiled decoding loop is traced. It updates caches in place."""
    return _in_decoding_loop.get()


def decoding_loop() -> contextlib.AbstractContextManager:
    """Trace the `with` block as part of a compiled decoding loop."""
    return _in_decoding_loop.set(True)


def tape_graph() -> tf.Graph | None:
    """Return the graph of a step's gradient tape, or `None`.

    Only in this graph TensorFlow can report which tensors the tape watches.
    """
    return _tape_graph.get()


def tape_opened_here() -> contextlib.AbstractContextManager:
    """Mark the current graph as the graph of a step's gradient tape."""
    return _tape_graph.set(tf.compat.v1.get_default_graph())


def record_bytes(name: str, size: int) -> None:
    """Record the bytes of tensors that the traced code computes together, for the memory report.

    The largest size of a name counts. Without a dict in `traced_bytes`, do nothing.
    """
    sizes = traced_bytes.get()
    if sizes is not None:
        sizes[name] = max(size, sizes.get(name, 0))


def context_signature() -> tuple[str, ...]:
    """Return the `repr` of each scoped value with `changes_code=True`.

    Code that was traced under one signature must not be reused under another.
    """
    return tuple(repr(scoped.get()) for scoped in _code_changing)
