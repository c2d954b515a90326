"""Logical names of dimensions, and the table that shards them over the mesh.

A weight says `axes=("embed", "mlp")`, an activation is laid out with
`constrain(x, ("batch", "length", "mlp"))`. One table, `LOGICAL_AXES`, maps each logical
name to the mesh axis that shards it. Where there is no mesh both do nothing, and a layer
is an ordinary Keras layer.
"""

import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterable, Mapping, Sequence

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from dtransformer.parallel.config.config import TransformerOpParallelConfig, get_parallel_config
from dtransformer.parallel.ops.custom_gradient import custom_gradient
from dtransformer.parallel.runtime import job
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.scoped import Scoped

# Layouts of tensors on the mesh.


def axis_size(axis: str | None) -> int:
    """Return the number of shards along a mesh axis; 1 for None."""
    return 1 if axis is None else job.mesh().dim_size(axis)


def make_layout(specs: Sequence[str | None]) -> dtensor.Layout:
    """Return the DTensor layout with a mesh axis, or None, for every dimension."""
    return dtensor.Layout([spec or dtensor.UNSHARDED for spec in specs], job.mesh())


def relayout(x: tf.Tensor, specs: Sequence[str | None]) -> tf.Tensor:
    """Change a tensor's layout on the mesh to a mesh axis, or None, for every dimension.

    Where an axis moves from one dimension to another, one of them has to be the first one if there
    are four or more: DTensor's all-to-all gives wrong numbers between the others.
    """
    return dtensor.relayout(x, make_layout(specs))


def laid_out(x: tf.Tensor, specs: Sequence[str | None]) -> tf.Tensor:
    """As `relayout`, of a tensor that as a rule is laid out so already: its gradient is, too.

    `relayout` lays the gradient out like the tensor, which functions keep for it.
    """

    @custom_gradient
    def put(x):
        return relayout(x, specs), lambda dy: relayout(dy, specs)

    return put(x)


def replicate(tensors):
    """Let every device have all of nested tensors; None stays None."""
    return tf.nest.map_structure(
        lambda x: None if x is None else relayout(x, (None,) * len(x.shape)), tensors
    )


# A mesh axis, or None where it is replicated, for every dimension of a tensor.
Specs = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class LogicalAxis:
    """A row of the table.

    Args:
        counts: what the dimension counts.
        sharded_over: a function of the config that returns the mesh axis, or None.
        of_weights: whether weights have it, or activations alone.
    """

    counts: str
    sharded_over: Callable[[TransformerOpParallelConfig], str | None] = lambda config: None
    of_weights: bool = True


def _data(config):
    return "data"


def _model(config):
    return "model"


def _context(config):
    return "context" if config.context_parallel > 1 else None


# A new logical axis is one row here, or one of a config's `parallel_rules`.
_overrides = Scoped("axis_rules", types.MappingProxyType({}), changes_code=True)

LOGICAL_AXES = {
    "batch": LogicalAxis("sentences", _data, of_weights=False),
    "length": LogicalAxis(
        "positions of the sequence that a layer's output has",
        lambda config: _context(config) or ("model" if config.sequence_parallel else None),
        of_weights=False,
    ),
    "inner_length": LogicalAxis(
        "positions of the sequence inside of products and attention", _context, of_weights=False
    ),
    "length_shards": LogicalAxis("shards of the sequence in attention", _context, of_weights=False),
    "memory_length": LogicalAxis("positions of the sequence that is attended to", of_weights=False),
    "embed": LogicalAxis("hidden features"),
    "heads": LogicalAxis("attention heads", _model),
    "head_dim": LogicalAxis("features of one head"),
    "expert": LogicalAxis("experts", lambda config: "data" if config.expert_parallel > 1 else None),
    "mlp": LogicalAxis("features inside the feed-forward layer", _model),
    "vocab": LogicalAxis("entries of the vocabulary, of logits and of the head", _model),
    "vocab_rows": LogicalAxis(
        "rows of an embedding's table", lambda config: None if config.vocab_emb_dp else "model"
    ),
    "position": LogicalAxis("entries of a table of positions"),
    "norm": LogicalAxis("features that a normalization scales"),
}


def rules(config: TransformerOpParallelConfig | None = None) -> dict[str, str | None]:
    """Return the rules: logical name -> mesh axis, None for a dimension that is replicated.

    Args:
        config: a `TransformerOpParallelConfig`; the current global one by default.

    Example:

    >>> rules(dtransformer.TransformerOpParallelConfig(model_parallel=2))["mlp"]
    'model'
    """
    config = config or get_parallel_config()
    table = {name: axis.sharded_over(config) for name, axis in LOGICAL_AXES.items()}
    return {**table, **(config.parallel_rules or {})}


