"""Report of the communication of a training step, next to its theoretical volume."""

import collections
import dataclasses
import math
import re

from dtransformer import _compat
from dtransformer.layers.attention import MultiHeadAttention
from dtransformer.layers.block import BlockStack
from dtransformer.layers.feed_forward import FeedForward
from dtransformer.layers.moe import MoE
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.mesh.axis_rules import axis_size, mesh_axis
from dtransformer.parallel.ops.low_rank import get_low_rank
from dtransformer.parallel.pipeline_parallel.stage_assignment import is_here
from dtransformer.parallel.runtime import job
from dtransformer.parallel.tensor_parallel.quantized_kernel import get_quantized_kernels
from dtransformer.planner.formulas import sums_over_model
from dtransformer.reports import audit
from dtransformer.reports.expert_load import all_to_all_bytes, buffer_elements, summed_elements
from dtransformer.tables import columns


@dataclasses.dataclass(frozen=True)
class CommunicationReport:
    """Communication of one device in a training step. `str(report)` is a table.

    Args:
        collectives: Tuple of `Collective`s.
        formula: Dict from block paths to the theoretical number of all-reduced elements, forward
            and backward. Under sequence parallelism a reduce-scatter and an all-gather together
            count as an all-reduce.
        exchanged: Dict from block paths to the theoretical bytes of the experts' all-to-alls.
    """

    collectives: tuple
    formula: dict = dataclasses.field(default_factory=dict)
    exchanged: dict = dataclasses.field(default_factory=dict)

    def get_layer(self, path):
        """Return the collectives of the layer at `path` and of its sublayers."""
        return [c for c in self.collectives if f"/{path}/" in f"/{c.layer}/"]

    @property
    def bytes_sent(self):
        """Number of bytes that each device sends."""
        return sum(c.bytes_sent for c in self.collectives)

    def totals(self):
        """Return a dict from kinds of layers to `(num_collectives, bytes_sent)` tuples."""
        totals = {}
        for collective in self.collectives:
            kind = layer_kind(collective.layer)
            count, num_bytes = totals.get(kind, (0, 0))
            totals[kind] = count + 1, num_bytes + collective.bytes_sent
        return totals

    def __str__(self):
        header = ("layer", "pass", "kind", "shape", "type", "over", "ranks", "times", "bytes sent")
        times = collections.Counter(self.collectives)
        lines = [header]
        for c, count in times.items():
            shape = "×".join("?" if size is None else str(size) for size in c.shape) or "scalar"
            direction = "update" if c.over == "ranks" else "backward" if c.backward else "forward"
            measure = f"{count * c.bytes_sent:,}" if None not in c.shape else "?"
            kind = c.kind if c.kind == c.sent_as else f"{c.kind} (as {c.sent_as})"
            lines.append(
                (c.layer, direction, kind, shape, c.dtype, c.over, c.group_size, count, measure)
            )
        lines = columns(lines)
        lines += ["", "By kind of layer:"]
        totals = [("layers", "collectives", "bytes sent")]
        totals += [
            (kind, n, f"{measure:,}") for kind, (n, measure) in sorted(self.totals().items())
        ]
        lines += columns([*totals, ("all", len(self.collectives), f"{self.bytes_sent:,}")])
        for title, formula, measure in (
            ("elements summed over the model axis", self.formula, self.summed_elements),
            ("bytes of all-to-alls between experts", self.exchanged, self.exchanged_bytes),
        ):
            if formula:
                rows = [(path, f"{x:,}", f"{measure(path):,}") for path, x in formula.items()]
                lines += ["", f"Theory and measurement by block, {title}:"]
                lines += columns([("block", "theory", "sent"), *rows])
        return "\n".join(lines)

    def exchanged_bytes(self, path):
        """Return the bytes that a device sends in all-to-alls between the experts of a block."""
        collectives = self.get_layer(path)
        all_to_alls = (c for c in collectives if c.over == "data" and c.kind == "all-to-all")
        return sum(c.bytes_sent for c in all_to_alls)

    def summed_elements(self, path):
        """Return the number of elements that a layer sums over the model axis.

        An all-reduce counts fully and every other collective half. A reduce-scatter and an
        all-gather, each implemented by an all-to-all with the shape of all shards, have the volume
        of an all-reduce.
        """
        elements = 0
        for c in self.get_layer(path):
            if c.over == "model" and c.elements > 1:  # A scalar only orders computations.
                elements += c.elements if c.kind == "all-reduce" else c.elements / 2
        return round(elements)


def layer_kind(path):
    """Return a layer's path without block indices, to group equal layers.

    Example:

    >>> layer_kind("encoder/block_3/attention")
    'encoder/block/attention'
    """
    return "/".join(re.sub(r"_\d+$", "", part) for part in path.split("/"))


def communication_report(network, collectives, input_shapes, graphs):
    """Return the communication report of the training step that was compiled last.

    Args:
        network: The trained `keras.Model`.
        collectives: List of `Collective`s of the engine.
        input_shapes: Nested shapes of the inputs that a mesh computes in one call, or `None`.
        graphs: List of `tf.Graph`s with the rest of the step.

    Returns:
        A `CommunicationReport`.
    """
    rank_collectives = [c for graph in graphs for c in audit.rank_collectives(graph)]
    if job.mesh() is None:
        return CommunicationReport((*collectives, *rank_collectives))
    names = {layer.name for layer in _compat.flat_layers(network)}
    layer_collectives = [
        c if c.kind == "send/recv" else dataclasses.replace(c, layer=_layer_path(c.layer, names))
        for c in collectives
    ]
    formula = {}
    exchanged = {}
    if hasattr(network, "stream_shapes"):
        shapes = network.stream_shapes(input_shapes)
        num_micro_batches = get_parallel_config().micro_batch_num
        if axis_size(mesh_axis("mlp")) > 1:
            formula = {k: num_micro_batches * x for k, x in block_formula(network, shapes).items()}
        exchanged = {k: num_micro_batches * x for k, x in expert_formula(network, shapes).items()}
    return CommunicationReport((*layer_collectives, *rank_collectives), formula, exchanged)


