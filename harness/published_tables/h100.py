"""Published H100 steps of Megatron-LM, and the fit of the planner's Hopper constants to them.

Sequences have 4,096 tokens, the vocabulary has 131,072 entries, tables are untied and nothing is
recomputed. Micro-batches and model chunks are not published, so the planner chooses the fastest.
"""

import dataclasses

import numpy as np

from dtransformer.parallel.config.topology import divisors
from dtransformer.planner.clusters import Cluster, Device, get_device
from dtransformer.planner.cost import evaluate
from dtransformer.planner.job import REFERENCE, Job
from dtransformer.planner.layouts import SCHEDULE_NAMES, Layouts
from dtransformer.planner.memory import estimate_memory
from dtransformer.planner.models import get_model
from dtransformer.planner.shape import ModelShape
from dtransformer.planner.time import estimate_time

LENGTH, ENTRIES = 4096, 131072

# Megatron-LM's README, H100 scaling table. Columns: model, heads, hidden size, layers, tensor,
# stages, data, batch, TFLOP/s per device.
_STEPS = (
    ("1.7B", 16, 2048, 24, 1, 1, 48, 192, 408.8),
    ("16B", 48, 6144, 32, 4, 1, 48, 192, 489.1),
    ("119B", 80, 10240, 92, 8, 4, 48, 768, 420.5),
    ("314B", 128, 16384, 96, 8, 8, 48, 1536, 474.4),
)


@dataclasses.dataclass(frozen=True)
class Step:
    """A published training step.

    Args:
        model: `ModelShape`.
        tensor, stages, data: Parallel degrees.
        global_batch: Sequences per step.
        tflops: Published TFLOP/s per device.
    """

    model: ModelShape
    tensor: int
    stages: int
    data: int
    global_batch: int
    tflops: float

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.tensor * self.stages * self.data

    @property
    def flops(self) -> float:
        """FLOPs of the step by the formula in section 5.1 of Narayanan et al., 2021."""
        h = self.model.config.hidden_size
        layers = self.model.num_blocks
        share = 1 + LENGTH / (6 * h) + ENTRIES / (12 * h * layers)
        return 72 * self.global_batch * LENGTH * layers * h**2 * share

    @property
    def seconds(self) -> float:
        """Published duration of the step."""
        return self.flops / (self.devices * self.tflops * 1e12)

    def layouts(self) -> Layouts:
        """Return all micro-batches and all even divisions of a stage's blocks into chunks."""
        rows = self.global_batch // self.data
        chunks = divisors(self.model.num_blocks // self.stages) if self.stages > 1 else [1]
        sizes = [(b, rows // b, v) for b in divisors(rows) for v in chunks]
        # Interleaved stages process micro-batches in rounds of one per stage.
        sizes = [(b, m, v) for b, m, v in sizes if v == 1 or m % self.stages == 0]
        micro_batch, micro_batches, chunks = np.transpose(sizes)
        schedules = [SCHEDULE_NAMES.index("interleaved" if v > 1 else "1f1b") for v in chunks]
        return Layouts.from_columns(
            model=self.tensor,
            stage=self.stages,
            data=self.data,
            micro_batch=micro_batch,
            micro_batches=micro_batches,
            chunks=chunks,
            schedule=schedules,
            level=1,
            sequence=int(self.tensor > 1),
        )


def make_steps() -> list[Step]:
    """Return the published steps."""
    steps = []
    for name, heads, hidden, layers, t, p, data, batch, tflops in _STEPS:
        model = get_model(
            "gpt_1.7b",
            name=name,
            num_heads=heads,
            hidden_size=hidden,
            num_layers=layers,
            vocab_size=ENTRIES,
            max_length=LENGTH,
            tied_head=False,
        )
        steps.append(Step(model, t, p, data, batch, tflops))
    return steps


def reference_step(step: Step, device: Device | None = None) -> tuple[float, str]:
    """Return the planned seconds of the reference system, and the layout that it was planned for.

    Args:
        step: A `Step`.
        device: A `Device`. Defaults to an H100.
    """
    cluster = Cluster(device or get_device("h100"), step.devices)
    layouts = step.layouts()
    memory = estimate_memory(step.model, layouts, REFERENCE.parameter_bytes)
    seconds = estimate_time(step.model, cluster, layouts, REFERENCE, memory).total
    return _fastest(cluster, layouts, memory, seconds)


def library_step(step: Step) -> tuple[float, str]:
    """Return this library's planned seconds and layout for a published step.

    The layout includes full recomputation if the step does not fit without it.
    """
    cluster = Cluster(get_device("h100"), step.devices)
    job = Job(step.global_batch).on(cluster.device)
    layouts = step.layouts()
    recomputed = dataclasses.replace(layouts, recompute=np.full(len(layouts), 2))
    layouts = Layouts.concatenate([layouts, recomputed])
    memory, time = evaluate(step.model, cluster, job, layouts)
    return _fastest(cluster, layouts, memory, time.total)


def _fastest(cluster, layouts, memory, seconds):
    fits = memory.total <= cluster.memory_bytes
    if not fits.any():
        raise ValueError("No layout of the step fits into memory.")
    best = int(np.argmin(np.where(fits, seconds, np.inf)))
    return float(seconds[best]), layouts.describe(best)


def fit_product_share(steps: list[Step]) -> float:
    """Return the `product_share` that makes the mean logarithm of planned / published seconds 0."""
    device = get_device("h100")
    low, high = 0.3, 1.0
    while high - low > 1e-4:
        share = (low + high) / 2
        constants = dataclasses.replace(device.constants, product_share=share)
        fitted = dataclasses.replace(device, constants=constants)
        if np.mean([np.log(reference_step(s, fitted)[0] / s.seconds) for s in steps]) > 0:
            low = share
        else:
            high = share
    return high


def left_out_errors() -> list[float]:
    """Return the relative error of each step with constants fitted to the other steps."""
    steps = make_steps()
    device = get_device("h100")
    errors = []
    for left_out in steps:
        share = fit_product_share([step for step in steps if step is not left_out])
        constants = dataclasses.replace(device.constants, product_share=share)
        fitted = dataclasses.replace(device, constants=constants)
        errors.append(reference_step(left_out, fitted)[0] / left_out.seconds - 1)
    return errors