def override_rules(rows: Mapping[str, str | None]) -> contextlib.AbstractContextManager:
    """Replace rows of the rules inside the `with` block."""
    return _overrides.set(types.MappingProxyType({**_overrides.get(), **rows}))


def rules_of_decoding() -> dict[str, None]:
    """Return the rows of the rules for decoding: all rows and positions are on every device."""
    sharded = [name for name in LOGICAL_AXES if mesh_axis(name) == "context"]
    return dict.fromkeys(["batch", *sharded])


def mesh_axis(name: str | None) -> str | None:
    """Return the mesh axis that shards a logical dimension here, or None."""
    if job.mesh() is None or name is None:
        return None
    axis = {**rules(), **_overrides.get()}.get(name)
    return axis if axis in job.mesh().dim_names else None


def weight_specs(axes: tuple, shape: tuple[int, ...], path: str) -> Specs:
    """Return the mesh axis, or None, that shards each dimension of a weight.

    Raises:
        ValueError: a dimension is not divisible, or two are sharded over one mesh axis;
            names the weight.
    """
    specs = tuple(mesh_axis(name) for name in axes)
    for size, name, spec in zip(shape, axes, specs):
        if spec is None:
            continue
        if size % axis_size(spec):
            raise ValueError(
                f"the weight {path} of shape {tuple(shape)} cannot be sharded: its dimension "
                f"{name!r} has {size} elements, and the mesh axis {spec!r} has {axis_size(spec)} "
                f"shards; change the size, or set parallel_rules={{{name!r}: None}}"
            )
        if specs.count(spec) > 1:
            raise ValueError(
                f"the weight {path} with the logical axes {axes} would be sharded twice over the "
                f"mesh axis {spec!r}: set parallel_rules={{{name!r}: None}}"
            )
    return specs


def check_axes(axes: tuple, rank: int, what: str):
    """Check logical names against a number of dimensions.

    Args:
        axes: a tuple with a name of `LOGICAL_AXES` or of the config's
            `parallel_rules`, or None for a dimension that is never sharded, for every
            dimension.
        rank: the number of dimensions.
        what: what is described, for the error.

    Raises:
        ValueError: a name is unknown, or there is not one for every dimension.
    """
    if len(axes) != rank:
        raise ValueError(f"{what} has {rank} dimensions, but its logical axes are {axes}")
    known = rules()
    for axis in axes:
        if axis is not None and axis not in known:
            raise ValueError(
                f"{what} has the logical axis {axis!r}; known are {', '.join(known)}; "
                f"parallel_rules={{{axis!r}: None}} adds one"
            )


def axes_of(variables: Iterable[keras.Variable]) -> set[str | None]:
    """Return the names of the dimensions of variables; those of our layers have them."""
    return {name for v in variables for name in getattr(v, "logical_axes", ())}


def check_rules(used: set[str | None]):
    """Check that every row of the config's `parallel_rules` is about some weight.

    Args:
        used: the logical names of all weights' dimensions.

    Raises:
        ValueError: a row matches nothing.
    """
    of_activations = {name for name, axis in LOGICAL_AXES.items() if not axis.of_weights}
    for name in get_parallel_config().parallel_rules or {}:
        if name not in used | of_activations:
            names = sorted(filter(None, used))
            raise ValueError(
                f"parallel_rules has a row for {name!r}, which no weight of the network has; its "
                f"weights have {', '.join(names) or 'no logical axes'}"
            )


def constrain(x: tf.Tensor, axes: tuple) -> tf.Tensor:
    """Lay a tensor out as the rules say of its logical axes.

    Args:
        x: a tensor.
        axes: a tuple with the logical name, or None, of every dimension.

    Returns:
        The same values, laid out as the rules say; `x` itself where there is no
        mesh. A dimension that the mesh axis does not divide is replicated.
    """
    return _constrained(x, axes, relayout)


def constrain_both(x: tf.Tensor, axes: tuple) -> tf.Tensor:
    """As `constrain`, for a tensor and for its gradient; see `laid_out`."""
    return _constrained(x, axes, laid_out)


def _constrained(x, axes, put):
    check_axes(axes, len(x.shape), "an activation")
    return put(x, activation_specs(axes, x.shape)) if trace.is_on_mesh() else x


def activation_specs(axes: tuple, shape: Iterable[int | None]) -> Specs:
    """Return the mesh axis, or None, that shards each dimension of an activation."""
    specs = [mesh_axis(name) for name in axes]
    return tuple(
        spec if size is not None and size % axis_size(spec) == 0 else None
        for spec, size in zip(specs, shape)
    )
