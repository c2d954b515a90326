"""The theory of memory and messages, as pure functions of numbers or of arrays of them.

What `dtransformer plan` says and what `memory_report` and `communication_report` say comes from
here. References: model states, Rajbhandari et al., 2020, arXiv 1910.02054, §3; activations,
Korthikanti et al., 2022, arXiv 2205.05198, §4 and §5; sums over the model axis, Shoeybi et al.,
2019, arXiv 1909.08053, §3; rings, Patarasuk and Yuan, 2009.
"""

import numpy as np

# Bytes of Adam's states of a parameter in mixed precision: float32 copy, mean and variance.
MIXED_ADAM_BYTES = 12
# Bytes of a communicator of NCCL at most: 32 channels, each with a buffer to send and one to receive
# of NCCL_BUFFSIZE, by default 4 MiB (NCCL's manual, "Environment Variables"). Of a planned device's
# memory `Cluster.usable_share` leaves them.
NCCL_BYTES = 32 * 2 * (4 << 20)


def state_bytes(parameters, replicas, level, weights=2, gradients=2, states=MIXED_ADAM_BYTES):
    """Return the bytes of weights, of gradients and of the optimizer's states on a rank.

    Args:
        parameters: number Ψ of parameters of the rank's stage and shard.
        replicas: number d of replicas that share them.
        level: 0 to 3: nothing, states, gradients too, weights too are sharded.
        weights, gradients, states: bytes of each of a parameter.

    Example: 7.5 B parameters on 64 devices, in GB.

    >>> for level in range(4):
    ...     print(round(sum(state_bytes(7.5, 64, level)), 1))
    120.0
    31.4
    16.6
    1.9
    """
    shared = [np.where(np.asarray(level) >= first, replicas, 1) for first in (3, 2, 1)]
    return tuple(
        parameters * size / count for size, count in zip((weights, gradients, states), shared)
    )


def kept_bytes(
    *,
    length,
    attended,
    hidden_size,
    num_heads,
    head_dim,
    num_kv_heads,
    ffn_hidden_size,
    gated=False,
    item_bytes=2,
    model_parallel=1,
    is_sequence_sharded=False,
    recomputes_block=False,
    is_input_sharded=False,
    recomputed=(),
    by_blocks=(),
    expert_rows=None,
    experts_chosen=0,
    shared_experts=0,
    sublayer_norms=1,
    latent_features=0,
):
    """Return the bytes that a block keeps of a sequence until its backward pass, on a device.

    With items of i bytes: a norm and an input of products keep i·s·h each, dropout a byte an
    element, attention queries and context, i·s·n·d each, keys and values, i·t·m·d each, and for
    each head two of i·s·t and a mask; by blocks a float32 a query instead. The feed-forward layer
    keeps two of i·s·f, three where it is gated. A block that is recomputed keeps its inputs.

    Args:
        length: positions s of the block's stream.
        attended: for each of its attentions the positions t that it attends to.
        hidden_size, num_heads, head_dim, num_kv_heads, ffn_hidden_size: h, n, d, m and f.
        gated: whether the feed-forward layer has a gate.
        item_bytes: bytes i of an activation.
        model_parallel: number of shards of the operations.
        is_sequence_sharded: whether the residual stream is sharded, too.
        recomputes_block: whether the block is recomputed.
        is_input_sharded: whether what a recomputed block keeps is sharded, in any case.
        recomputed: parts that are recomputed by themselves: "attention", "feed_forward", "norm".
        by_blocks: for each attention whether it is computed by blocks; by default none is.
        expert_rows: rows that experts compute of a sequence, in place of a feed-forward layer: they
            and the experts' outputs are kept, too.
        experts_chosen: experts that each token is sent to.
        shared_experts: experts that every token is sent to besides.
        sublayer_norms: number of norms of each sublayer; 0.5 where two share one, and what it gives.
        latent_features: of attention through latents: of these features of each attention what is
            projected and what a norm gives are kept, on each device.

    Example: s·b·h(34 + 5·n·s/h), in units of s·b·h; Korthikanti et al., table 2.

    >>> sizes = dict(length=2048, attended=[2048], hidden_size=6144, num_heads=64, head_dim=96,
    ...              num_kv_heads=64, ffn_hidden_size=4 * 6144)
    >>> round(float(kept_bytes(**sizes)) / (2048 * 6144), 1)
    140.7
    """
    stream, number, t, item = length * hidden_size, len(attended), model_parallel, item_bytes
    if recomputes_block:
        is_sharded = np.logical_or(is_sequence_sharded, is_input_sharded)
        return item * stream * number / np.where(is_sharded, t, 1)
    norms = (number + 1) * sublayer_norms * item
    inputs = (number + 1) * min(sublayer_norms, 1) * item  # of products
    replicated = norms + inputs + (number + 1)  # a mask each
    heads = sum(num_heads * length + num_kv_heads * other for other in attended)
    sharded = 2 * item * head_dim * heads
    for other, is_by_blocks in zip(attended, [*by_blocks, *[False] * number]):
        if is_by_blocks:
            sharded += 4 * num_heads * length
        elif "attention" not in recomputed:
            sharded += (2 * item + 1) * num_heads * length * other
    if "feed_forward" not in recomputed:
        rows = length if expert_rows is None else expert_rows + shared_experts * length
        sharded += (3 if gated else 2) * item * rows * ffn_hidden_size
        if experts_chosen:
            replicated += item * (expert_rows / length + experts_chosen)
    if "norm" in recomputed:
        replicated -= norms
    latents = 2 * item * latent_features * length * number
    return latents + replicated * stream / np.where(is_sequence_sharded, t, 1) + sharded / t


