"""Memory of a rank by kind, computed for many layouts together."""

import functools
import typing

import numpy as np

from dtransformer.limits import MIN_BLOCKWISE_SCORES, max_chunk_tokens
from dtransformer.planner.formulas import (
    BlockSizes,
    micro_batches_alive,
    saved_activation_bytes,
    state_bytes,
)
from dtransformer.planner.job import ParameterBytes
from dtransformer.planner.layouts import Layouts
from dtransformer.planner.shape import QUANTIZED_BYTES, BlockKind, ModelShape
from dtransformer.planner.stages import StageKind, worst_stage_costs


class Memory(typing.NamedTuple):
    """Bytes by kind on the rank that needs the most memory. Every field is an array [N].

    Args:
        weights, gradients, states: Model weights, their gradients and the optimizer's states.
        activations: Activations that blocks save for their backward pass.
        logits: Logits with their gradient, and saved embeddings.
        buffers: Unsharded weights of blocks at level 3. Reduction buckets at levels 1 and 2, or the
            gradients of a model chunk if pipelines reduce each micro-batch. Kernels that are
            dequantized together.
    """

    weights: np.ndarray
    gradients: np.ndarray
    states: np.ndarray
    activations: np.ndarray
    logits: np.ndarray
    buffers: np.ndarray

    @property
    def total(self):
        """Sum over all kinds."""
        return sum(self)


def block_activation_bytes(
    model: ModelShape, kind: BlockKind, layouts: Layouts, item_bytes=2, by_blocks=False
):
    """Return the bytes that a block saves per micro-batch on a device, as an array [N].

    Args:
        model: A `ModelShape`.
        kind: `BlockKind` of the block.
        layouts: The `Layouts`.
        item_bytes: Bytes of one activation element.
        by_blocks: Boolean, whether attention with at least `MIN_BLOCKWISE_SCORES` scores is computed
            blockwise. Context parallelism always computes it blockwise.
    """
    c = layouts.context
    length = kind.length / layouts.context
    if kind.is_frozen:  # The backward pass stops before frozen blocks.
        return np.zeros(len(layouts))
    experts = {}
    if kind.has_experts:
        experts["expert_rows"] = length * model.routed_rows(layouts.shards_experts)
        experts["experts_chosen"] = model.experts_chosen
        experts["shared_experts"] = model.experts.shared_experts
    block = BlockSizes(
        length=length,
        attended=[attended_length / c for attended_length in kind.attended],
        hidden_size=model.config.hidden_size,
        num_heads=model.config.num_heads,
        head_dim=model.head_dim,
        num_kv_heads=model.num_kv_heads,
        ffn_hidden_size=model.inner_size(kind),
        gated=model.gated,
        sublayer_norms=model.placement.norms_per_sublayer,
        latent_features=model.latent.features if model.latent is not None else 0,
        **experts,
    )
    saved_by = functools.partial(
        saved_activation_bytes,
        block,
        item_bytes=item_bytes,
        model_parallel=layouts.model,
        is_sequence_sharded=layouts.sequence > 0,
    )

    def saved_bytes(blocks):
        unrecomputed = saved_by(by_blocks=blocks)
        attention = saved_by(by_blocks=blocks, recomputed=("attention",))
        full = saved_by(recomputes_block=True)
        return np.choose(layouts.recompute, [unrecomputed, attention, full])

    is_blockwise = [
        by_blocks and kind.length * attended_length >= MIN_BLOCKWISE_SCORES
        for attended_length in kind.attended
    ]
    # Context-parallel attention is always computed blockwise.
    all_blockwise = [True] * len(is_blockwise)
    saved = np.where(c > 1, saved_bytes(all_blockwise), saved_bytes(is_blockwise))
    return layouts.micro_batch * saved


def estimate_memory(
    model: ModelShape,
    layouts: Layouts,
    parameter_bytes: ParameterBytes,
    item_bytes: int = 2,
    by_blocks=True,
) -> Memory:
    """Return the memory of layouts by kind.

    Args:
        model: A `ModelShape`.
        layouts: The `Layouts`.
        parameter_bytes: `ParameterBytes` of the training system.
        item_bytes: Bytes of one activation element.
        by_blocks: Boolean, whether attention with many scores is computed blockwise.
    """
    saved = [block_activation_bytes(model, k, layouts, item_bytes, by_blocks) for k in model.kinds]

    def stage_memory(stage, schedule, indices):
        group = layouts[indices]
        p = group.stage[0]
        m = group.micro_batches
        v = group.chunks[0]
        alive = micro_batches_alive(schedule, p, stage.first, m, v)
        return _stage_memory(
            model, group, parameter_bytes, stage, [k[indices] for k in saved], alive, item_bytes
        )

    return Memory(**worst_stage_costs(model, layouts, stage_memory))


