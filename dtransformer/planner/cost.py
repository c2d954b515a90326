"""Cost of a layout: step time and memory by kind."""

import dataclasses

import numpy as np

from dtransformer.parallel.config.config import NOT_ELEMENTWISE, TransformerOpParallelConfig
from dtransformer.planner.clusters import Cluster
from dtransformer.planner.job import REFERENCE, Job
from dtransformer.planner.layouts import Layouts
from dtransformer.planner.memory import Memory, estimate_memory
from dtransformer.planner.shape import ModelShape
from dtransformer.planner.time import StepTime, estimate_time


@dataclasses.dataclass(frozen=True)
class Cost:
    """Step time and memory of a layout.

    Args:
        layout: Short description of the layout.
        config: `TransformerOpParallelConfig` that trains with the layout.
        micro_batch: Sequences of one micro-batch of a replica.
        step_seconds: Seconds per step of this library.
        reference_seconds: Seconds per step of the `REFERENCE` system with the same layout. `None`
            in float32, and for devices without figures for fused attention.
        tokens_per_second: Tokens per second over all devices. Encoder-decoder models count
            target tokens only.
        flops_share: Model FLOPs utilization: fraction of the devices' peak, without
            recomputation.
        seconds_by_kind: Dict from the fields of `StepTime` to seconds.
        memory_bytes: Bytes on the rank that needs the most memory.
        bytes_by_kind: Dict from the fields of `Memory` to bytes.
        available_bytes: Bytes of a device that training may use.
        num_techniques: Number of techniques, not counting data parallelism and
            `optimizer_shard`.
        change: If the layout does not fit, a sentence with the cheapest change that makes it fit.
    """

    layout: str
    config: TransformerOpParallelConfig
    micro_batch: int
    step_seconds: float
    reference_seconds: float | None
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
        """Bytes that the fullest rank needs beyond the available memory, 0 if the layout fits."""
        return max(self.memory_bytes - self.available_bytes, 0)

    @property
    def fits(self) -> bool:
        """True if the layout fits into the available memory."""
        return self.missing_bytes == 0


def evaluate(
    model: ModelShape, cluster: Cluster, job: Job, layouts: Layouts
) -> tuple[Memory, StepTime]:
    """Return the memory and the step time of every layout, as `(Memory, StepTime)`."""
    return _evaluate(model, cluster, job, layouts, job.system())


def _evaluate(model, cluster, job, layouts, system):
    memory = estimate_memory(model, layouts, system.parameter_bytes, job.item_bytes)
    time = estimate_time(model, cluster, layouts, system, memory, job.is_mixed)
    if model.teacher is None:
        return memory, time
    frozen = model.teacher.as_teacher()
    teacher_memory, teacher_time = _evaluate(frozen, cluster, job, layouts, system)
    return Memory(*map(np.add, memory, teacher_memory)), StepTime(*map(np.add, time, teacher_time))


def build_costs(
    model: ModelShape,
    cluster: Cluster,
    job: Job,
    layouts: Layouts,
    memory: Memory,
    time: StepTime,
    indices: np.ndarray,
) -> tuple[Cost, ...]:
    """Return the costs of some evaluated layouts.

    Args:
        model: A `ModelShape`.
        cluster: A `Cluster`.
        job: A `Job`.
        layouts: The evaluated `Layouts`.
        memory: `Memory` of all layouts.
        time: `StepTime` of all layouts.
        indices: Integer array [N]. Indices of the layouts.
    """
    chosen = layouts[indices]
    reference_seconds = _reference_seconds(model, cluster, job, chosen)
    fixed = job.fixed_config()
    device = cluster.device
    peak = (device.tflops_16_bit if job.is_mixed else device.tflops_32_bit) * 1e12
    flops = job.global_batch * model.flops_per_sequence()
    costs = []
    for i, index in enumerate(indices):
        seconds = {kind: float(value[index]) for kind, value in time._asdict().items()}
        needed = {kind: round(float(value[index])) for kind, value in memory._asdict().items()}
        step = sum(seconds.values())
        cost = Cost(
            layout=chosen.describe(i),
            config=_layout_config(chosen, i, job, fixed),
            micro_batch=int(chosen.micro_batch[i]),
            step_seconds=step,
            reference_seconds=reference_seconds[i],
            tokens_per_second=job.global_batch * model.sequence_length / step,
            flops_share=float(np.divide(flops, step * peak * cluster.num_devices)),
            seconds_by_kind=seconds,
            memory_bytes=sum(needed.values()),
            bytes_by_kind=needed,
            available_bytes=int(cluster.memory_bytes),
            num_techniques=int(chosen.techniques[i] - chosen.level[i] - chosen.reduces[i]),
        )
        costs.append(cost)
    return tuple(costs)


def _reference_seconds(model, cluster, job, layouts):
    """Return a list with the seconds of the reference system, or `None`, for each layout."""
    if not (job.is_mixed and cluster.device.constants.attention_share):
        return [None] * len(layouts)
    _, time = _evaluate(model, cluster, job, layouts, REFERENCE)
    return time.total.tolist()


def _layout_config(layouts, index, job, fixed):
    """Return the config of a layout with all fields of a job's `fixed` config."""
    fields = {name: getattr(fixed, name) for name in job.fixed}
    if job.optimizer in NOT_ELEMENTWISE and layouts.level[index] in (1, 2):
        fields["optimizer_shard_partition"] = "whole"
    config = layouts.config(index, fields)
    if "recompute" in fields:
        # The grid has only three recompute settings, so restore the job's exact one.
        config.recompute = fields["recompute"]
    return config
