"""Time of a step by kind, for many layouts at once."""

import dataclasses
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
from dtransformer.planner.memory import Memory, experts_of_stage, parameters_of_stage
from dtransformer.planner.shape import ModelShape
from dtransformer.planner.stages import of_worst_stage
from dtransformer.planner.work import block_passes, head_seconds, update_seconds

# Time of collectives: rings of α–β, over the slowest link that a group crosses.


@dataclasses.dataclass(frozen=True)
class Group:
    """Groups of devices that send to each other along an axis of the grid.

    Args:
        members: number n of each, an array [N].
        stride: devices from one member to the next, an array [N].
        axis: "model", "context", "data", "expert" or "stage": some machines have links of their
            own for it.
    """

    members: np.ndarray
    stride: np.ndarray
    axis: str

    def every(self, number) -> "Group":
        """Return the groups of the members that are so many members apart, an array [N]."""
        return Group(self.members // number, self.stride * number, self.axis)


def _link(cluster, axis):
    """Return what devices send along an axis, as it was measured or by the cluster's figures.

    Bytes/s one way of a device in its node, and out of it; seconds of a step of a ring, and of a
    collective, whatever they send.
    """
    device, own = cluster.device, cluster.device.links.get(axis)
    if own is not None:
        rate = own.gb_per_second * 1e9
        return rate, rate, own.latency_us * 1e-6, own.call_us * 1e-6
    inside = device.inside_gb_per_second * device.constants.inside_share * 1e9
    between = device.between_gb_per_second * device.constants.between_share * 1e9
    return inside, between, device.constants.hop_us * 1e-6, 0.0


def collective_seconds(cluster: Cluster, kind: str, num_bytes, group: Group):
    """Return the seconds of a collective: an array [N], 0 for a group of one member, or for no bytes.

    Args:
        cluster: the `Cluster`.
        kind: "all-reduce", "all-gather", "reduce-scatter" or "all-to-all".
        num_bytes: bytes of the whole.
        group: the `Group`.
    """
    (inside, between, hop, call), node = _link(cluster, group.axis), cluster.devices_per_node
    per_node = np.clip(node // np.maximum(group.stride, 1), 1, group.members)
    crosses = group.members * group.stride > node
    rate = np.where(crosses, np.minimum(inside, between * per_node), inside)
    steps = (2 if kind == "all-reduce" else 1) * (group.members - 1)
    sent = ring_elements(kind, num_bytes, group.members)
    seconds = sent / rate + steps * hop + call
    return np.where((group.members > 1) & (num_bytes > 0), seconds, 0.0)


def send_seconds(cluster: Cluster, num_bytes, stride):
    """Return the seconds to send to the device that is `stride` further: an array [N]."""
    inside, between, hop, call = _link(cluster, "stage")
    rate = np.where(np.asarray(stride) >= cluster.devices_per_node, between, inside)
    return num_bytes / rate + hop + call


class StepTime(typing.NamedTuple):
    """Seconds of a step by what they are spent on; every field is an array [N].

    Args:
        products: passes of blocks and the head, products and what is between them.
        recompute: what is computed again.
        bubble: stages wait for each other.
        model_parallel: sums over the model axis.
        context_parallel, expert_parallel: exchanges of keys and values, and of tokens.
        sends: activations and gradients from stage to stage.
        unsharding: all-gathers and reduce-scatters of level 3.
        reduction: of gradients between replicas, what is not hidden, and new weights' all-gather.
        update: the optimizer.
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
        """All of it."""
        return sum(self)


def groups_of(layouts: Layouts) -> dict[str, Group]:
    """Return the groups of the axes; devices are numbered model first, then context, then data."""
    t, c, d = layouts.model, layouts.context, layouts.data
    return {
        "model": Group(t, np.ones_like(t), "model"),
        "context": Group(c, t, "context"),
        "expert": Group(layouts.expert, t * c, "expert"),
        "data": Group(d * c, t, "data"),  # who have the same weights
        "mesh": Group(c * layouts.mesh_data, t, "model"),  # those of them on a mesh
        "replicas": Group(d // layouts.mesh_data, t * c * layouts.mesh_data, "data"),
        "stage": Group(layouts.stage, t * c * d, "stage"),
    }


def time_of(
    model: ModelShape,
    cluster: Cluster,
    layouts: Layouts,
    system: System,
    memory: Memory,
    is_16_bit: bool = True,
) -> StepTime:
    """Return the `StepTime` of layouts.

    Args:
        model: the `ModelShape`.
        cluster: the `Cluster`.
        layouts: the `Layouts`.
        system: the `System` that trains.
        memory: the `Memory` of the layouts, of which the optimizer's update takes some.
        is_16_bit: whether products are of 16 bits.
    """
    sum_bytes = system.sum_bytes or (2 if is_16_bit else 4)
    parts, sends = _uses(model, cluster, layouts, system, is_16_bit, sum_bytes)
    m, p = layouts.micro_batches, layouts.stage

    def of_stage(stage, _, chosen):
        found = dict.fromkeys(parts[0], 0.0)
        for number, uses in zip((*stage.blocks, stage.has_embedding, stage.has_head), parts):
            for use, value in uses.items():
                found[use] = found[use] + number * value[chosen]
        return found

    columns = {kind: m * x for kind, x in of_worst_stage(model, layouts, of_stage).items()}
    sends = sends * layouts.chunks * (p > 1)
    columns["sends"] = m * sends
    blocks = (kind.number / p * sum(uses.values()) for kind, uses in zip(model.kinds, parts))
    mean = sum(blocks) + sends
    # Ranks of a stage follow each other, and so do those of a core.
    sharing = np.maximum(cluster.device.sharing * p / layouts.devices, 1)
    columns["bubble"] = np.zeros(len(layouts))
    for chosen, _, schedule, stages, chunks in layouts.by_pipeline():
        passes = bubble_passes(schedule, stages, chunks)
        waits = shared_bubble_passes(passes, stages, sharing[chosen])
        columns["bubble"][chosen] = waits * mean[chosen]
    columns["reduction"] = _reduction(model, cluster, layouts, system, columns, sum_bytes)
    states = memory.weights + memory.gradients + memory.states
    share = model.trained_parameters() / model.parameters()
    columns["update"] = update_seconds(cluster.device, share * states)
    return StepTime(**columns)


def _uses(model, cluster, layouts, system, is_16_bit, sum_bytes):
    """Return the seconds of a micro-batch: of a block of each kind, of the embedding, and of the head.

    Dicts of arrays [N] by use. And the seconds of what a stage sends and receives for it.
    """
    item, groups = 2 if is_16_bit else 4, groups_of(layouts)
    b, t, c, full = layouts.micro_batch, layouts.model, layouts.context, layouts.recompute == 2
    found = []
    summed = lambda elements, number=sum_bytes: collective_seconds(
        cluster, "all-reduce", elements * number, groups["model"]
    )

    def unsharded(num_bytes, is_trained, passes=2, group=groups["data"]):
        """Return the seconds of weights' all-gathers for passes, and of their reduce-scatter."""
        seconds = passes * collective_seconds(cluster, "all-gather", num_bytes, group)
        if is_trained:
            seconds += collective_seconds(cluster, "reduce-scatter", num_bytes, group)
        return np.where(layouts.level >= 3, seconds, 0.0)

    for kind in model.kinds:
        passes = block_passes(cluster.device, model, kind, layouts, is_16_bit)
        elements = b * kind.length / c * model.hidden_size
        sublayers = len(kind.attended) + 1
        sums = np.where(
            full,
            sums_over_model(sublayers, recomputes_block=True) + system.repeats_last_sum,
            sums_over_model(sublayers),
        )
        passed = np.where(full, 4, 3)  # forward and backward, which sends twice
        if kind.is_frozen:
            sums, passed = sums_over_model(sublayers, backward=0), 1
        keys = 2 * b * kind.length * model.num_kv_heads * model.head_dim / t * item
        tokens = elements * item * model.routed_rows(is_on_mesh=True) * kind.has_experts
        experts = model.experts_parameters(kind) / t * item
        weights = (model.block_parameters(kind) / t * item - experts) / system.gathers_a_block
        passes_of_weights = model.trains(kind), 1 if kind.is_frozen else 2
        unsharding = system.gathers_a_block * unsharded(weights, *passes_of_weights)
        same = groups["data"].every(layouts.expert)  # who have the same experts
        unsharding += unsharded(experts / layouts.expert, *passes_of_weights, same)
        found.append(
            {
                "products": passes.forward + passes.backward,
                "recompute": passes.repeated,
                "model_parallel": sums * summed(elements),
                "context_parallel": passed
                * collective_seconds(cluster, "all-gather", keys, groups["context"]),
                "expert_parallel": 2
                * passed
                * collective_seconds(cluster, "all-to-all", tokens, groups["expert"]),
                "unsharding": unsharding,
            }
        )
    shards = np.where(system.shards_sends | (layouts.sequence > 0), t, 1)
    length = max(kind.length for kind in model.kinds)
    elements = b * length / c * model.hidden_size
    lookups = 2 if model.encoder_layers and model.decoder_layers else 1
    embedding = {
        "model_parallel": np.where(layouts.rows > 0, lookups * summed(elements), 0.0),
        "unsharding": unsharded(_table_elements(model, layouts) * item, model.trains_tables),
    }
    head = {
        "products": head_seconds(cluster.device, model, layouts, is_16_bit),
        # The gradient of what it takes; of the loss, numbers of each token.
        "model_parallel": summed(elements) + system.loss_sums * summed(b * length / c, 4),
    }
    sends = 2 * send_seconds(cluster, elements * item / shards, groups["stage"].stride)
    return [*found, embedding, head], sends


def _reduction(model, cluster, layouts, system, columns, sum_bytes):
    """Return the seconds of gradients' reduction and of weights' all-gather that are not hidden."""

    def own(stage, _, chosen):
        total = parameters_of_stage(model, layouts[chosen], stage, is_trained=True)
        experts = experts_of_stage(model, layouts[chosen], stage, is_trained=True)
        return {"dense": total - experts, "experts": experts}

    dense, experts = of_worst_stage(model, layouts, own).values()
    groups = groups_of(layouts)
    summed = lambda x, size, group: collective_seconds(cluster, "all-reduce", x * size, group)
    seconds = summed(dense + experts, system.sent_gradient_bytes, groups["replicas"])
    may_hide = system.hides_on_mesh | (~layouts.is_on_mesh & (layouts.stage == 1))
    # The last micro-batch's backward pass is two thirds of a micro-batch.
    beside = (columns["products"] * 2 / 3 + columns["recompute"]) / layouts.micro_batches
    share = system.hidden_share if cluster.device.hides_reductions else 0.0
    seconds = seconds - np.where(may_hide, share * np.minimum(seconds, beside), 0.0)
    # A mesh adds up its gradients in every micro-batch.
    of_mesh = summed(dense, sum_bytes, groups["mesh"])
    of_mesh = of_mesh + summed(experts, sum_bytes, groups["mesh"].every(layouts.expert))
    seconds = np.where(layouts.level >= 3, 0.0, seconds + layouts.micro_batches * of_mesh)
    waits = np.array(system.waits)[layouts.level] * _link(cluster, "data")[-1]
    linked = _link(cluster, "stage")[-1]  # those of a mesh take the same way
    others = np.where(layouts.stage > 1, system.stage_waits, system.mesh_waits * layouts.is_on_mesh)
    seconds = seconds + np.where(layouts.sharing > 1, waits, 0.0) + others * linked
    return seconds + _tied_seconds(model, cluster, layouts, system)


def _table_elements(model, layouts):
    """Return the elements that a device has of the table of embeddings."""
    shards = np.where(layouts.rows > 0, layouts.model, 1)
    return model.vocab_size * model.hidden_size / shards


def _tied_seconds(model, cluster, layouts, system):
    """Return the seconds in which the first and the last stage add their gradients of one table."""
    num_bytes = _table_elements(model, layouts) * system.sent_gradient_bytes
    stride = groups_of(layouts)["stage"].stride * (layouts.stage - 1)
    goes_back = layouts.schedule == SCHEDULE_NAMES.index("zb_v")  # both are on the first stage
    apart = model.tied_head & (layouts.stage > 1) & ~goes_back
    group = Group(np.where(apart, 2, 1), np.maximum(stride, 1), "stage")
    return model.trains_tables * collective_seconds(cluster, "all-reduce", num_bytes, group)
