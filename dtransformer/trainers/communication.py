"""What a training step sends, next to what the theory says."""

import dataclasses
import math
import re

from dtransformer.layers.block import BlockStack
from dtransformer.layers.decoder import TransformerDecoderLayer
from dtransformer.parallel import layout, runtime, stages
from dtransformer.parallel.audit import CommunicationReport, horovod_collectives
from dtransformer.parallel.config import get_parallel_config


def communication_report(network, plane, update_graph, messages=()):
    """Return the `CommunicationReport` of the training step that was compiled last.

    Args:
        network: the `keras.Model` that is trained.
        plane: its compute plane; None where all is on one device.
        update_graph: the graph that the update plane was traced in, or None.
        messages: `Collective`s that the stages of a pipeline send each other.

    Raises:
        ValueError: no step was compiled yet.
    """
    if update_graph is None:
        raise ValueError("no training step is compiled yet: call fit or train_on_batch first")
    over_horovod = horovod_collectives(update_graph, runtime.data_shard()[1])
    if plane is None or layout.get_mesh() is None:
        return CommunicationReport((*messages, *over_horovod))
    names = {layer.name for layer in network._flatten_layers()}
    times = get_parallel_config().micro_batch_num
    on_mesh = times * [
        dataclasses.replace(c, layer=_layer_path(c.layer, names)) for c in plane.collectives()
    ]
    formula = {}
    if hasattr(network, "stream_shapes"):
        formula = block_formula(network, network.stream_shapes(plane.input_shapes))
        formula = {block: times * entries for block, entries in formula.items()}
    return CommunicationReport((*on_mesh, *messages, *over_horovod), formula)


def block_formula(network, stream_shapes):
    """Return the entries that each block's all-reduces sum, by Shoeybi et al., 2019, §3.

    One all-reduce of b·s·h forward and one backward for every attention and every
    feed-forward layer. A block that is recomputed repeats those forward, but for the last
    one, which no gradient needs, unless its sums are kept. To gather an input that is kept
    in slices is half an all-reduce.

    Args:
        network: a `keras.Model`.
        stream_shapes: dict of the name of a stack of blocks and (b, s, h).

    Returns:
        A dict of "stack/block" and a number of entries.
    """
    data_slices = layout.axis_size(layout.mesh_axis("batch"))
    formula = {}
    for stack in network._flatten_layers():
        if isinstance(stack, BlockStack) and stack.name in stream_shapes:
            entries = math.prod(stream_shapes[stack.name]) // data_slices
            for block in filter(stages.is_here, stack.blocks):
                parts = 3 if isinstance(block, TransformerDecoderLayer) else 2
                sums = 2.0 * parts
                if block.recompute_config.recompute:
                    config = block.recompute_config
                    sums += (parts - 1) * config.mp_comm_recompute
                    sums += 0.5 * config.recompute_slice_activation
                formula[f"{stack.name}/{block.name}"] = round(sums * entries)
    return formula


def _layer_path(scope, names):
    """Return the layer's path of an operation's name.

    TensorFlow adds numbers to scopes that it enters again; the trainer's and the network's
    own names come first, the operation's last.
    """
    parts = []
    for part in scope.split("/"):
        base, _, number = part.rpartition("_")
        parts.append(base if part not in names and base and number.isdigit() else part)
    known = [i for i, part in enumerate(parts) if part in names]
    if len(known) > 1:
        return "/".join(parts[known[0] + 1 : known[-1] + 1])
    return parts[known[0]] if known else re.sub(r"(_\d+)+$", "", parts[0])