def sums_over_model(
    sublayers,
    backward=None,
    recomputes_block=False,
    repeats_sums=True,
    shards_input=False,
    repeated=None,
):
    """Return how many all-reduces of b·s·h elements a block needs over the model axis in a step.

    One forward and one backward for every attention and every feed-forward layer. A block that is
    recomputed repeats those forward, but for the last one, which no gradient needs. To all-gather
    an input that is kept sharded is half an all-reduce. With the residual stream sharded each
    all-reduce is a reduce-scatter and an all-gather, of the same volume.

    Args:
        sublayers: number of attentions and feed-forward layers.
        backward: how many of them have a backward pass; all by default.
        recomputes_block: whether the block is recomputed.
        repeats_sums: whether that repeats what was summed, and does not keep it.
        shards_input: whether a recomputed block's input is kept sharded.
        repeated: how many of those forward a recomputed block repeats; all but the last by default.

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
    """Return the elements that a member of a ring sends.

    Args:
        kind: "all-reduce", "all-gather", "reduce-scatter" or "all-to-all".
        elements: number of elements of the whole.
        members: number n of members.

    Example:

    >>> ring_elements("all-reduce", 100, 4)
    150.0
    """
    return (2 if kind == "all-reduce" else 1) * elements * (members - 1) / members


def micro_batches_alive(schedule, stages, stage, micro_batches, chunks=1):
    """Return how many micro-batches' activations of a whole stage are kept at once, at most.

    Args:
        schedule: a key of `pipeline.schedules.SCHEDULES`.
        stages: number p of stages.
        stage: number r of the stage, from 0.
        micro_batches: number m of micro-batches of a step.
        chunks: number v of model chunks of a stage.

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
    """Return how many micro-batches' time stages wait in a step: (p − 1) / v with 1F1B.

    A third of that where gradients of weights fill a part (zb_h1; Qi et al., 2024, arXiv
    2401.10241, table 1). Of zb_v it is what the simulator tells, at most: (4·p − 5) / 18 from 4
    stages on. Backward takes twice as long as forward.

    Args:
        schedule: a key of `pipeline.schedules.SCHEDULES`.
        stages: number p of stages.
        chunks: number v of model chunks of a stage.

    Example:

    >>> bubble_passes("1f1b", 4), bubble_passes("interleaved", 4, chunks=3)
    (3.0, 1.0)
    """
    if schedule == "zb_v":
        return max(stages - 1, (4 * stages - 5) / 3) / 6 if stages > 1 else 0.0
    return (1 / 3 if schedule == "zb_h1" else 1.0) * (stages - 1) / chunks


def shared_bubble_passes(waits, stages, sharing):
    """Return those of stages that share cores: while some wait, others on their core are faster.

    In units of a micro-batch's time while all stages compute. A core with several stages waits as
    one stage of a shorter pipeline, and somewhat longer: (c − 1) + (p − c)/6 micro-batches of 1F1B
    on c cores is what simulations give, within 2 % up to 16 stages and four a core.

    Args:
        waits: what `bubble_passes` gives.
        stages: number p of stages.
        sharing: stages that share a core.

    Example: four stages of 1F1B on four cores, on two, and on one.

    >>> [round(float(shared_bubble_passes(3.0, 4, sharing)), 2) for sharing in (1, 2, 4)]
    [3.0, 1.33, 0.0]
    """
    cores = stages / np.asarray(sharing, float)
    share = waits / max(stages - 1, 1)  # chunks, and gradients of weights, fill a part
    return np.where(cores > 1, share * (cores - 1 + (stages - cores) / 6), 0.0)
