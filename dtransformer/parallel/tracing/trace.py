"""Properties of the computation that is traced, such as whether it has gradients."""

import contextlib

import tensorflow as tf

from dtransformer.parallel.tracing.scoped import Scoped

_on_mesh = Scoped("on_mesh", False, changes_code=True)
_has_gradients = Scoped("has_gradients", True, changes_code=True)
_in_training_step = Scoped("in_training_step", False, changes_code=True)
_in_decoding_loop = Scoped("in_decoding_loop", False)
_tape_graph = Scoped("tape_graph")


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


def is_decoding_loop() -> bool:
    """Return whether a compiled decoding loop is traced. It updates caches in place."""
    return _in_decoding_loop.get()


def decoding_loop() -> contextlib.AbstractContextManager:
    """Trace the `with` block as part of a compiled decoding loop."""
    return _in_decoding_loop.set(True)


def tape_graph() -> tf.Graph | None:
    """Return the graph in which a step opens its gradient tape, or `None`.

    Only in this graph TensorFlow can report which tensors the tape watches.
    """
    return _tape_graph.get()


def tape_opened_here() -> contextlib.AbstractContextManager:
    """Mark the current graph as the graph of a step's gradient tape."""
    return _tape_graph.set(tf.compat.v1.get_default_graph())
