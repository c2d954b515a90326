"""Pipeline stages: which layers a rank has.

A layer with a `pipeline_stage` is placed: its stage alone has its weights and computes it.
Others have no weights, and every stage that needs their results computes them.

Stages may have several chunks of the network. Its parts are then counted instead: part q
of v·p is a chunk of stage q mod p, and a `pipeline_stage` is the number of a part.
"""

import contextlib

from dtransformer.parallel import job, trace
from dtransformer.parallel.config import get_parallel_config


@contextlib.contextmanager
def view(of):
    """Let placed layers inside the `with` block be called through `of`."""
    with trace.scope(stage_view=of):
        yield of


def current_view():
    """Return what placed layers are called through; None where all are on this rank."""
    return trace.current().stage_view


def num_chunks():
    """Return the number v·p of the parts that the network is divided into."""
    return job.stage()[1] * get_parallel_config().pipeline_chunks


def own_chunks():
    """Return the numbers of the parts that this rank's stage has."""
    own, num_stages = job.stage()
    return range(own, num_chunks(), num_stages)


def stage_after(part):
    """Return the stage that has the part after one."""
    return (part + 1) % job.stage()[1]


def stage_before(part):
    """Return the stage that has the part before one."""
    return (part - 1) % job.stage()[1]


def chunk_of(layer, number):
    """Return which of a number of parts a placed layer is in; -1 means the last one."""
    return layer.pipeline_stage % number if layer.pipeline_stage < 0 else layer.pipeline_stage


def stages_of(layer):
    """Return the stages that have a placed layer's weights, its own first."""
    _, num_stages = job.stage()
    parts = [chunk_of(layer, num_chunks()), *sorted(layer.parts_with_copies)]
    return list(dict.fromkeys(part % num_stages for part in parts))


def is_elsewhere(layer):
    """Return whether other stages than this rank's have the layer's weights."""
    own, num_stages = job.stage()
    if num_stages == 1 or layer.pipeline_stage is None:
        return False
    return own not in stages_of(layer)


def is_here(layer):
    """Return whether this rank has the layer's weights."""
    return not is_elsewhere(layer)


def check_here(layer):
    """Check that a placed layer that is called has its weights on this rank.

    Raises:
        RuntimeError: another stage has them.
    """
    if is_elsewhere(layer):
        raise RuntimeError(
            f"{layer.path} is on stage {stages_of(layer)[0]} of the pipeline, this rank on stage "
            f"{job.stage()[0]}: call fit, evaluate or predict of a Trainer, which go through "
            "all stages"
        )


def placed_layers(network):
    """Return the layers of a network that have a place, without those inside of them."""
    found, inside = [], set()
    for layer in network._flatten_layers():  # the outer ones come first
        if getattr(layer, "pipeline_stage", None) is not None and id(layer) not in inside:
            found.append(layer)
            inside.update(id(one) for one in layer._flatten_layers())
    return found


def weights_of(network, part):
    """Return the trained weights that a part of the network computes with."""
    number = num_chunks()
    return [
        weight
        for layer in placed_layers(network)
        if part == chunk_of(layer, number) or part in layer.parts_with_copies
        for weight in layer.trainable_variables
    ]


def losses_of(network, part):
    """Return the losses that layers of a part have added, those of regularizers included."""
    number = num_chunks()
    layers = [layer for layer in placed_layers(network) if part == chunk_of(layer, number)]
    return [loss for layer in layers for loss in layer.losses]


def shared_weights(network):
    """Return (stages, layer) of each layer whose weights several stages have."""
    layers = [layer for layer in placed_layers(network) if layer.parts_with_copies]
    return [(stages_of(layer), layer) for layer in layers if len(stages_of(layer)) > 1]


def copies(network):
    """Return the weights of this rank that are copies of another stage's."""
    own, num_stages = job.stage()
    if num_stages == 1:
        return []
    shared = [layer for stages, layer in shared_weights(network) if own in stages[1:]]
    return [weight for layer in shared for weight in layer.trainable_variables]
