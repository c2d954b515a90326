"""Stage assignment: the model chunk of each layer of a network.

A layer with a `pipeline_stage` is placed: the chunk with that index has its weights and computes
it. `build_stage` places every layer with weights. The other layers have no weights, and each stage
that needs their results computes them. With one chunk per stage, the chunk index equals the stage
index.
"""

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.runtime import job
from dtransformer.parallel.schedules.placement import Placement
from dtransformer.parallel.tracing.added_losses import may_add_losses


def get_chunk(layer, placement: Placement) -> int:
    """Return the index of a placed layer's model chunk.

    Negative values of `pipeline_stage` count from the end.

    Raises:
        ValueError: If `pipeline_stage` is out of range.
    """
    index = layer.pipeline_stage
    chunks = placement.num_chunks
    if not -chunks <= index < chunks:
        raise ValueError(
            f"`pipeline_stage={index}` of {layer.path or layer.name} is out of range: there are "
            f"{chunks} stages."
        )
    return index % chunks


def get_stages(layer, placement: Placement) -> list[int]:
    """Return the stages that have a placed layer's weights, starting with the layer's stage."""
    chunks = [get_chunk(layer, placement), *sorted(layer.copy_chunks)]
    return list(dict.fromkeys(placement.get_stage(chunk) for chunk in chunks))


def can_be_copied(layer) -> bool:
    """Return whether several chunks can compute calls of a layer.

    The layer must not have state, metrics or added losses, whose changes would belong to one chunk.
    """
    for inner in _compat.flat_layers(layer):
        weights = {id(weight) for weight in _compat.direct_trainable_variables(inner)}
        has_state = any(id(variable) not in weights for variable in _compat.direct_variables(inner))
        reports_sums = inner.metrics or getattr(inner, "aux_loss_is_mean", False)
        if has_state or reports_sums or may_add_losses(inner):
            return False
    return True


def is_placed(layer) -> bool:
    """Return whether a layer has a `pipeline_stage`. Its inner layers belong to the same stage."""
    return getattr(layer, "pipeline_stage", None) is not None


def placed_layers(network: keras.Model) -> list:
    """Return the placed layers of a network, without their inner layers.

    Their order is the network's tracking order.
    """
    placed = []
    for layer in _compat.flat_layers(network, include_self=False, recursive=False):
        placed += [layer] if is_placed(layer) else placed_layers(layer)
    return list(dict.fromkeys(placed))


def get_chunk_layers(network: keras.Model, chunk: int, placement: Placement) -> list:
    """Return the placed layers of a chunk, without layers whose weights it has as copies."""
    return [layer for layer in placed_layers(network) if chunk == get_chunk(layer, placement)]


def get_stage_layer_names(network: keras.Model, placement: Placement) -> list[list[str]]:
    """Return the names of the placed layers of each stage, including copies.

    Names of layers in an inner model or stack contain its path.
    """
    names = [[] for _ in range(placement.num_stages)]
    for layer in placed_layers(network):
        path = layer.path or layer.name
        for stage in get_stages(layer, placement):
            names[stage].append(path.removeprefix(f"{network.name}/"))
    return names


def get_chunk_weights(
    network: keras.Model, chunk: int, dataflow
) -> tuple[list[keras.Variable], list[keras.Variable]]:
    """Return the trained weights and the other weights of a chunk.

    Args:
        network: `keras.Model`.
        chunk: Integer. Index of the chunk.
        dataflow: `Dataflow` of the computation, which lists the copies.

    Returns:
        A `(trained, others)` tuple of lists of Keras variables.
    """
    is_trained = {id(weight) for weight in network.trainable_variables}
    weights = [
        weight
        for layer in placed_layers(network)
        if chunk == get_chunk(layer, dataflow.placement) or chunk in dataflow.get_copy_chunks(layer)
        for weight in layer.variables
    ]
    weights = list({id(weight): weight for weight in weights}.values())
    trained = [weight for weight in weights if id(weight) in is_trained]
    return trained, [weight for weight in weights if id(weight) not in is_trained]


def has_state(network: keras.Model, chunk: int, placement: Placement) -> bool:
    """Return whether layers of a chunk have state that a call may change.

    This includes moving means and seeds of the chunk's layers, and state unknown to Keras in any
    layer: a `tf.Variable`, a `tf.random.Generator` or a metric in an attribute, or in a list or
    dict in one.
    """
    layers = get_chunk_layers(network, chunk, placement)
    inner = [layer_inside for layer in layers for layer_inside in _compat.flat_layers(layer)]
    weights = {
        id(weight) for layer in inner for weight in _compat.direct_trainable_variables(layer)
    }
    variables = [variable for layer in layers for variable in layer.variables]
    return any(id(variable) not in weights for variable in variables) or any(
        isinstance(value, (tf.Variable, tf.random.Generator, keras.metrics.Metric))
        for layer in _compat.flat_layers(network)
        for attribute in vars(layer).values()
        for value in _items(attribute)
    )


def _items(value):
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple, set)) else [value]


def get_chunk_losses(network: keras.Model, chunk: int, placement: Placement) -> list[tf.Tensor]:
    """Return the losses added by the layers of a chunk, including regularization losses."""
    return [loss for layer in get_chunk_layers(network, chunk, placement) for loss in layer.losses]


# The functions below refer to the pipeline stage of this rank.


def local_chunks() -> tuple[int, ...]:
    """Return the indices of the model chunks on this rank's stage."""
    return job.placement().get_chunks(job.stage()[0])


def has_outputs() -> bool:
    """Return whether this rank's stage computes the network's outputs."""
    return job.placement().last_chunk in local_chunks()


def is_elsewhere(layer) -> bool:
    """Return whether only other stages have the layer's weights."""
    stage, num_stages = job.stage()
    if num_stages == 1 or layer.pipeline_stage is None:
        return False
    return stage not in get_stages(layer, job.placement())


def is_here(layer) -> bool:
    """Return whether this rank has the layer's weights.

    Layers without a stage are on every rank.
    """
    return not is_elsewhere(layer)


def check_here(layer) -> None:
    """Check that this rank has the weights of a placed layer.

    Raises:
        RuntimeError: If only other stages have them.
    """
    if is_elsewhere(layer):
        raise RuntimeError(
            f"{layer.path} is on stage {get_stages(layer, job.placement())[0]} of the pipeline, but "
            f"this rank is on stage {job.stage()[0]}. Call `fit`, `evaluate` or `predict` of a "
            "Trainer, which run all stages."
        )


def shared_layers(network: keras.Model) -> list[tuple]:
    """Return a list of `(stages, layer)` for the layers whose weights several stages have."""
    placement = job.placement()
    layers = [layer for layer in placed_layers(network) if layer.copy_chunks]
    shared = [(get_stages(layer, placement), layer) for layer in layers]
    return [(stages, layer) for stages, layer in shared if len(stages) > 1]


def copied_weights(network: keras.Model) -> list[keras.Variable]:
    """Return this rank's trainable weights that are copies of another stage's weights."""
    stage, num_stages = job.stage()
    if num_stages == 1:
        return []
    copied = [layer for stages, layer in shared_layers(network) if stage in stages[1:]]
    return [weight for layer in copied for weight in layer.trainable_variables]
