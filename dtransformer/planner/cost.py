"""Cost of a layout: time and memory by kind, in units that the names tell."""

import dataclasses

import numpy as np

from dtransformer.parallel.config.config import NOT_ELEMENTWISE, TransformerOpParallelConfig
from dtransformer.planner.clusters import Cluster
from dtransformer.planner.job import Job
from dtransformer.planner.layouts import Layouts
from dtransformer.planner.memory import Memory, memory_of
from dtransformer.planner.shape import ModelShape
from dtransformer.planner.time import StepTime, time_of


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a layout costs.

    Args:
        layout: it, in a few words.
        config: it, as a config to train with.
        micro_batch: sequences of a micro-batch of a replica.
        step_seconds: of a step.
        tokens_per_second: of all devices; of targets, where there are sources.
        flops_share: share of the devices' peak that products without recompute make use of.
        seconds_by_kind: dict of what a step is spent on, as `StepTime` has it.
        memory_bytes: of the rank that needs most.
        bytes_by_kind: dict of what that is for, as `Memory` has it.
        available_bytes: what training may take of a device.
        num_techniques: Number of techniques besides data parallelism and `optimizer_shard`.
        change: where it does not fit: the cheapest change that would make it fit.
    """

    layout: str
    config: TransformerOpParallelConfig
    micro_batch: int
    step_seconds: float
    tokens_per_second: float
    flops_share: float
    seconds_by_kind: dict
    memory_bytes: int
    bytes_by_kind: dict
    available_bytes: int
    num_techniques: int
    change: str = ""

    @property
    def missing_bytes(self) -> int:
        """By how many bytes it does not fit; 0 where it fits."""
        return max(self.memory_bytes - self.available_bytes, 0)

    @property
    def fits(self) -> bool:
        """Whether it fits."""
        return self.missing_bytes == 0


def evaluate(
    model: ModelShape, cluster: Cluster, job: Job, layouts: Layouts
) -> tuple[Memory, StepTime]:
    """Return the `Memory` and the `StepTime` of layouts, as this library trains."""
    system = job.system()
    memory = memory_of(model, layouts, system, job.item_bytes)
    return memory, time_of(model, cluster, layouts, system, memory, job.is_mixed)


def cost_of(
    model: ModelShape,
    cluster: Cluster,
    job: Job,
    layouts: Layouts,
    memory: Memory,
    time: StepTime,
    number: int,
) -> Cost:
    """Return the `Cost` of one of the layouts that were evaluated."""
    seconds = {kind: float(value[number]) for kind, value in time._asdict().items()}
    needed = {kind: round(float(value[number])) for kind, value in memory._asdict().items()}
    step = sum(seconds.values())
    device = cluster.device
    peak = (device.tflops_16_bit if job.is_mixed else device.tflops_32_bit) * 1e12
    flops = job.global_batch * model.flops_per_sequence()
    return Cost(
        layout=layouts.describe(number),
        config=_config_of(layouts, number, job),
        micro_batch=int(layouts.micro_batch[number]),
        step_seconds=step,
        tokens_per_second=job.global_batch * model.sequence_length / step,
        flops_share=float(np.divide(flops, step * peak * cluster.num_devices)),
        seconds_by_kind=seconds,
        memory_bytes=sum(needed.values()),
        bytes_by_kind=needed,
        available_bytes=int(cluster.memory_bytes),
        num_techniques=int(layouts.techniques[number] - layouts.level[number]),
    )


def _config_of(layouts, number, job):
    """Return a layout as a config, with all that the job fixes as it is given."""
    fixed = job.fixed_config()
    others = {name: getattr(fixed, name) for name in job.fixed}
    if job.optimizer in NOT_ELEMENTWISE and layouts.level[number] in (1, 2):
        others["optimizer_shard_partition"] = "whole"
    config = layouts.config(number, others)
    if "recompute" in others:  # the grid knows whole blocks and attention only
        config.recompute = others["recompute"]
    return config
