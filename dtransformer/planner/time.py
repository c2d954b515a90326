"""How long a step takes, and what of it is spent where, for many layouts at once."""

import dataclasses

import numpy as np

from dtransformer.planner.clusters import Cluster
from dtransformer.planner.formulas import bubble_passes, sums_over_model
from dtransformer.planner.job import System
from dtransformer.planner.layouts import SCHEDULE_NAMES, Layouts
from dtransformer.planner.links import Group, call_seconds, collective_seconds, send_seconds
from dtransformer.planner.memory import Memory, parameters_of_stage
from dtransformer.planner.shape import ModelShape
from dtransformer.planner.stages import stage_kinds
from dtransformer.planner.work import block_passes, head_seconds, update_seconds

KINDS = (
    "products", "recompute", "bubble", "model_parallel", "context_parallel", "expert_parallel",
    "sends", "unsharding", "reduction", "update",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class StepTime:
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
        return sum(getattr(self, kind) for kind in KINDS)


def groups_of(layouts: Layouts) -> dict[str, Group]:
    """Return the groups of the axes; devices are numbered model first, then context, then data."""
    t, c, d = layouts.model, layouts.context, layouts.data
    return {
        "model": Group(t, np.ones_like(t), "model"),
        "context": Group(c, t, "context"),
        "expert": Group(layouts.expert, t * c, "expert"),
        "data": Group(d * c, t, "data"),  # who have the same weights
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
    columns = {kind: np.zeros(len(layouts)) for kind in KINDS}
    own = _Blocks.of(model, cluster, layouts, system, is_16_bit)
    keys = layouts.stage * 10**6 + layouts.chunks * 10 + layouts.schedule
    for key in np.unique(keys):
        chosen = np.flatnonzero(keys == key)
        some = layouts[chosen]
        p, v = int(some.stage[0]), int(some.chunks[0])
        schedule = SCHEDULE_NAMES[some.schedule[0]]
        worst, inner = np.full(len(chosen), -1.0), {}
        mean = np.zeros(len(chosen))
        for stage in stage_kinds(model, p, v, schedule == "zb_v"):
            found = own.of_stage(stage, chosen)
            total = sum(found.values())
            larger = total > worst
            worst = np.where(larger, total, worst)
            for kind, value in found.items():
                inner[kind] = np.where(larger, value, inner.get(kind, 0.0))
        for number, kind in enumerate(model.kinds):
            mean += kind.number / p * own.blocks[number][chosen]
        sends = (own.sends[chosen] + cluster.device.pass_call_us * 1e-6) * v * (p > 1)
        for kind, value in inner.items():
            columns[kind][chosen] = some.micro_batches * value
        columns["sends"][chosen] = some.micro_batches * sends
        # Ranks that share a core compute while others wait.
        sharing, passes = cluster.device.sharing, bubble_passes(schedule, p, v)
        waits = np.maximum(passes - (sharing - 1) * some.micro_batches, 0) / sharing
        columns["bubble"][chosen] = waits * (mean + sends)
    columns["reduction"] = _reduction(model, cluster, layouts, system, columns)
    states = memory.weights + memory.gradients + memory.states
    columns["update"] = update_seconds(cluster.device, states)
    return StepTime(**columns)


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Seconds of a block of each kind, by use, and of the head, for a micro-batch."""

    uses: list  # of each kind of block: a dict of arrays [N]
    head: np.ndarray
    sends: np.ndarray

    @property
    def blocks(self):
        """The seconds of a block of each kind."""
        return [sum(uses.values()) for uses in self.uses]

    @classmethod
    def of(cls, model, cluster, layouts, system, is_16_bit):
        item, groups = 2 if is_16_bit else 4, groups_of(layouts)
        b, t, c, full = layouts.micro_batch, layouts.model, layouts.context, layouts.recompute == 2
        uses = []
        for kind in model.kinds:
            passes = block_passes(cluster.device, model, kind, layouts, is_16_bit)
            stream = b * kind.length / c * model.hidden_size * item
            sublayers = len(kind.attended) + 1
            sums = np.where(
                full,
                sums_over_model(sublayers, recomputes_block=True) + system.repeats_last_sum,
                sums_over_model(sublayers),
            )
            passed = np.where(full, 4, 3)  # forward and backward, which sends twice
            keys = 2 * b * kind.length * model.num_kv_heads * model.head_dim / t * item
            tokens = stream * model.routed_rows(is_on_mesh=True) * kind.has_experts
            weights = model.block_parameters(kind) / t * item
            gathers = np.where(full, 2, 2) * collective_seconds(
                cluster, "all-gather", weights / system.gathers_a_block, groups["data"]
            ) + collective_seconds(
                cluster, "reduce-scatter", weights / system.gathers_a_block, groups["data"]
            )
            uses.append(
                {
                    "products": passes.forward + passes.backward,
                    "recompute": passes.repeated,
                    "model_parallel": sums
                    * collective_seconds(cluster, "all-reduce", stream, groups["model"]),
                    "context_parallel": passed
                    * collective_seconds(cluster, "all-gather", keys, groups["context"]),
                    "expert_parallel": 2
                    * passed
                    * collective_seconds(cluster, "all-to-all", tokens, groups["expert"]),
                    "unsharding": np.where(
                        layouts.level >= 3, system.gathers_a_block * gathers, 0.0
                    ),
                }
            )
        head = head_seconds(cluster.device, model, layouts, is_16_bit)
        shards = np.where(system.shards_sends | (layouts.sequence > 0), t, 1)
        length = max(kind.length for kind in model.kinds)
        sent = b * length / c * model.hidden_size * item / shards
        return cls(uses, head, 2 * send_seconds(cluster, sent, groups["stage"].stride))

    def of_stage(self, stage, chosen):
        """Return the seconds of a micro-batch on a stage, by use."""
        found = {}
        for number, uses in zip(stage.blocks, self.uses):
            for use, value in uses.items():
                found[use] = found.get(use, 0.0) + number * value[chosen]
        found["products"] = found["products"] + stage.has_head * self.head[chosen]
        return found


def _reduction(model, cluster, layouts, system, columns):
    """Return the seconds of gradients' reduction and of weights' all-gather that are not hidden."""
    keys = layouts.stage * 10**6 + layouts.chunks * 10 + layouts.schedule
    parameters = np.zeros(len(layouts))
    for key in np.unique(keys):
        chosen = np.flatnonzero(keys == key)
        some = layouts[chosen]
        goes_back = SCHEDULE_NAMES[some.schedule[0]] == "zb_v"
        for stage in stage_kinds(model, int(some.stage[0]), int(some.chunks[0]), goes_back):
            own = parameters_of_stage(model, some, stage)
            parameters[chosen] = np.maximum(parameters[chosen], own)
    group = groups_of(layouts)["data"]
    seconds = collective_seconds(
        cluster, "all-reduce", parameters * system.sent_gradient_bytes, group
    )
    may_hide = np.full(len(layouts), system.hides_on_mesh)
    may_hide |= (layouts.model == 1) & (layouts.stage == 1)
    # The last micro-batch's backward pass is two thirds of a micro-batch.
    beside = (columns["products"] * 2 / 3 + columns["recompute"]) / layouts.micro_batches
    share = system.hidden_share if cluster.device.hides_reductions else 0.0
    seconds = seconds - np.where(may_hide, share * np.minimum(seconds, beside), 0.0)
    waits = np.array(system.waits)[layouts.level] * call_seconds(cluster, "data")
    stage_waits = system.stage_waits * call_seconds(cluster, "stage") * (layouts.stage > 1)
    seconds = np.where(layouts.level >= 3, 0.0, seconds)
    return seconds + np.where(group.members > 1, waits, 0.0) + stage_waits
