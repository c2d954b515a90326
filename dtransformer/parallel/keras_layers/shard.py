"""Shard the weights of Keras' layers over the mesh."""

import math

import keras

from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.initial_broadcast import broadcast_values
from dtransformer.parallel.keras_layers.layout_map import Specs
from dtransformer.parallel.keras_layers.layouts import WeightLayout, weight_layouts
from dtransformer.parallel.mesh.variable import shard_in_place
from dtransformer.parallel.pipeline_parallel.stage_weights import all_weights
from dtransformer.parallel.runtime import job
from dtransformer.parallel.variable_factory import may_shard_over_data, stored_specs
from dtransformer.parallel.weights.sharded_variable import ShardedVariable

# Extra mesh axes that shard a weight in memory. Computations all-gather it over them.
_STORAGE_AXES = ("data",)


def layouts_on_mesh(network: keras.Model) -> list[WeightLayout]:
    """Return the layouts of the weights of Keras' layers on the current mesh; see `weight_layouts`.

    Without a mesh the result is empty.
    """
    mesh = job.mesh()
    if mesh is None:
        return []
    sizes = {name: mesh.dim_size(name) for name in mesh.dim_names}
    return weight_layouts(network, get_parallel_config(), sizes)


def shard_keras_layers(network: keras.Model) -> None:
    """Shard the weights of Keras' layers in place, with rank 0's values, and print the share.

    All ranks must call this function after they have built the network, or their pipeline stage.

    Raises:
        ValueError: If a layout is invalid; see `weight_layouts`.
    """
    layouts = layouts_on_mesh(network)
    local_ids = {id(variable) for variable in network.variables}
    local = [
        layout
        for layout in layouts
        if id(layout.variable) in local_ids and not isinstance(layout.variable, ShardedVariable)
    ]
    _copy_first_values([layout.variable for layout in local])
    for layout in local:
        specs = storage_specs(layout)
        if any(specs):
            shard_in_place(layout.variable, specs, specs_in_use(layout.specs))
    has_matrices = any(len(layout.variable.shape) > 1 for layout in layouts)
    if has_matrices and job.is_chief() and get_parallel_config().model_parallel > 1:
        print(_summary(network, layouts))


def specs_in_use(specs: Specs) -> Specs:
    """Return the specs of a weight inside computations: without the axes of its storage only."""
    return tuple(None if axis in _STORAGE_AXES else axis for axis in specs)


def storage_specs(layout: WeightLayout) -> Specs:
    """Return the mesh axis, or `None`, that shards each dimension of a weight in memory.

    With `optimizer_shard=3` this includes the data axis.
    """
    variable = layout.variable
    specs = layout.specs
    has_constraint = variable.constraint is not None
    shape = tuple(variable.shape)
    if variable.trainable and may_shard_over_data(
        variable.path, shape, specs, variable.dtype, has_constraint
    ):
        return stored_specs(specs, shape)
    return specs


def _copy_first_values(variables):
    """Copy the first rank's values to all ranks that share the mesh, before they are sharded."""
    has_stages = job.stage()[1] > 1
    group = job.model_parallel_group() if has_stages else job.world_group()
    if variables and group.size > 1:
        broadcast_values(variables, group)


def _summary(network, layouts):
    """Return a line with the share of the parameters that the model axis shards."""
    with_axes = [v for v in all_weights(network) if hasattr(v, "logical_axes")]
    total = sum(layout.num_elements for layout in layouts)
    total += sum(math.prod(variable.shape) for variable in with_axes)
    sharded = sum(layout.num_elements for layout in layouts if layout.is_sharded)
    sharded += sum(
        math.prod(variable.shape)
        for variable in with_axes
        if "model" in getattr(variable, "specs", ())
    )
    percent = math.floor(1000 * sharded / total) / 10  # 100 % means all.
    return (
        f"model_parallel={get_parallel_config().model_parallel} shards {percent}% of the "
        f"{total:,} parameters. print(trainer.plan()) lists the replicated weights."
    )
