"""The context of tracing: what a layer's `call` means where it is being traced.

It is one immutable value, which `scope` replaces inside a `with` block, for the thread that
runs the block. Layers do not read it; what they call does.
"""

import contextlib
import contextvars
import dataclasses
import types


@dataclasses.dataclass(frozen=True)
class TraceContext:
    """What is being traced, and for where.

    Args:
        on_mesh: whether tensors are DTensors, so that `constrain` applies.
        has_gradients: whether gradients may be asked for.
        stored_values: what weights that are made begin with in place of their initializers' values;
            None for these.
        rules: rows that replace those of the axis rules: logical name -> mesh axis or None.
        stage_view: what placed layers are called through in a pipeline; None where this rank
            has all layers.
        unsharding: the `zero.gather.Unsharding` that weights are unsharded for; None where
            none is sharded over ranks.
        kept_sums: (sums, again): those of row-parallel products that `recompute` keeps, and
            whether they are taken from there; None where they are not kept.
        dropout_seed: int32 tensor [2], from which dropout masks are derived; None for
            TensorFlow's global generator.
        dropout_numbers: dict of the id of a dropout layer and the number, a scalar, that its masks
            are drawn by in place of its own.
        trains: whether a trainer's training step is traced, in which what layers do not know of
            themselves draws its masks.
        deferred: dict of what kernels are multiplied with whose gradients are left for later; None
            where they are computed at once.
        auxiliary_metrics: dict of what layers tell besides their results; None where nobody listens.
        calls: dict of the scope of the names in a function that equal blocks share, and the list of
            the scopes in which it is called; None where nobody asks.
        tape_graph: the graph in which the tape of a step was opened; None where it is another's. In
            functions and loops inside of it nobody can say what a tape watches.
        in_loop: whether a loop of `decoding` is traced, in which caches are updated in place.
        collective: name of the collective whose gradient is being made; None outside of one.
        names_are_global: whether collectives have the names that they are given, whatever the
            scopes around. TensorFlow numbers those of branches by what else a function
            computes, which is not the same on ranks that update different weights.
    """

    on_mesh: bool = False
    has_gradients: bool = True
    stored_values: object = None
    rules: types.MappingProxyType = dataclasses.field(
        default_factory=lambda: types.MappingProxyType({})
    )
    stage_view: object = None
    unsharding: object = None
    kept_sums: object = None
    dropout_seed: object = None
    dropout_numbers: types.MappingProxyType = dataclasses.field(
        default_factory=lambda: types.MappingProxyType({})
    )
    trains: bool = False
    deferred: dict | None = None
    auxiliary_metrics: dict | None = None
    calls: dict | None = None
    tape_graph: object = None
    in_loop: bool = False
    collective: str | None = None
    names_are_global: bool = False


_current = contextvars.ContextVar("dtransformer_trace", default=TraceContext())  # noqa: B039


def current():
    """Return the `TraceContext` here."""
    return _current.get()


def is_on_mesh():
    """Return whether tensors are DTensors here."""
    return current().on_mesh


@contextlib.contextmanager
def scope(**fields):
    """Trace what is inside the `with` block with other fields of the context.

    Example:

    >>> with scope(has_gradients=False):
    ...     current().has_gradients
    False
    >>> current().has_gradients
    True
    """
    token = _current.set(dataclasses.replace(_current.get(), **fields))
    try:
        yield _current.get()
    finally:
        _current.reset(token)
