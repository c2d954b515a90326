"""Traffic of experts on a mesh by the theory: functions of a `MoEConfig` and a stream's shape.

Reference: Lepikhin et al., 2020, GShard, arXiv 2006.16668, §3.
"""

import math

import tensorflow as tf

from dtransformer.layers.moe import MoE
from dtransformer.parallel.expert_parallel.capacity_slots import capacity
from dtransformer.parallel.expert_parallel.token_groups import axis_of_groups
from dtransformer.parallel.mesh.axis_rules import axis_size, mesh_axis
from dtransformer.parallel.runtime import job


def buffer_elements(layer: MoE, stream_shape: tuple[int, int, int]) -> int:
    """Return the elements of the buffers [g, E, c, h] of a device's groups of tokens.

    Args:
        layer: the `MoE`.
        stream_shape: (b, s, h) of the residual stream.
    """
    batch, length, features = stream_shape
    config, shards = layer.config, axis_size(mesh_axis("batch"))
    if config.expert_group_size is None:
        groups, size = 1, batch * length // shards
        most = capacity(batch * length, config)
    else:
        size = min(config.expert_group_size, length)
        in_sequence = math.ceil(length / size) // axis_size(axis_of_groups(length, size))
        groups = batch // shards * in_sequence
        most = capacity(size, config)
    places = size if most is None else min(most, size)
    return groups * config.expert_num * places * features


def summed_elements(layer: MoE, stream_shape: tuple[int, int, int]) -> tuple[int, int]:
    """Return the elements that all-reduces over the model axis sum, forward and backward.

    Outputs of experts are summed forward, gradients of their inputs backward: for a gate and what it
    multiplies together. Shared experts are an ordinary feed-forward layer.
    """
    elements = buffer_elements(layer, stream_shape)
    shared = 0
    if layer.shared_experts is not None:
        shards = axis_size(mesh_axis("batch")) * axis_size(mesh_axis("length_shards"))
        shared = math.prod(stream_shape) // shards
    return elements + shared, elements + shared


def all_to_all_bytes(layer: MoE, stream_shape: tuple[int, int, int], recomputes: bool) -> int:
    """Return the bytes that a device sends to those that hold other experts.

    The buffers' bytes · (e − 1) / e for each all-to-all: tokens go to experts and outputs come back,
    forward; and so do their gradients, backward. What is recomputed is sent once more.
    """
    shards, item_bytes = axis_size(mesh_axis("expert")), tf.as_dtype(layer.compute_dtype).size
    each = buffer_elements(layer, stream_shape) * item_bytes * (shards - 1) / shards
    return round(each * (6 if recomputes else 4))


def kept_rows(layer: MoE, stream_shape: tuple[int, int, int]) -> float:
    """Return how many rows of features experts are given for a sequence, on all its shards.

    On a mesh those of the buffers; on one device, where none is padded, at most k for each token.
    """
    batch, length, features = stream_shape
    if job.mesh() is None:
        return length * layer.config.num_experts_chosen
    on_shards = buffer_elements(layer, stream_shape) * axis_size(mesh_axis("length_shards"))
    return on_shards / (features * batch / axis_size(mesh_axis("batch")))
