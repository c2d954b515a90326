"""Logical names of dimensions, and the table that cuts them over the island's mesh.

A weight says `axes=("embed", "mlp")`, an activation is pinned with
`constrain(x, ("batch", "length", "mlp"))`. One table maps each logical name to the
mesh axis that cuts it. Where there is no mesh both are no-ops, and a layer is an
ordinary Keras layer.
"""

import contextlib
import types

import tensorflow as tf

from dtransformer.parallel import job, trace
from dtransformer.parallel.config import get_parallel_config
from dtransformer.parallel.dtensor.layouts import axis_size, relayout

# Logical name of a dimension -> what it counts.
LOGICAL_AXES = {
    "batch": "sentences",
    "length": "positions of the sequence a layer's output has",
    "memory_length": "positions of the sequence that is attended to",
    "embed": "hidden features",
    "heads": "attention heads",
    "head_dim": "features of one head",
    "mlp": "features inside the feed-forward layer",
    "vocab": "entries of the vocabulary, of logits and of the head",
    "vocab_rows": "rows of an embedding's table",
    "position": "entries of a table of positions",
    "norm": "features that a normalization scales",
}
# Those that activations alone have.
ACTIVATION_AXES = ("batch", "length", "memory_length")


def rules(config=None):
    """Return the table: logical name -> mesh axis, None for a dimension that stays whole.

    Args:
        config: a `TransformerOpParallelConfig`; the current global one by default.

    Example:

    >>> rules(TransformerOpParallelConfig(model_parallel=2))["mlp"]
    'model'
    """
    config = config or get_parallel_config()
    table = dict.fromkeys(LOGICAL_AXES)
    table.update(batch="data", heads="model", mlp="model", vocab="model")
    if not config.vocab_emb_dp:
        table["vocab_rows"] = "model"
    if config.sequence_parallel:
        table["length"] = "model"
    return {**table, **(config.parallel_rules or {})}


@contextlib.contextmanager
def override_rules(rows):
    """Use other rows of the table inside the `with` block."""
    with trace.scope(rules=types.MappingProxyType({**trace.current().rules, **rows})):
        yield


def mesh_axis(name):
    """Return the mesh axis that cuts a logical dimension here, or None."""
    if job.mesh() is None or name is None:
        return None
    axis = {**rules(), **trace.current().rules}.get(name)
    return axis if axis in job.mesh().dim_names else None


def weight_specs(axes, shape, path):
    """Return the mesh axis, or None, that cuts each dimension of a weight.

    Raises:
        ValueError: a dimension is not divisible, or two are cut over one mesh axis;
            names the weight.
    """
    specs = tuple(mesh_axis(name) for name in axes)
    for dimension, (name, spec) in enumerate(zip(axes, specs)):
        if spec is None:
            continue
        if shape[dimension] % axis_size(spec):
            raise ValueError(
                f"the weight {path} of shape {tuple(shape)} cannot be cut: its dimension "
                f"{name!r} has {shape[dimension]} entries, and the mesh axis {spec!r} has "
                f"{axis_size(spec)} slices; change the size, or set parallel_rules={{{name!r}: None}}"
            )
        if specs.count(spec) > 1:
            raise ValueError(
                f"the weight {path} with the logical axes {axes} would be cut twice over the mesh "
                f"axis {spec!r}: set parallel_rules={{{name!r}: None}}"
            )
    return specs


def with_data_axis(specs, shape, path, dtype, trainable, constraint):
    """Return how a weight is stored: cut over the data axis, too, with `optimizer_shard=3`.

    Args:
        specs: tuple of what cuts each dimension where the weight is used.
        shape, path, dtype, trainable, constraint: the weight's.

    Returns:
        A tuple like `specs`. The first dimension that is whole and divisible is cut; none
        of a weight that is small or excluded, as of one that other ranks update.
    """
    config = get_parallel_config()
    axis = mesh_axis("batch")
    if config.optimizer_shard != 3 or not trainable or axis is None or axis in specs:
        return specs
    local = [size // axis_size(spec) for size, spec in zip(shape, specs)]
    if config.why_whole(path, local, tf.as_dtype(dtype).size, constraint is not None):
        return specs
    for dimension, (size, spec) in enumerate(zip(shape, specs)):
        if spec is None and size % axis_size(axis) == 0:
            return (*specs[:dimension], axis, *specs[dimension + 1 :])
    return specs


def check_axes(axes, rank, what):
    """Check logical names against a number of dimensions.

    Args:
        axes: a tuple with a name of `LOGICAL_AXES` or of the config's
            `parallel_rules`, or None for a dimension that is never cut, for every
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


def axes_of(variables):
    """Return the names of the dimensions of variables; those of our layers have them."""
    return {name for v in variables for name in getattr(v, "logical_axes", ())}


def check_rules(used):
    """Check that every row that the user gave cuts, or keeps whole, some weight.

    Args:
        used: set of the logical names of all weights' dimensions.

    Raises:
        ValueError: a row matches nothing.
    """
    for name in get_parallel_config().parallel_rules or {}:
        if name not in used and name not in ACTIVATION_AXES:
            names = sorted(filter(None, used))
            raise ValueError(
                f"parallel_rules has a row for {name!r}, which no weight of the network has; its "
                f"weights have {', '.join(names) or 'no logical axes'}"
            )


def constrain(x, axes):
    """Pin a tensor's layout to what the rules give its logical axes.

    Args:
        x: a tensor.
        axes: a tuple with the logical name, or None, of every dimension.

    Returns:
        The same values, laid out as the rules say; `x` itself where there is no
        mesh. A dimension that the mesh axis does not divide stays whole.
    """
    check_axes(axes, len(x.shape), "an activation")
    return relayout(x, activation_specs(axes, x.shape)) if trace.is_on_mesh() else x


def activation_specs(axes, shape):
    """Return the mesh axis, or None, that cuts each dimension of an activation."""
    specs = [mesh_axis(name) for name in axes]
    return tuple(
        spec if size is not None and size % axis_size(spec) == 0 else None
        for spec, size in zip(specs, shape)
    )