def _stage_memory(model, layouts, parameter_bytes, stage: StageKind, saved, alive, item_bytes):
    t = layouts.model
    b = layouts.micro_batch
    s = model.sequence_length / layouts.context
    num_shards = layouts.sharing
    parameters = stage_parameters(model, layouts, stage)
    accumulates = layouts.accumulates_full
    weights, gradients, states = parameter_bytes.at_level(
        layouts.level, layouts.is_on_mesh, accumulates
    )
    # Fewer ranks share an expert under expert parallelism.
    expert_parallel = np.where(layouts.level >= 3, layouts.expert, 1)
    trained = stage_parameters(model, layouts, stage, is_trained=True)
    # Frozen weights also have a float32 master copy.
    master_bytes = states - parameter_bytes.states
    quantized = sum(n * model.quantized_parameters(k) for n, k in zip(stage.blocks, model.kinds))
    quantized = quantized / t
    quantized_bytes = QUANTIZED_BYTES.get(model.base_dtype, 0)
    totals = dict.fromkeys(("weights", "gradients", "states"), 0.0)
    totals["weights"] = state_bytes(quantized, num_shards, layouts.level, quantized_bytes)[0]
    for is_trained, sizes in (
        (False, (weights, 0, master_bytes)),
        (True, (0, gradients, parameter_bytes.states)),
    ):
        expert_parameters = stage_expert_parameters(model, layouts, stage, is_trained)
        dense_parameters = trained if is_trained else parameters - quantized
        dense_parameters = dense_parameters - expert_parameters
        dense = state_bytes(dense_parameters, num_shards, layouts.level, *sizes, accumulates)
        expert_shards = num_shards / expert_parallel
        is_quantized = model.base_dtype is not None and not is_trained
        expert_sizes = (quantized_bytes, 0, 0) if is_quantized else sizes
        experts = state_bytes(
            expert_parameters, expert_shards, layouts.level, *expert_sizes, accumulates
        )
        for kind, x, y in zip(totals, dense, experts):
            totals[kind] = totals[kind] + x + y
    if not model.adapter_rank:
        tables = _table_parameters(model, layouts, stage, is_trained=True)
        sizes = (0, 0, parameter_bytes.table_states)
        totals["states"] = (
            totals["states"] + state_bytes(tables, num_shards, layouts.level, *sizes)[2]
        )
    totals["activations"] = alive * sum(n * bytes_ for n, bytes_ in zip(stage.blocks, saved))
    rows = b * model.num_predictions / layouts.context
    # The loss computes large logits in chunks.
    local_vocab_size = model.config.vocab_size / t
    elements = np.minimum(rows, max_chunk_tokens(local_vocab_size)) * local_vocab_size
    logits = stage.has_head * elements * (item_bytes + 2 * 4)
    totals["logits"] = (
        logits + stage.has_embedding * alive * b * s * model.config.hidden_size * item_bytes
    )
    largest = max(model.block_parameters(kind) for kind in model.kinds) / t
    unsharded = 2 * largest * item_bytes  # The current block and the prefetched next one.
    dequantized = 0.0
    if model.base_dtype is not None:
        largest_quantized = max(
            model.quantized_parameters(kind) + model.experts_parameters(kind)
            for kind in model.kinds
        )
        unsharded -= 2 * largest_quantized / t * (item_bytes - quantized_bytes)
        for kind in model.kinds:  # The largest product of a feed-forward layer, in float32.
            num_kernels = 1 + model.gated
            if kind.has_experts:
                num_kernels = model.experts.expert_num / layouts.expert
            kernels = num_kernels * model.config.hidden_size * model.inner_size(kind)
            dequantized = np.maximum(dequantized, kernels * (4 + item_bytes) / t)
    bucket = np.where(num_shards > 1, trained / 4 * np.minimum(gradients, 4), 0)
    # Pipelines reduce the gradients of all weights of a chunk together.
    reduces_chunks = (layouts.reduces > 0) & (layouts.stage > 1)
    chunk = np.where(reduces_chunks, trained / layouts.chunks * weights, 0)
    bucket = np.maximum(bucket, chunk)
    totals["buffers"] = dequantized + np.where(
        layouts.level >= 3, unsharded, np.where(layouts.level > 0, bucket, 0)
    )
    return totals


def stage_expert_parameters(
    model: ModelShape, layouts: Layouts, stage: StageKind, is_trained=False
):
    """Return the number of expert parameters on a rank of a stage, as an array [N].

    Args:
        model: A `ModelShape`.
        layouts: The `Layouts`.
        stage: The `StageKind`.
        is_trained: Boolean, whether to count trained parameters only.
    """
    total = sum(
        count * model.experts_parameters(kind)
        for count, kind in zip(stage.blocks, model.kinds)
        if not is_trained or model.trains(kind)
    )
    return total / (layouts.model * layouts.expert)


def stage_parameters(model: ModelShape, layouts: Layouts, stage: StageKind, is_trained=False):
    """Return the number of parameters on a rank of a stage after sharding, as an array [N].

    Args:
        model: A `ModelShape`.
        layouts: The `Layouts`.
        stage: The `StageKind`.
        is_trained: Boolean, whether to count trained parameters only.
    """
    t = layouts.model
    total = stage_expert_parameters(model, layouts, stage, is_trained)
    for count, kind in zip(stage.blocks, model.kinds):
        block_parameters = model.adapter_parameters(kind)
        if not is_trained or model.trains(kind):
            block_parameters += model.block_parameters(kind) - model.experts_parameters(kind)
        total = total + count * block_parameters / t
    if is_trained and model.adapter_rank:
        return total
    return total + _table_parameters(model, layouts, stage, is_trained)


def _table_parameters(model, layouts, stage, is_trained):
    """Return the number of parameters outside blocks on a rank of a stage, as an array [N]."""
    rows = np.where(layouts.rows > 0, layouts.model, 1)
    has_tables = not is_trained or model.trains_tables
    table = has_tables * (model.embedding_parameters() + model.other_parameters())
    # Both the first and the last stage store a tied table.
    head = model.head_parameters()
    if model.tied_head and has_tables and not stage.has_embedding:
        head += model.config.hidden_size * model.config.vocab_size
    return (stage.has_embedding * table + stage.has_head * head) / rows