def expert_formula(network, stream_shapes):
    """Return the theoretical bytes of all-to-alls between experts.

    Args:
        network, stream_shapes: See `block_formula`.

    Returns:
        A dict from "stack/block" to bytes. Empty without expert parallelism.
    """
    if mesh_axis("expert") is None:
        return {}
    formula = {}
    for stack, block in _blocks(network, stream_shapes):
        for layer in filter(lambda part: isinstance(part, MoE), _sublayers(block)):
            recomputes = block.is_recomputed or layer.is_recomputed
            formula[f"{stack.name}/{block.name}"] = all_to_all_bytes(
                layer, stream_shapes[stack.name], recomputes
            )
    return formula


def _blocks(network, stream_shapes):
    """Yield `(stack, block)` for the blocks of this rank's pipeline stage."""
    for stack in _compat.flat_layers(network):
        if isinstance(stack, BlockStack) and stack.name in stream_shapes:
            for block in filter(is_here, stack.blocks):
                yield stack, block


def block_formula(network, stream_shapes):
    """Return the theoretical number of all-reduced elements of each block.

    `planner.formulas.sums_over_model` counts the all-reduces (Shoeybi et al., 2019, §3). A layer
    has no backward all-reduce if neither it nor an earlier layer is trained. A low-rank adapter of
    a sharded kernel adds b·s·r elements, forward if its inputs are sharded and backward if its
    outputs are. Experts sum their buffers, see `expert_load.summed_elements`.

    Args:
        network: A `keras.Model`.
        stream_shapes: Dict from names of block stacks to (b, s, h).

    Returns:
        A dict from "stack/block" to a number of elements.
    """
    shards = axis_size(mesh_axis("batch")) * axis_size(mesh_axis("length_shards"))
    formula = {}
    positions = {id(weight): i for i, weight in enumerate(network.variables)}
    first_trained = min(
        (positions[id(weight)] for weight in network.trainable_variables), default=len(positions)
    )
    if job.stage()[0]:  # Earlier stages have trained weights.
        first_trained = -1
    for stack, block in _blocks(network, stream_shapes):
        shape = stream_shapes[stack.name]
        elements = math.prod(shape) // shards
        features = shape[-1]
        sublayers = _sublayers(block)
        summed_counts = [
            summed_elements(part, shape) if isinstance(part, MoE) else elements
            for part in sublayers
        ]
        first_positions = [positions[id(part.variables[0])] for part in sublayers]
        config = block.recompute_config
        is_repeated = config.recompute and first_trained < positions[id(block.variables[-1])]
        repeated = sum(summed_counts[:-1])
        if isinstance(sublayers[-1], MoE):  # The gradients of gates need the experts' outputs.
            repeated += buffer_elements(sublayers[-1], shape)
        sums = sums_over_model(
            sum(summed_counts) / elements,
            sum(x for begin, x in zip(first_positions, summed_counts) if first_trained < begin)
            / elements,
            recomputes_block=is_repeated,
            repeats_sums=config.mp_comm_recompute,
            shards_input=config.recompute_slice_activation,
            repeated=repeated / elements,
        )
        kernels = [*block.variables, *get_quantized_kernels(block)]
        norms = sum(map(_num_summed_norms, kernels)) / elements
        sums += sum(map(_sharded_adapter_rank, kernels)) / features + norms
        if is_repeated and config.mp_comm_recompute:
            input_ranks = [_sharded_adapter_rank(weight, of_inputs=True) for weight in kernels]
            sums += sum(input_ranks) / features + norms
        formula[f"{stack.name}/{block.name}"] = round(sums * elements)
    return formula


def _sublayers(block):
    """Return the attentions and the feed-forward layer, or experts, of a block."""
    parts = _compat.flat_layers(block, include_self=False, recursive=False)
    return [part for part in parts if isinstance(part, (MultiHeadAttention, FeedForward))]


def _sharded_adapter_rank(weight, of_inputs=False):
    """Return the rank of a sharded kernel's low-rank adapter, or 0 for other weights.

    Args:
        weight: A Keras variable.
        of_inputs: Boolean, whether to count only kernels with sharded inputs.
    """
    addition = get_low_rank(weight)
    if addition is None:
        return 0
    inputs = weight.logical_axes[0]
    outputs = weight.logical_axes[weight.num_inputs]
    sides = [inputs] if of_inputs else [inputs, outputs]
    is_sharded = any(mesh_axis(side) == "model" for side in sides)
    return addition.a.shape[-1] if is_sharded else 0


def _num_summed_norms(weight):
    """Return the number of magnitude norms that are summed over the model axis."""
    m = getattr(get_low_rank(weight), "m", None)
    return 0 if m is None or mesh_axis(weight.logical_axes[0]) != "model" else math.prod(m.shape)


def _layer_path(scope, names):
    """Return the layer path in an operation's name.

    TensorFlow appends numbers to scopes that are entered again. The path is preceded by the names
    of the trainer and the network, and followed by the name of the operation.
    """
    parts = []
    for part in scope.split("/"):
        base, _, suffix = part.rpartition("_")
        parts.append(base if part not in names and base and suffix.isdigit() else part)
    positions = [i for i, part in enumerate(parts) if part in names]
    if len(positions) > 1:
        return "/".join(parts[positions[0] + 1 : positions[-1] + 1])
    return parts[positions[0]] if positions else re.sub(r"(_\d+)+$", "", parts[0])
