"""Stage assignment: the model chunk of each layer of a network.

A layer with a `pipeline_stage` is placed: the chunk of that number has its weights and computes
it. `build_stage` gives a place to every layer with weights. Other layers have none, and every stage
that needs their results computes them. Where each stage has one chunk, the chunk's number is the
stage's.
"""

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.runtime import job
from dtransformer.parallel.schedules.placement import Placement


def chunk_of(layer, placement: Placement) -> int:
    """Return which chunk a placed layer is in; a `pipeline_stage` of -1 means the last one.

    Raises:
        ValueError: there is no such stage.
    """
    number, chunks = layer.pipeline_stage, placement.num_chunks
    if not -chunks <= number < chunks:
        raise ValueError(
            f"{layer.path or layer.name} is put on stage {number}, but there are {chunks} stages"
        )
    return number % chunks


def stages_of(layer, placement: Placement) -> list[int]:
    """Return the stages that have a placed layer's weights, its own first."""
    chunks = [chunk_of(layer, placement), *sorted(layer.copied_to)]
    return list(dict.fromkeys(placement.stage_of(chunk) for chunk in chunks))


def is_placed(layer) -> bool:
    """Return whether a layer has a place of its own; those inside of it are with it."""
    return getattr(layer, "pipeline_stage", None) is not None


def placed_layers(network: keras.Model) -> list:
    """Return the layers of a network that have a place, without those inside of them.

    They come in the order in which the network's code names them.
    """
    found = []
    for layer in _compat.flat_layers(network, include_self=False, recursive=False):
        found += [layer] if is_placed(layer) else placed_layers(layer)
    return list(dict.fromkeys(found))


def layers_of(network: keras.Model, chunk: int, placement: Placement) -> list:
    """Return the placed layers of a chunk, without those of which it has copies."""
    return [layer for layer in placed_layers(network) if chunk == chunk_of(layer, placement)]


def layers_of_stages(network: keras.Model, placement: Placement) -> list[list[str]]:
    """Return the names of the placed layers that each stage has, copies included.

    Layers of a model or stack inside the network are named with it.
    """
    found = [[] for _ in range(placement.num_stages)]
    for layer in placed_layers(network):
        path = layer.path or layer.name
        for stage in stages_of(layer, placement):
            found[stage].append(path.removeprefix(f"{network.name}/"))
    return found


def weights_of(
    network: keras.Model, chunk: int, dataflow
) -> tuple[list[keras.Variable], list[keras.Variable]]:
    """Return the weights that a chunk of the network computes with: those trained, and the others.

    Args:
        network: a `keras.Model`.
        chunk: number of the chunk.
        dataflow: the `Dataflow` of the computation, which tells of copies.
    """
    is_trained = {id(weight) for weight in network.trainable_variables}
    weights = [
        weight
        for layer in placed_layers(network)
        if chunk == chunk_of(layer, dataflow.placement) or chunk in dataflow.copies_of(layer)
        for weight in layer.variables
    ]
    trained = [weight for weight in weights if id(weight) in is_trained]
    return trained, [weight for weight in weights if id(weight) not in is_trained]


def has_state(network: keras.Model, chunk: int, placement: Placement) -> bool:
    """Return whether layers that a chunk computes keep what a call may change.

    Those are moving means and seeds of its own layers, and in any layer what Keras does not know:
    a `tf.Variable`, a `tf.random.Generator` or a metric that is an attribute, or in a list or dict
    that is one.
    """
    layers = layers_of(network, chunk, placement)
    inner = [one for layer in layers for one in _compat.flat_layers(layer)]
    weights = {id(weight) for layer in inner for weight in _compat.own_trainable_variables(layer)}
    known = [variable for layer in layers for variable in layer.variables]
    return any(id(variable) not in weights for variable in known) or any(
        isinstance(value, (tf.Variable, tf.random.Generator, keras.metrics.Metric))
        for layer in _compat.flat_layers(network)
        for attribute in vars(layer).values()
        for value in _items(attribute)
    )


def _items(value):
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple, set)) else [value]


def losses_of(network: keras.Model, chunk: int, placement: Placement) -> list[tf.Tensor]:
    """Return the losses that layers of a chunk have added, those of regularizers included."""
    return [loss for layer in layers_of(network, chunk, placement) for loss in layer.losses]


# Local stage: what of a network this rank's pipeline stage has.


def own_chunks() -> tuple[int, ...]:
    """Return the numbers of the model chunks that this rank's stage has."""
    return job.placement().chunks_of(job.stage()[0])


def has_outputs() -> bool:
    """Return whether this rank's stage has the network's outputs."""
    return job.placement().last_chunk in own_chunks()


def is_elsewhere(layer) -> bool:
    """Return whether other stages than this rank's have the layer's weights."""
    own, num_stages = job.stage()
    if num_stages == 1 or layer.pipeline_stage is None:
        return False
    return own not in stages_of(layer, job.placement())


def is_here(layer) -> bool:
    """Return whether this rank has the layer's weights."""
    return not is_elsewhere(layer)


def check_here(layer) -> None:
    """Check that a placed layer that is called has its weights on this rank.

    Raises:
        RuntimeError: another stage has them.
    """
    if is_elsewhere(layer):
        raise RuntimeError(
            f"{layer.path} is on stage {stages_of(layer, job.placement())[0]} of the pipeline, this "
            f"rank on stage {job.stage()[0]}: call fit, evaluate or predict of a Trainer, which go "
            "through all stages"
        )


def shared_layers(network: keras.Model) -> list[tuple]:
    """Return (stages, layer) of each layer whose weights several stages have."""
    placement = job.placement()
    layers = [layer for layer in placed_layers(network) if layer.copied_to]
    shared = [(stages_of(layer, placement), layer) for layer in layers]
    return [(stages, layer) for stages, layer in shared if len(stages) > 1]


def copied_weights(network: keras.Model) -> list[keras.Variable]:
    """Return the weights of this rank that are copies of another stage's."""
    own, num_stages = job.stage()
    if num_stages == 1:
        return []
    copied = [layer for stages, layer in shared_layers(network) if own in stages[1:]]
    return [weight for layer in copied for weight in layer.trainable_variables]
