"""Report of a rank's memory: planned by theory, next to measured bytes.

References: model states, Rajbhandari et al., 2020, arXiv 1910.02054, §3; activations,
Korthikanti et al., 2022, arXiv 2205.05198, §4 and §5.
"""

import dataclasses
import math
import resource

import tensorflow as tf

from dtransformer import _compat
from dtransformer.block_forms import Latent
from dtransformer.layers.attention_core import implementation_for
from dtransformer.layers.block import BlockStack
from dtransformer.layers.decoder import TransformerDecoderLayer
from dtransformer.layers.moe import MoE
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.mesh.axis_rules import axis_size, mesh_axis
from dtransformer.parallel.pipeline_parallel.stage_assignment import is_here
from dtransformer.parallel.runtime import job
from dtransformer.parallel.runtime.devices import device_type, logical_gpus
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.weights.sharded_variable import get_local_shards
from dtransformer.parallel.zero.variables import (
    FlatShardedVariable,
    FullyShardedVariable,
    MasterShardedVariable,
)
from dtransformer.planner.formulas import NCCL_BYTES, BlockSizes, saved_activation_bytes
from dtransformer.reports.expert_load import num_expert_rows
from dtransformer.tables import columns


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """Memory of one kind.

    Args:
        what: "weights", "gradients", "optimizer states" or "activations". With `CrossEntropyLoss` and
            batches of fixed size also "logits": the logits that the loss computes together, of one
            chunk if it computes chunks, with their gradient. On GPUs also "NCCL's buffers", which
            TensorFlow's allocator does not include.
        planned: Planned bytes on this rank.
        measured: Bytes of existing tensors, or `None` if unknown.
    """

    what: str
    planned: int
    measured: int | None = None


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Memory of this rank. `str(report)` is a table.

    Args:
        rows: Tuple of `MemoryRow`s.
        peak: Peak memory of the process, or of its GPUs, in bytes.
        attention: Attention implementation of each stack of blocks, as text.
    """

    rows: tuple
    peak: int
    attention: str = ""

    def __getitem__(self, what):
        """Return the row of a kind of memory."""
        return next(row for row in self.rows if row.what == what)

    def __str__(self):

        def number(value):
            return "–" if value is None else f"{value:,}"

        lines = [("bytes of this rank", "planned", "measured")]
        lines += [(row.what, number(row.planned), number(row.measured)) for row in self.rows]
        lines.append(("all", number(sum(row.planned for row in self.rows)), "–"))
        lines.append(("peak of the process", "–", number(self.peak)))
        table = "\n".join(columns(lines, right=(1, 2)))
        return f"{table}\nattention: {self.attention}" if self.attention else table


def memory_report(
    network, teacher, optimizer, update, input_shapes, num_stored_passes, traced_bytes
):
    """Return the memory report of a trainer that has run a step.

    Args:
        network: The `keras.Model`.
        teacher: Frozen `keras.Model` that is computed in the same step, or `None`.
        optimizer: The network's Keras optimizer.
        update: Its `ShardedOptimizer`.
        input_shapes: Nested shapes of the inputs that this rank's mesh computes in one call, or
            `None`.
        num_stored_passes: Number of such inputs whose activations are stored simultaneously.
        traced_bytes: Dict with the bytes of this rank's `"gradients"`, and of the `"logits"` that a
            device computes together. Without them the report has no row for logits.

    Returns:
        A `MemoryReport`.
    """
    plan = update.partition
    trained = network.trainable_variables
    sharded_weights = {w.path: w for w in trained if isinstance(w, FlatShardedVariable)}
    master_weights = [w for w in trained if isinstance(w, MasterShardedVariable)]
    frozen = [*network.non_trainable_variables]
    if teacher is not None:
        frozen += teacher.variables
    frozen_copies = [w.copy for w in frozen if isinstance(w, MasterShardedVariable)]
    other_weights = get_local_shards(frozen) + frozen_copies
    weights = get_local_shards(w for w in trained if not isinstance(w, MasterShardedVariable))
    weights += [w.copy for w in master_weights] + other_weights
    states = [v for v in optimizer.variables if v.shape.rank]
    planned_states = _state_bytes(optimizer, states, update)
    states += get_local_shards(master_weights)
    planned_weights = _bytes(other_weights)
    planned_gradients = 0
    for row in plan.parameters:
        kind = sharded_weights.get(row.path)
        planned_weights += _weight_bytes(row, kind)
        if isinstance(kind, MasterShardedVariable):
            planned_states += row.updated_elements(plan.index) * row.item_bytes
        if update.stores_sums or isinstance(kind, FullyShardedVariable):
            planned_gradients += row.shard_elements(plan.index) * row.item_bytes
        else:
            planned_gradients += row.num_elements * _item_bytes(row, kind)
    rows = (
        MemoryRow("weights", planned_weights, _bytes(weights)),
        MemoryRow("gradients", planned_gradients, traced_bytes["gradients"]),
        MemoryRow("optimizer states", planned_states, _bytes(states)),
        MemoryRow("activations", activation_bytes(network, input_shapes, num_stored_passes)),
    )
    if "logits" in traced_bytes:
        rows += (MemoryRow("logits", traced_bytes["logits"]),)
    # Communication between several logical GPUs goes through the host, without NCCL.
    if device_type() == "GPU" and logical_gpus() == 1:
        rows += (MemoryRow("NCCL's buffers", NCCL_BYTES * _num_communicators()),)
    return MemoryReport(rows, _peak(), _describe_attention(network, input_shapes))


def _num_communicators():
    """Return the number of NCCL communicators: one per process group, mesh axis and mesh."""
    axes = job.mesh().dim_names if job.mesh() is not None else []
    return job.current().groups.num_communicators + len(axes) + (len(axes) > 1)


def _state_bytes(optimizer, states, update):
    """Return the planned bytes of an optimizer's states.

    States in the shape of a parameter count per updated element. Others, such as Adafactor's row
    statistics, count with their actual size.
    """
    plan = update.partition
    remaining = _bytes(states)
    planned = 0
    lists = _compat.optimizer_states(getattr(optimizer, "inner_optimizer", optimizer)).values()
    lists = [x for x in lists if isinstance(x, list) and len(x) == len(update.units)]
    for unit_index, unit in enumerate(update.units):
        rows = [plan.parameters[i] for i in unit.positions]
        shape = unit.parameter.shape
        unit_states = [x[unit_index] for x in lists if x[unit_index] is not None]
        unit_states = [v for v in unit_states if tuple(v.shape) == tuple(shape)]
        remaining -= _bytes(unit_states)
        state_item_bytes = sum(tf.as_dtype(v.dtype).size for v in unit_states)
        planned += state_item_bytes * sum(row.updated_elements(plan.index) for row in rows)
    return planned + remaining


def _item_bytes(row, variable):
    """Return the bytes per element of the weight that layers compute with."""
    return (
        variable.copy.dtype.size if isinstance(variable, MasterShardedVariable) else row.item_bytes
    )


def _weight_bytes(row, variable):
    is_unsharded = isinstance(variable, FullyShardedVariable)
    elements = max(row.division.sizes) if is_unsharded else row.num_elements
    return elements * _item_bytes(row, variable)


def activation_bytes(network, input_shapes, num_stored_passes=1):
    """Return the bytes of the activations that blocks save for the backward pass.

    The result is for one device and the blocks of its pipeline stage, see
    `planner.formulas.saved_activation_bytes`. Under `context_parallel` a device saves its shard of each
    sequence.

    Args:
        network: A `keras.Model`. Without a method `stream_shapes` the result is 0.
        input_shapes: Nested shapes of the inputs that the mesh computes in one call.
        num_stored_passes: Number of such inputs whose activations are stored simultaneously.
    """
    config = get_parallel_config()
    total = 0
    batch_fraction = (
        num_stored_passes / axis_size(mesh_axis("batch")) / axis_size(mesh_axis("length_shards"))
    )
    item = tf.as_dtype(network.compute_dtype).size
    for stack, (b, s, h), memory in _iterate_stacks(network, input_shapes):
        for block in filter(is_here, stack.blocks):
            lengths = _attended_lengths(block, s, memory)
            implementations = [_implementation(stack, s, length) for length in lengths]
            total += (
                b
                * batch_fraction
                * _block_bytes(block, (b, s, h), lengths, implementations, item, config)
            )
    return round(total)


def _iterate_stacks(network, input_shapes):
    """Yield `(stack, stream_shape, memory_length)` for each stack of blocks."""
    if not hasattr(network, "stream_shapes") or input_shapes is None:
        return
    streams = network.stream_shapes(input_shapes)
    for stack in _compat.flat_layers(network):
        if isinstance(stack, BlockStack) and stack.name in streams:
            yield stack, streams[stack.name], next(iter(streams.values()))[1]


def _attended_lengths(block, length, memory):
    """Return the number of attended positions for each attention of a block."""
    return [length, memory] if isinstance(block, TransformerDecoderLayer) else [length]


def _describe_attention(network, input_shapes):
    """Return a text with the attention implementation of each stack."""
    descriptions = []
    for stack, (_, s, _), memory in _iterate_stacks(network, input_shapes):
        if stack.blocks:
            lengths = _attended_lengths(stack.blocks[0], s, memory)
            implementations = dict.fromkeys(_implementation(stack, s, length) for length in lengths)
            descriptions.append(f"{stack.name} {' and '.join(implementations)}")
    return ", ".join(descriptions)


def _implementation(stack, num_queries, num_keys):
    """Return the attention implementation of a stack's blocks, without regard to masks."""
    if mesh_axis("length_shards") is not None:
        return "blockwise"
    arguments = stack.blocks[0].arguments | stack.arguments
    n = arguments["num_heads"]
    bias = arguments.get("alibi") or arguments["relative_ranges"] is not None
    d = arguments.get("head_dim") or arguments["hidden_size"] // n
    dropout = arguments["attention_dropout_rate"]
    sizes = [(n, num_queries), (arguments.get("num_kv_heads") or n, num_keys)]
    q, k = (tf.TensorSpec([1, m, length, d], stack.compute_dtype) for m, length in sizes)
    options = {"bias": bias, "soft_cap": arguments.get("soft_cap"), "dropout": dropout or None}
    with tf.Graph().as_default(), trace.on_mesh(job.mesh() is not None):
        return implementation_for(arguments.get("implementation", "auto"), q, k, **options)


