"""Local stage: what of a network this rank's pipeline stage has."""

import keras

from dtransformer.parallel.pipeline_parallel.stage_assignment import placed_layers, stages_of
from dtransformer.parallel.runtime import job


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
