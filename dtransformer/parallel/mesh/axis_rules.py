"""Logical names of dimensions, and the rules that shard them over the mesh.

A weight declares `axes=("embed", "mlp")`, and an activation is laid out with
`constrain(x, ("batch", "length", "mlp"))`. The table `LOGICAL_AXES` maps each logical axis to the
mesh axis that shards it. Without a mesh, both do nothing and a layer is an ordinary Keras layer.
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
from dtransformer.parallel.tracing.trace import Scoped

# Layouts of tensors on the mesh.


def axis_size(axis: str | None) -> int:
    """Return the number of shards along a mesh axis, or 1 for `None`."""
    return 1 if axis is None else job.mesh().dim_size(axis)


def make_layout(specs: Sequence[str | None]) -> dtensor.Layout:
    """Return the DTensor layout with the given mesh axis, or `None`, for each dimension."""
    return dtensor.Layout([spec or dtensor.UNSHARDED for spec in specs], job.mesh())


def relayout(x: tf.Tensor, specs: Sequence[str | None]) -> tf.Tensor:
    """Change a tensor's layout to the given mesh axis, or `None`, for each dimension.

    If an axis moves between dimensions of a tensor with four or more dimensions, one of the two
    must be the first dimension. Otherwise DTensor's all-to-all returns wrong numbers.
    """
    return dtensor.relayout(x, make_layout(specs))


def relayout_with_gradient(x: tf.Tensor, specs: Sequence[str | None]) -> tf.Tensor:
    """Change the layout of a tensor and of its gradient.

    The gradient gets the layout `specs`. With `relayout` it would get the layout of the input, and
    the input would stay in memory until the backward pass. Use this function where inputs usually
    have the layout `specs` already.
    """

    @custom_gradient
    def put(x):
        return relayout(x, specs), lambda dy: relayout(dy, specs)

    return put(x)


def replicate(tensors: object) -> object:
    """Replicate nested tensors on every device. `None` values are kept."""
    return tf.nest.map_structure(
        lambda x: None if x is None else relayout(x, (None,) * len(x.shape)), tensors
    )


# The mesh axis of each dimension of a tensor, or None if it is replicated.
Specs = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class LogicalAxis:
    """Entry of `LOGICAL_AXES`.

    Args:
        counts: String. Description of the dimension.
        sharded_over: Function of the config that returns the mesh axis or `None`.
        of_weights: Whether weights may have this axis. Otherwise only activations have it.
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


_overrides = Scoped("axis_rules", types.MappingProxyType({}), changes_code=True)

# A new logical axis needs an entry here or in a config's `parallel_rules`.
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
    """Return the rules, a dict that maps logical axes to mesh axes or `None` (replicated).

    Args:
        config: `TransformerOpParallelConfig`. Defaults to the global config.

    Example:

    >>> rules(dtransformer.TransformerOpParallelConfig(model_parallel=2))["mlp"]
    'model'
    """
    config = config or get_parallel_config()
    table = {name: axis.sharded_over(config) for name, axis in LOGICAL_AXES.items()}
    return {**table, **(config.parallel_rules or {})}


def override_rules(rows: Mapping[str, str | None]) -> contextlib.AbstractContextManager:
    """Return a context manager that replaces entries of the rules."""
    return _overrides.set(types.MappingProxyType({**_overrides.get(), **rows}))


def current_overrides() -> Mapping[str, str | None]:
    """Return the entries of the rules that `override_rules` replaced."""
    return _overrides.get()


def decoding_rules() -> dict[str, None]:
    """Return the rules to override for decoding, which replicates all rows and positions."""
    sharded = [name for name in LOGICAL_AXES if mesh_axis(name) == "context"]
    return dict.fromkeys(["batch", *sharded])


def mesh_axis(name: str | None) -> str | None:
    """Return the mesh axis that shards a logical axis, or `None`."""
    if job.mesh() is None or name is None:
        return None
    axis = {**rules(), **_overrides.get()}.get(name)
    return axis if axis in job.mesh().dim_names else None


