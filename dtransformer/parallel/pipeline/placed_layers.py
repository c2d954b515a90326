"""Which model chunk the layers of a network are in.

A layer with a `pipeline_stage` is placed: the chunk of that number has its weights and computes
it. Other layers have no weights, and every stage that needs their results computes them. Where
each stage has one chunk, the chunk's number is the stage's.
"""

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.pipeline.placement import Placement


def chunk_of(layer, placement: Placement) -> int:
    """Return which chunk a placed layer is in; a `pipeline_stage` of -1 means the last one."""
    number = layer.pipeline_stage
    return number % placement.num_chunks if number < 0 else number


def stages_of(layer, placement: Placement) -> list[int]:
    """Return the stages that have a placed layer's weights, its own first."""
    chunks = [chunk_of(layer, placement), *sorted(layer.copied_to)]
    return list(dict.fromkeys(placement.stage_of(chunk) for chunk in chunks))


def placed_layers(network: keras.Model) -> list:
    """Return the layers of a network that have a place, without those inside of them."""
    found, inside = [], set()
    for layer in _compat.flat_layers(network):  # the outer ones come first
        if getattr(layer, "pipeline_stage", None) is not None and id(layer) not in inside:
            found.append(layer)
            inside.update(id(one) for one in _compat.flat_layers(layer))
    return found


def trained_weights_of(network: keras.Model, chunk: int, dataflow) -> list[keras.Variable]:
    """Return the trained weights that a chunk of the network computes with.

    Args:
        network: a `keras.Model`.
        chunk: number of the chunk.
        dataflow: the `Dataflow` of the computation, which tells of copies.
    """
    return [
        weight
        for layer in placed_layers(network)
        if chunk == chunk_of(layer, dataflow.placement) or chunk in dataflow.copies_of(layer)
        for weight in layer.trainable_variables
    ]


def losses_of(network: keras.Model, chunk: int, placement: Placement) -> list[tf.Tensor]:
    """Return the losses that layers of a chunk have added, those of regularizers included."""
    layers = [layer for layer in placed_layers(network) if chunk == chunk_of(layer, placement)]
    return [loss for layer in layers for loss in layer.losses]
