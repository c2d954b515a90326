"""Formulas for memory and communication volume, for numbers or NumPy arrays.

`dtransformer plan`, `memory_report` and `communication_report` use these functions.

References: model states, Rajbhandari et al., 2020, arXiv 1910.02054, §3; activations,
Korthikanti et al., 2022, arXiv 2205.05198, §4 and §5; sums over the model axis, Shoeybi et al.,
2019, arXiv 1909.08053, §3; rings, Patarasuk and Yuan, 2009.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

# Bytes of Adam's states per parameter in mixed precision: float32 copy, mean and variance.
MIXED_ADAM_BYTES = 12
# Upper bound on the bytes of one NCCL communicator: 32 channels, each with a send and a receive
# buffer of NCCL_BUFFSIZE, 4 MiB by default (NCCL's manual, "Environment Variables").
# `Cluster.usable_share` leaves room for them.
NCCL_BYTES = 32 * 2 * (4 << 20)


def state_bytes(
    parameters,
    replicas,
    level,
    weights=2,
    gradients=2,
    states=MIXED_ADAM_BYTES,
    accumulates_full=False,
):
    """Return the bytes of weights, gradients and optimizer states on a rank.

    Args:
        parameters: Number Ψ of parameters in the rank's stage and model shard.
        replicas: Number d of replicas that share them.
        level: ZeRO level. 0 shards nothing, 1 shards the states, 2 also the gradients, 3 also
            the weights.
        weights, gradients, states: Unsharded bytes of each per parameter.
        accumulates_full: Boolean, whether full gradients of several micro-batches are accumulated
            and only their sum is sharded.

    Returns:
        A `(weights, gradients, states)` tuple of bytes.

    Example: 7.5 B parameters on 64 devices, in GB.

    >>> for level in range(4):
    ...     print(round(sum(state_bytes(7.5, 64, level)), 1))
    120.0
    31.4
    16.6
    1.9
    """
    first_levels = 3, np.where(accumulates_full, 3, 2), 1
    shared = [np.where(np.asarray(level) >= first, replicas, 1) for first in first_levels]
    return tuple(
        parameters * size / count for size, count in zip((weights, gradients, states), shared)
    )


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes that determine the activations of a block.

    Args:
        length: Positions s of the block's stream.
        attended: List with the number of attended positions t for each attention of the block.
        hidden_size, num_heads, head_dim, num_kv_heads, ffn_hidden_size: h, n, d, m and f.
        gated: Boolean, whether the feed-forward layer has a gate.
        sublayer_norms: Number of norms per sublayer. Use 0.5 if two sublayers share a norm and
            its output.
        latent_features: Number of latent features per attention. Projected and normalized
            latents are saved on every device.
        expert_rows: Rows per sequence that experts compute instead of a feed-forward layer. The
            rows and the experts' outputs are saved. `None` for a block without experts.
        experts_chosen: Number of experts per token.
        shared_experts: Number of experts that receive every token.
    """

    length: Any
    attended: Sequence
    hidden_size: int
    num_heads: int
    head_dim: int
    num_kv_heads: int
    ffn_hidden_size: int
    gated: bool = False
    sublayer_norms: float = 1
    latent_features: int = 0
    expert_rows: Any = None
    experts_chosen: int = 0
    shared_experts: int = 0