def weight_specs(axes: tuple, shape: tuple[int, ...], path: str) -> Specs:
    """Return the mesh axis, or `None`, that shards each dimension of a weight.

    Raises:
        ValueError: If a dimension is not divisible, or if two dimensions are sharded over the same
            mesh axis. The message has the path of the weight.
    """
    specs = tuple(mesh_axis(name) for name in axes)
    for size, name, spec in zip(shape, axes, specs):
        if spec is None:
            continue
        if size % axis_size(spec):
            raise ValueError(
                f"The weight {path} of shape {tuple(shape)} cannot be sharded: dimension {name!r} "
                f"has {size} elements, but the mesh axis {spec!r} has {axis_size(spec)} shards. "
                f"Change the size, or set `parallel_rules={{{name!r}: None}}`."
            )
        if specs.count(spec) > 1:
            raise ValueError(
                f"The weight {path} with the logical axes {axes} would be sharded twice over the "
                f"mesh axis {spec!r}. Set `parallel_rules={{{name!r}: None}}`."
            )
    return specs


def check_axes(axes: tuple, rank: int, what: str) -> None:
    """Check logical axes against the rules and the number of dimensions.

    Args:
        axes: Tuple with a name from `LOGICAL_AXES` or the config's `parallel_rules` for each
            dimension, or `None` for a dimension that is never sharded.
        rank: Integer. Number of dimensions.
        what: String. Description of the tensor for the error message.

    Raises:
        ValueError: If a name is unknown or the number of names differs from `rank`.
    """
    if len(axes) != rank:
        raise ValueError(f"The logical axes {axes} of {what} do not match its {rank} dimensions.")
    known_axes = rules()
    for axis in axes:
        if axis is not None and axis not in known_axes:
            raise ValueError(
                f"The logical axis {axis!r} of {what} is unknown. Choose one of "
                f"{', '.join(known_axes)}, or add it with `parallel_rules={{{axis!r}: None}}`."
            )


def get_logical_axes(variables: Iterable[keras.Variable]) -> set[str | None]:
    """Return the set of logical axes of variables. Variables without logical axes are skipped."""
    return {name for v in variables for name in getattr(v, "logical_axes", ())}


def check_rules(used: set[str | None]) -> None:
    """Check that every entry of the config's `parallel_rules` matches a weight or an activation.

    Args:
        used: Set of the logical axes of all weights.

    Raises:
        ValueError: If an entry matches nothing.
    """
    activation_axes = {name for name, axis in LOGICAL_AXES.items() if not axis.of_weights}
    for name in get_parallel_config().parallel_rules or {}:
        if name not in used | activation_axes:
            names = sorted(filter(None, used))
            raise ValueError(
                f"`parallel_rules` has an entry for {name!r}, but no weight of the network has this "
                f"axis. Its weights have {', '.join(names) or 'no logical axes'}."
            )


def constrain(x: tf.Tensor, axes: tuple) -> tf.Tensor:
    """Lay out a tensor according to its logical axes.

    Args:
        x: Tensor.
        axes: Tuple with the logical axis of each dimension, or `None`.

    Returns:
        A tensor of the same values. Without a mesh it is `x` itself. A dimension that the mesh axis
        does not divide is replicated.
    """
    return _apply_layout(x, axes, relayout)


def constrain_both(x: tf.Tensor, axes: tuple) -> tf.Tensor:
    """Lay out a tensor and its gradient according to its logical axes. See `constrain`."""
    return _apply_layout(x, axes, relayout_with_gradient)


def _apply_layout(x, axes, put):
    check_axes(axes, len(x.shape), "an activation")
    return put(x, activation_specs(axes, x.shape)) if trace.is_on_mesh() else x


def activation_specs(axes: tuple, shape: Iterable[int | None]) -> Specs:
    """Return the mesh axis, or `None`, that shards each dimension of an activation.

    Dimensions that are unknown or that the mesh axis does not divide are replicated.
    """
    specs = [mesh_axis(name) for name in axes]
    return tuple(
        spec if size is not None and size % axis_size(spec) == 0 else None
        for spec, size in zip(specs, shape)
    )