def _block_bytes(block, shape, lengths, implementations, item, config):
    """Return the bytes that a block saves per sequence.

    Args:
        block: The block.
        shape: Shape (b, s, h) of its stream.
        lengths: Number of attended positions for each of its attentions.
        implementations: Implementation of each attention.
        item: Bytes of an activation element.
        config: The parallel config.
    """
    recompute = block.recompute_config
    options = block.arguments
    _, s, h = shape
    experts = {}
    if isinstance(feed_forward := getattr(block, "feed_forward", None), MoE):
        experts["expert_rows"] = num_expert_rows(feed_forward, shape)
        experts["experts_chosen"] = feed_forward.config.num_experts_chosen
        experts["shared_experts"] = feed_forward.config.shared_experts
    inner = feed_forward.ffn_hidden_size if experts else options["ffn_hidden_size"]
    n = options["num_heads"]
    latent = Latent.from_sizes(options.get("latent"))
    sizes = BlockSizes(
        length=s,
        attended=lengths,
        hidden_size=h,
        num_heads=n,
        head_dim=options.get("head_dim") or h // n,
        num_kv_heads=options.get("num_kv_heads") or n,
        ffn_hidden_size=inner,
        gated=options["gated"],
        sublayer_norms=block.placement.norms_per_sublayer,
        latent_features=latent.features if latent is not None else 0,
        **experts,
    )
    return saved_activation_bytes(
        sizes,
        item_bytes=item,
        model_parallel=config.model_parallel,
        is_sequence_sharded=config.sequence_parallel,
        recomputes_block=recompute.recompute,
        is_input_sharded=recompute.recompute_slice_activation,
        recomputed=recompute.select,
        by_blocks=[kind != "reference" for kind in implementations],
    )


def _bytes(variables):
    return sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)


def _peak():
    if device_type() == "GPU":
        devices = [d.name.removeprefix("/device:") for d in tf.config.list_logical_devices("GPU")]
        return sum(tf.config.experimental.get_memory_info(name)["peak"] for name in devices)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