def saved_activation_bytes(
    block: BlockSizes,
    item_bytes=2,
    model_parallel=1,
    is_sequence_sharded=False,
    recomputes_block=False,
    is_input_sharded=False,
    recomputed=(),
    by_blocks=(),
):
    """Return the bytes of activations that a block saves per sequence on one device.

    For items of i bytes, each norm and each input of a product saves i·s·h, and each dropout one
    byte per element. Attention saves i·s·n·d for queries and for the context, i·t·m·d for keys
    and for values, and per head two matrices of i·s·t and a mask. Blockwise attention replaces
    these matrices with a float32 number per query and head. The feed-forward layer saves two
    tensors of i·s·f, or three if it is gated. A recomputed block saves only its inputs.

    Args:
        block: The `BlockSizes`.
        item_bytes: Bytes i of an activation.
        model_parallel: Number of tensor-parallel shards.
        is_sequence_sharded: Boolean, whether the residual stream is also sharded.
        recomputes_block: Boolean, whether the block is recomputed.
        is_input_sharded: Boolean, whether the saved input of a recomputed block is sharded even
            if the residual stream is not.
        recomputed: Parts that are recomputed separately: "attention" and "feed_forward" drop
            their inner activations, "norm" the norms' inputs.
        by_blocks: List of booleans, whether each attention is computed blockwise. Defaults to
            none.

    Example: s·b·h(34 + 5·n·s/h), in units of s·b·h; Korthikanti et al., table 2.

    >>> sizes = BlockSizes(length=2048, attended=[2048], hidden_size=6144, num_heads=64,
    ...     head_dim=96, num_kv_heads=64, ffn_hidden_size=4 * 6144)
    >>> round(float(saved_activation_bytes(sizes)) / (2048 * 6144), 1)
    140.7
    """
    length = block.length
    attended = block.attended
    norms_per_sublayer = block.sublayer_norms
    stream = length * block.hidden_size
    num_attentions = len(attended)
    t = model_parallel
    item = item_bytes
    if recomputes_block:
        is_sharded = np.logical_or(is_sequence_sharded, is_input_sharded)
        return item * stream * num_attentions / np.where(is_sharded, t, 1)
    norms = (num_attentions + 1) * norms_per_sublayer * item
    inputs = (num_attentions + 1) * min(norms_per_sublayer, 1) * item
    replicated = norms + inputs + (num_attentions + 1)  # Each sublayer has a one-byte dropout mask.
    heads = sum(
        block.num_heads * length + block.num_kv_heads * attended_length
        for attended_length in attended
    )
    sharded = 2 * item * block.head_dim * heads
    for attended_length, is_blockwise in zip(attended, [*by_blocks, *[False] * num_attentions]):
        if is_blockwise:
            sharded += 4 * block.num_heads * length
        elif "attention" not in recomputed:
            sharded += (2 * item + 1) * block.num_heads * length * attended_length
    if "feed_forward" not in recomputed:
        rows = length
        if block.expert_rows is not None:
            rows = block.expert_rows + block.shared_experts * length
        sharded += (3 if block.gated else 2) * item * rows * block.ffn_hidden_size
        if block.experts_chosen:
            replicated += item * (block.expert_rows / length + block.experts_chosen)
    if "norm" in recomputed:
        replicated -= norms
    latents = 2 * item * block.latent_features * length * num_attentions
    return latents + replicated * stream / np.where(is_sequence_sharded, t, 1) + sharded / t


def sums_over_model(
    sublayers,
    backward=None,
    recomputes_block=False,
    repeats_sums=True,
    shards_input=False,
    repeated=None,
):
    """Return the number of all-reduces of b·s·h elements that a block runs over the model axis.

    Every attention and every feed-forward layer needs one forward and one backward per
    micro-batch. A recomputed block repeats its forward all-reduces except the last one, which no
    gradient needs. An all-gather of an input that is saved sharded counts as half an all-reduce.
    With a sharded residual stream each all-reduce becomes a reduce-scatter and an all-gather of
    the same volume.

    Args:
        sublayers: Number of attentions and feed-forward layers.
        backward: Number of them that have a backward pass. Defaults to all.
        recomputes_block: Boolean, whether the block is recomputed.
        repeats_sums: Boolean, whether recomputation repeats all-reduces instead of saving their
            results.
        shards_input: Boolean, whether the input of a recomputed block is saved sharded.
        repeated: Number of forward all-reduces that a recomputed block repeats. Defaults to
            `sublayers - 1`.

    Example:

    >>> sums_over_model(2), sums_over_model(3), sums_over_model(2, recomputes_block=True)
    (4.0, 6.0, 5.0)
    """
    sums = sublayers + 1.0 * (sublayers if backward is None else backward)
    if recomputes_block:
        repeated = sublayers - 1 if repeated is None else repeated
        sums += repeated * repeats_sums + 0.5 * shards_input
    return sums


