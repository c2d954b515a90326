"""What a device sends in a training step, beside what the theory has for it; see `audit`."""

import collections
import dataclasses
import math
import re

from dtransformer import _compat
from dtransformer.layers.block import BlockStack
from dtransformer.layers.decoder import TransformerDecoderLayer
from dtransformer.parallel import job
from dtransformer.parallel.axis_rules import mesh_axis
from dtransformer.parallel.config import get_parallel_config
from dtransformer.parallel.dtensor.layouts import axis_size
from dtransformer.parallel.pipeline.own_stage import is_here
from dtransformer.reports import audit
from dtransformer.tables import columns


@dataclasses.dataclass(frozen=True)
class CommunicationReport:
    """What a device sends in one step. Its `str` is a table.

    Args:
        collectives: tuple of `Collective`s.
        formula: dict of layer path -> elements of the all-reduces, forward and backward,
            that the theory has for it; of a reduce-scatter and an all-gather together
            under sequence parallelism.
    """

    collectives: tuple
    formula: dict = dataclasses.field(default_factory=dict)

    def of_layer(self, path):
        """Return the collectives of the layer at `path` and of those inside of it."""
        return [c for c in self.collectives if f"/{path}/" in f"/{c.layer}/"]

    @property
    def bytes_sent(self):
        """The bytes that each device sends."""
        return sum(c.bytes_sent for c in self.collectives)

    def totals(self):
        """Return, for every kind of layer, the number of collectives and the bytes sent."""
        totals = {}
        for collective in self.collectives:
            kind = layer_kind(collective.layer)
            number, sent = totals.get(kind, (0, 0))
            totals[kind] = number + 1, sent + collective.bytes_sent
        return totals

    def __str__(self):
        header = ("layer", "pass", "kind", "shape", "type", "over", "ranks", "times", "bytes sent")
        times = collections.Counter(self.collectives)
        lines = [header]
        for c, number in times.items():
            shape = "×".join("?" if size is None else str(size) for size in c.shape) or "scalar"
            direction = "update" if c.over == "horovod" else "backward" if c.backward else "forward"
            sent = f"{number * c.bytes_sent:,}" if None not in c.shape else "?"
            kind = c.kind if c.kind == c.sent_as else f"{c.kind} (as {c.sent_as})"
            lines.append(
                (c.layer, direction, kind, shape, c.dtype, c.over, c.group_size, number, sent)
            )
        lines = columns(lines)
        lines += ["", "By kind of layer:"]
        totals = [("layers", "collectives", "bytes sent")]
        totals += [(kind, n, f"{sent:,}") for kind, (n, sent) in sorted(self.totals().items())]
        lines += columns([*totals, ("all", len(self.collectives), f"{self.bytes_sent:,}")])
        if self.formula:
            lines += ["", "Blocks, elements summed over the model axis, by the theory:"]
            blocks = [("block", "theory", "sent")]
            blocks += [
                (path, f"{elements:,}", f"{self.summed_elements(path):,}")
                for path, elements in self.formula.items()
            ]
            lines += columns(blocks)
        return "\n".join(lines)

    def summed_elements(self, path):
        """Return the elements that all-reduces of a layer sum, or equal in volume, on the mesh.

        Two all-to-alls, of a reduce-scatter and of an all-gather, send what one
        all-reduce does. The shape of an all-to-all is that of all its shards.
        """
        elements = 0
        for c in self.of_layer(path):
            if c.over == "model":
                elements += c.elements if c.kind == "all-reduce" else c.elements / 2
        return round(elements)


def layer_kind(path):
    """Return a layer's path without the numbers of blocks, to sum over equal layers.

    Example:

    >>> layer_kind("encoder/block_3/attention")
    'encoder/block/attention'
    """
    return "/".join(re.sub(r"_\d+$", "", part) for part in path.split("/"))


def communication_report(network, collectives, input_shapes, graph):
    """Return the `CommunicationReport` of the training step that was compiled last.

    Args:
        network: the `keras.Model` that is trained.
        collectives: list of the `Collective`s of the engine.
        input_shapes: nested shapes of the inputs that a mesh computes at once, or None.
        graph: the `tf.Graph` that the optimizer step was traced in.
    """
    over_horovod = audit.horovod_collectives(graph)
    if job.mesh() is None:
        return CommunicationReport((*collectives, *over_horovod))
    names = {layer.name for layer in _compat.flat_layers(network)}
    named = [
        c if c.kind == "send/recv" else dataclasses.replace(c, layer=_layer_path(c.layer, names))
        for c in collectives
    ]
    formula = {}
    if hasattr(network, "stream_shapes"):
        times = get_parallel_config().micro_batch_num
        formula = block_formula(network, network.stream_shapes(input_shapes))
        formula = {block: times * elements for block, elements in formula.items()}
    return CommunicationReport((*named, *over_horovod), formula)


def block_formula(network, stream_shapes):
    """Return the elements that each block's all-reduces sum, by Shoeybi et al., 2019, §3.

    One all-reduce of b·s·h forward and one backward for every attention and every
    feed-forward layer. A block that is recomputed repeats those forward, but for the last
    one, which no gradient needs, unless its sums are kept. To all-gather an input that
    is kept sharded is half an all-reduce.

    Args:
        network: a `keras.Model`.
        stream_shapes: dict of the name of a stack of blocks and (b, s, h).

    Returns:
        A dict of "stack/block" and a number of elements.
    """
    data_shards = axis_size(mesh_axis("batch"))
    formula = {}
    for stack in _compat.flat_layers(network):
        if isinstance(stack, BlockStack) and stack.name in stream_shapes:
            elements = math.prod(stream_shapes[stack.name]) // data_shards
            for block in filter(is_here, stack.blocks):
                parts = 3 if isinstance(block, TransformerDecoderLayer) else 2
                sums = 2.0 * parts
                if block.recompute_config.recompute:
                    config = block.recompute_config
                    sums += (parts - 1) * config.mp_comm_recompute
                    sums += 0.5 * config.recompute_slice_activation
                formula[f"{stack.name}/{block.name}"] = round(sums * elements)
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
