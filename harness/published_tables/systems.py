"""Training systems of the published measurements."""

import dataclasses

import numpy as np

from dtransformer.planner.clusters import Cluster, get_device
from dtransformer.planner.job import ParameterBytes, System
from dtransformer.planner.layouts import RECOMPUTES, SCHEDULE_NAMES, Layouts
from dtransformer.planner.memory import estimate_memory
from dtransformer.planner.models import get_model
from dtransformer.planner.time import estimate_time
from harness.published_tables.published import Measured

MEGATRON = System(
    # Gradients are float32, so all states have 18 bytes per parameter.
    ParameterBytes(weights=2, gradients=4, states=12),
    sent_gradient_bytes=4,
    hidden_share=0.0,
    hides_on_mesh=True,
    repeats_last_sum=True,
    shards_sends=True,  # Scatter/gather optimization, Narayanan et al., 2021, §4.1.
)
OVERLAPPING = dataclasses.replace(MEGATRON, hidden_share=0.9)  # Rows with overlapped reduction.
DEEPSPEED = dataclasses.replace(MEGATRON, sent_gradient_bytes=2, shards_sends=False)
# Each of the twelve weights and biases of a block is gathered separately.
ZERO_3 = dataclasses.replace(MEGATRON, gathers_per_block=12)


def predicted_seconds(steps: list[Measured], system: System, device=None, level: int = 0):
    """Return the planner's seconds for measured steps, as an array [N].

    Args:
        steps: List of `Measured` steps of one model on one number of devices.
        system: `System` of the measurement.
        device: A `Device`. Defaults to an A100 with 80 GB.
        level: Level of optimizer sharding.
    """
    first = steps[0]
    devices = first.tensor * first.stages * first.data
    cluster = Cluster(device or get_device("a100-80"), devices)
    model = get_model(first.model)
    layouts = measured_layouts(steps, level)
    memory = estimate_memory(model, layouts, system.parameter_bytes, by_blocks=False)
    return estimate_time(model, cluster, layouts, system, memory).total


def measured_layouts(steps: list[Measured], level: int = 0) -> Layouts:
    """Return measured steps as `Layouts`."""

    def column(get):
        return np.array([get(step) for step in steps])

    data, micro = column(lambda s: s.data), column(lambda s: s.micro_batch)
    return Layouts.from_columns(
        model=column(lambda s: s.tensor),
        stage=column(lambda s: s.stages),
        data=data,
        micro_batch=micro,
        micro_batches=column(lambda s: s.global_batch) // (data * micro),
        chunks=column(lambda s: s.chunks),
        schedule=column(lambda s: SCHEDULE_NAMES.index("interleaved" if s.chunks > 1 else "1f1b")),
        recompute=column(lambda s: RECOMPUTES.index(s.recompute)),
        level=level,
        sequence=column(lambda s: int(s.recompute == "attention")),
    )