def ring_elements(kind, elements, members):
    """Return the number of elements that each member of a ring collective sends.

    Args:
        kind: "all-reduce", "all-gather", "reduce-scatter" or "all-to-all".
        elements: Number of elements of the full tensor.
        members: Number n of members.

    Example:

    >>> ring_elements("all-reduce", 100, 4)
    150.0
    """
    return (2 if kind == "all-reduce" else 1) * elements * (members - 1) / members


def micro_batches_alive(schedule, stages, stage, micro_batches, chunks=1):
    """Return the maximum number of micro-batches whose activations a stage stores simultaneously.

    The unit is the activations of one micro-batch in all chunks of the stage, so the result can
    be a fraction.

    Args:
        schedule: A key of `pipeline.schedules.SCHEDULES`.
        stages: Number p of stages.
        stage: Stage index r, from 0.
        micro_batches: Number m of micro-batches per step.
        chunks: Number v of model chunks per stage.

    Example:

    >>> float(micro_batches_alive("1f1b", 4, 1, 8)), float(micro_batches_alive("gpipe", 4, 1, 8))
    (3.0, 8.0)
    >>> float(micro_batches_alive("interleaved", 4, 0, 8, chunks=2))
    5.5
    """
    if schedule == "gpipe":
        return np.asarray(micro_batches, float)
    if schedule == "interleaved":
        ahead = (2 * (stages - stage - 1) + (chunks - 1) * stages + 1) / chunks
        return np.minimum(ahead, micro_batches)
    if schedule == "zb_v":
        return np.minimum(stages, micro_batches)
    return np.minimum(stages - stage, micro_batches)


def bubble_passes(schedule, stages, chunks=1):
    """Return the pipeline bubble of a step, in units of a stage's time per micro-batch.

    The bubble is (p − 1) / v. The schedule zb_h1 fills two thirds of it with weight gradients (Qi
    et al., 2024, arXiv 2401.10241, table 1). For zb_v with several stages it is (4·p − 5) / 18, an
    upper bound from simulations. A backward pass counts twice as long as a forward pass.

    Args:
        schedule: A key of `pipeline.schedules.SCHEDULES`.
        stages: Number p of stages.
        chunks: Number v of model chunks per stage.

    Example:

    >>> bubble_passes("1f1b", 4), bubble_passes("interleaved", 4, chunks=3)
    (3.0, 1.0)
    """
    if schedule == "zb_v":
        return max(stages - 1, (4 * stages - 5) / 3) / 6 if stages > 1 else 0.0
    return (1 / 3 if schedule == "zb_h1" else 1.0) * (stages - 1) / chunks


def shared_bubble_passes(waits, stages, sharing):
    """Return the pipeline bubble of stages that share CPU cores.

    While some stages wait, the others on the same core run faster. The unit is a micro-batch's
    time while all stages compute. For 1F1B with p stages on c cores, simulations give
    (c − 1) + (p − c) / 6, within 2% for up to 16 stages and four stages per core. For other
    schedules this is scaled by `waits / (p − 1)`.

    Args:
        waits: Result of `bubble_passes`.
        stages: Number p of stages.
        sharing: Number of stages per core.

    Example: four stages of 1F1B on four cores, on two, and on one.

    >>> [round(float(shared_bubble_passes(3.0, 4, sharing)), 2) for sharing in (1, 2, 4)]
    [3.0, 1.33, 0.0]
    """
    cores = stages / np.asarray(sharing, float)
    # Model chunks and weight gradients fill part of the bubble.
    share = waits / max(stages - 1, 1)
    return np.where(cores > 1, share * (cores - 1 + (stages - cores) / 6), 0.0)
