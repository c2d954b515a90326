"""Step time by kind, computed for many layouts together."""

import dataclasses
import functools
import typing

import numpy as np

from dtransformer.planner.clusters import Cluster
from dtransformer.planner.formulas import (
    bubble_passes,
    ring_elements,
    shared_bubble_passes,
    sums_over_model,
)
from dtransformer.planner.job import System
from dtransformer.planner.layouts import SCHEDULE_NAMES, Layouts
from dtransformer.planner.memory import Memory, stage_expert_parameters, stage_parameters
from dtransformer.planner.shape import ModelShape
from dtransformer.planner.stages import worst_stage_costs
from dtransformer.planner.work import block_passes, head_seconds, update_seconds


# Collectives are modelled as rings with latency and bandwidth over the slowest link of a group.
@dataclasses.dataclass(frozen=True)
class Group:
    """Device groups that communicate along one axis of the grid.

    Args:
        members: Number n of members per group, an array [N].
        stride: Distance between consecutive members in device indices, an array [N].
        axis: "model", "context", "data", "expert" or "stage". `Device.links` may have a measured
            link for it.
    """

    members: np.ndarray
    stride: np.ndarray
    axis: str

    def every(self, step) -> "Group":
        """Return the subgroups of every `step`-th member, where `step` is an array [N]."""
        return Group(self.members // step, self.stride * step, self.axis)


def _link(cluster, axis):
    """Return the measured link of an axis, or one computed from the device's figures.

    Returns:
        A tuple of four floats: one-way bytes/s of a device inside its node and to other nodes,
        seconds per ring step, and seconds per collective.
    """
    device = cluster.device
    link = cluster.device.links.get(axis)
    if link is not None:
        rate = link.gb_per_second * 1e9
        return rate, rate, link.latency_us * 1e-6, link.call_us * 1e-6
    inside = device.inside_gb_per_second * device.constants.inside_share * 1e9
    between = device.between_gb_per_second * device.constants.between_share * 1e9
    return inside, between, device.constants.hop_us * 1e-6, 0.0


def collective_seconds(cluster: Cluster, kind: str, num_bytes, group: Group):
    """Return the seconds of a collective, as an array [N].

    Groups with one member and empty tensors take 0 seconds.

    Args:
        cluster: A `Cluster`.
        kind: "all-reduce", "all-gather", "reduce-scatter" or "all-to-all".
        num_bytes: Bytes of the full tensor.
        group: The `Group`.
    """
    (inside, between, hop, call) = _link(cluster, group.axis)
    node = cluster.devices_per_node
    per_node = np.clip(node // np.maximum(group.stride, 1), 1, group.members)
    crosses = group.members * group.stride > node
    rate = np.where(crosses, np.minimum(inside, between * per_node), inside)
    steps = (2 if kind == "all-reduce" else 1) * (group.members - 1)
    sent = ring_elements(kind, num_bytes, group.members)
    seconds = sent / rate + steps * hop + call
    return np.where((group.members > 1) & (num_bytes > 0), seconds, 0.0)


def send_seconds(cluster: Cluster, num_bytes, stride):
    """Return the seconds to send a tensor to the device `stride` indices away, as an array [N].

    Args:
        cluster: A `Cluster`.
        num_bytes: Bytes of the tensor.
        stride: Distance in device indices. From `devices_per_node` on the network is used.
    """
    inside, between, hop, call = _link(cluster, "stage")
    rate = np.where(np.asarray(stride) >= cluster.devices_per_node, between, inside)
    return num_bytes / rate + hop + call


class StepTime(typing.NamedTuple):
    """Seconds of a step by kind. Every field is an array [N].

    Args:
        products: Passes of blocks and the head: products and elementwise operations.
        recompute: Recomputation in the backward pass.
        bubble: Idle time of pipeline stages.
        model_parallel: Sums over the model axis.
        context_parallel, expert_parallel: Exchange of keys and values, and of tokens.
        sends: Activations and gradients between stages.
        unsharding: All-gathers and reduce-scatters of level 3.
        reduction: Exposed part of the gradient reduction, and the all-gather of new weights.
        update: Optimizer update.
    """

    products: np.ndarray
    recompute: np.ndarray
    bubble: np.ndarray
    model_parallel: np.ndarray
    context_parallel: np.ndarray
    expert_parallel: np.ndarray
    sends: np.ndarray
    unsharding: np.ndarray
    reduction: np.ndarray
    update: np.ndarray

    @property
    def total(self):
        """Sum over all kinds."""
        return sum(self)


def device_groups(layouts: Layouts) -> dict[str, Group]:
    """Return the device groups of each axis.

    Device indices vary fastest along the model axis, then context, data and stage.
    """
    t = layouts.model
    c = layouts.context
    d = layouts.data
    return {
        "model": Group(t, np.ones_like(t), "model"),
        "context": Group(c, t, "context"),
        "expert": Group(layouts.expert, t * c, "expert"),
        # "data" are the devices with the same weights. A mesh contains some of them.
        "data": Group(d * c, t, "data"),
        "mesh": Group(c * layouts.mesh_data, t, "model"),
        "replicas": Group(d // layouts.mesh_data, t * c * layouts.mesh_data, "data"),
        "stage": Group(layouts.stage, t * c * d, "stage"),
    }


def estimate_time(
    model: ModelShape,
    cluster: Cluster,
    layouts: Layouts,
    system: System,
    memory: Memory,
    is_16_bit: bool = True,
) -> StepTime:
    """Return the step time of layouts by kind.

    Args:
        model: A `ModelShape`.
        cluster: A `Cluster`.
        layouts: The `Layouts`.
        system: The training `System`.
        memory: `Memory` of the layouts. It determines the time of the optimizer update.
        is_16_bit: Boolean, whether products use 16-bit numbers.
    """
    sum_bytes = system.sum_bytes or (2 if is_16_bit else 4)
    parts, sends = _micro_batch_times(model, cluster, layouts, system, is_16_bit, sum_bytes)
    m = layouts.micro_batches
    p = layouts.stage

    def stage_times(stage, _, indices):
        totals = dict.fromkeys(parts[0], 0.0)
        for count, uses in zip((*stage.blocks, stage.has_embedding, stage.has_head), parts):
            for use, value in uses.items():
                totals[use] = totals[use] + count * value[indices]
        return totals

    columns = {kind: m * x for kind, x in worst_stage_costs(model, layouts, stage_times).items()}
    sends = sends * layouts.chunks * (p > 1)
    columns["sends"] = m * sends
    blocks = (kind.count / p * sum(uses.values()) for kind, uses in zip(model.kinds, parts))
    mean = sum(blocks) + sends
    # Both a stage and a core have consecutive ranks. This is the number of stages per core.
    sharing = np.maximum(cluster.device.sharing * p / layouts.devices, 1)
    columns["bubble"] = np.zeros(len(layouts))
    for indices, _, schedule, stages, chunks in layouts.by_pipeline():
        passes = bubble_passes(schedule, stages, chunks)
        waits = shared_bubble_passes(passes, stages, sharing[indices])
        columns["bubble"][indices] = waits * mean[indices]
    columns["reduction"] = _reduction_seconds(model, cluster, layouts, system, columns, sum_bytes)
    states = memory.weights + memory.gradients + memory.states
    share = model.trained_parameters() / model.parameters()
    columns["update"] = update_seconds(cluster.device, share * states)
    return StepTime(**columns)


def _micro_batch_times(model, cluster, layouts, system, is_16_bit, sum_bytes):
    """Return the seconds per micro-batch by kind, and the seconds of sends between stages.

    Returns:
        A `(parts, sends)` tuple. `parts` is a list of dicts of arrays [N]: one per kind of block,
        then the embedding and the head. `sends` is the time a stage sends and receives.
    """
    item = 2 if is_16_bit else 4
    groups = device_groups(layouts)
    b = layouts.micro_batch
    t = layouts.model
    c = layouts.context
    full = layouts.recompute == 2
    slowdown = cluster.device.constants.slowdown if system.kernels == "library" else 1.0
    exposed = 1 - system.hidden_sum_share
    parts = []

    def all_reduce(elements, element_bytes=sum_bytes):
        num_bytes = elements * element_bytes
        return exposed * collective_seconds(cluster, "all-reduce", num_bytes, groups["model"])

    def unsharded(num_bytes, is_trained, passes=2, group=groups["data"]):
        """Return the seconds of the weights' all-gathers and, if trained, their reduce-scatter."""
        seconds = passes * collective_seconds(cluster, "all-gather", num_bytes, group)
        if is_trained:
            seconds += collective_seconds(cluster, "reduce-scatter", num_bytes, group)
        return np.where(layouts.level >= 3, seconds, 0.0)

    for kind in model.kinds:
        is_fused = system.fuses_attention(layouts)
        passes = block_passes(cluster.device, model, kind, layouts, is_16_bit, is_fused)
        elements = b * kind.length / c * model.config.hidden_size
        sublayers = len(kind.attended) + 1
        sums = np.where(
            full,
            sums_over_model(sublayers, recomputes_block=True) + system.repeats_last_sum,
            sums_over_model(sublayers),
        )
        passed = np.where(full, 4, 3)  # The backward pass sends twice.
        if kind.is_frozen:
            sums = sums_over_model(sublayers, backward=0)
            passed = 1
        key_bytes = 2 * b * kind.length * model.num_kv_heads * model.head_dim / t * item
        token_bytes = elements * item * model.routed_rows(is_on_mesh=True) * kind.has_experts
        expert_bytes = model.experts_parameters(kind) / t * item
        weight_bytes = (
            model.block_parameters(kind) / t * item - expert_bytes
        ) / system.gathers_per_block
        passes_of_weights = model.trains(kind), 1 if kind.is_frozen else 2
        unsharding = system.gathers_per_block * unsharded(weight_bytes, *passes_of_weights)
        expert_groups = groups["data"].every(layouts.expert)  # These ranks have the same experts.
        unsharding += unsharded(expert_bytes / layouts.expert, *passes_of_weights, expert_groups)
        parts.append(
            {
                "products": slowdown * (passes.forward + passes.backward),
                "recompute": slowdown * passes.repeated,
                "model_parallel": sums * all_reduce(elements),
                "context_parallel": passed
                * collective_seconds(cluster, "all-gather", key_bytes, groups["context"]),
                "expert_parallel": 2
                * passed
                * collective_seconds(cluster, "all-to-all", token_bytes, groups["expert"]),
                "unsharding": unsharding,
            }
        )
    shards = np.where(system.shards_sends | (layouts.sequence > 0), t, 1)
    length = max(kind.length for kind in model.kinds)
    elements = b * length / c * model.config.hidden_size
    lookups = len(model.config.stacks)
    embedding = {
        "model_parallel": np.where(layouts.rows > 0, lookups * all_reduce(elements), 0.0),
        "unsharding": unsharded(_table_elements(model, layouts) * item, model.trains_tables),
    }
    head = {
        "products": slowdown
        * head_seconds(cluster.device, model, layouts, is_16_bit, system.logit_items),
        # The head sums the gradient of its input, and the loss sums one number per token.
        "model_parallel": all_reduce(elements) + system.loss_sums * all_reduce(b * length / c, 4),
    }
    sends = 2 * exposed * send_seconds(cluster, elements * item / shards, groups["stage"].stride)
    return [*parts, embedding, head], sends


def _reduction_seconds(model, cluster, layouts, system, columns, sum_bytes):
    """Return the exposed seconds of the gradient reduction and the weights' all-gather."""

    def count_parameters(stage, _, indices):
        total = stage_parameters(model, layouts[indices], stage, is_trained=True)
        experts = stage_expert_parameters(model, layouts[indices], stage, is_trained=True)
        return {"dense": total - experts, "experts": experts}

    dense, experts = worst_stage_costs(model, layouts, count_parameters).values()
    groups = device_groups(layouts)
    all_reduce = functools.partial(collective_seconds, cluster, "all-reduce")
    num_bytes = (dense + experts) * system.sent_gradient_bytes
    # Reductions per step. New weights are all-gathered once.
    count = np.where(layouts.reduces > 0, layouts.micro_batches, 1)
    scatter = collective_seconds(cluster, "reduce-scatter", num_bytes, groups["replicas"])
    seconds = all_reduce(num_bytes, groups["replicas"]) + (count - 1) * scatter
    may_hide = system.hides_on_mesh | (~layouts.is_on_mesh & (layouts.stage == 1))
    # The backward pass is two thirds of a micro-batch. Interleaved stages finish the gradients of
    # one chunk while all p micro-batches of a round pass through the next chunk.
    overlap = (columns["products"] * 2 / 3 + columns["recompute"]) / layouts.micro_batches
    overlap = overlap * (layouts.stage * (layouts.chunks - 1) + 1) / layouts.chunks
    share = system.hidden_share if cluster.device.hides_reductions else 0.0
    seconds = seconds - np.where(may_hide, share * np.minimum(seconds, count * overlap), 0.0)
    # A mesh reduces its gradients in every micro-batch.
    mesh_seconds = all_reduce(dense * sum_bytes, groups["mesh"])
    expert_group = groups["mesh"].every(layouts.expert)
    mesh_seconds = mesh_seconds + all_reduce(experts * sum_bytes, expert_group)
    seconds = np.where(layouts.level >= 3, 0.0, seconds + layouts.micro_batches * mesh_seconds)
    waits = np.array(system.waits)[layouts.level] * _link(cluster, "data")[-1]
    # Collectives of stages and meshes use the same links.
    stage_latency = _link(cluster, "stage")[-1]
    extra_waits = np.where(
        layouts.stage > 1, system.stage_waits, system.mesh_waits * layouts.is_on_mesh
    )
    seconds = seconds + np.where(layouts.sharing > 1, waits, 0.0) + extra_waits * stage_latency
    return seconds + _tied_seconds(model, cluster, layouts, system)


def _table_elements(model, layouts):
    """Return the number of elements of the embedding table on a device."""
    shards = np.where(layouts.rows > 0, layouts.model, 1)
    return model.config.vocab_size * model.config.hidden_size / shards


def _tied_seconds(model, cluster, layouts, system):
    """Return the seconds of the all-reduce of a tied table between the first and last stage."""
    num_bytes = _table_elements(model, layouts) * system.sent_gradient_bytes
    stride = device_groups(layouts)["stage"].stride * (layouts.stage - 1)
    # The V-shaped schedule places the embedding and the head on the first stage.
    is_v_shaped = layouts.schedule == SCHEDULE_NAMES.index("zb_v")
    is_split = model.tied_head & (layouts.stage > 1) & ~is_v_shaped
    group = Group(np.where(is_split, 2, 1), np.maximum(stride, 1), "stage")
    return model.trains_tables * collective_seconds(cluster, "all-reduce", num_bytes, group)
