"""Blocks of each pipeline stage, and the stages that are unlike: the worst of them decides."""

import collections
import dataclasses
from collections.abc import Callable

import numpy as np

from dtransformer.parallel.schedules.placement import Placement
from dtransformer.parallel.schedules.schedules import SCHEDULES
from dtransformer.planner.layouts import Layouts
from dtransformer.planner.shape import ModelShape


@dataclasses.dataclass(frozen=True)
class StageKind:
    """Stages of a pipeline that have the same to do.

    Args:
        first: number of the first of them, from 0: it keeps the most micro-batches.
        blocks: number of its blocks of each of the model's kinds.
        has_embedding, has_head: whether it has the network's beginning, or its end.
    """

    first: int
    blocks: tuple[int, ...]
    has_embedding: bool
    has_head: bool


def stage_kinds(model: ModelShape, placement: Placement) -> tuple[StageKind, ...]:
    """Return the unlike stages of a model's blocks, spread evenly over the model chunks.

    Args:
        model: the `ModelShape`.
        placement: where the chunks are.

    Example:

    >>> from dtransformer.planner.models import named
    >>> for kind in stage_kinds(named("transformer_base"), Placement.looped(4)):
    ...     print(kind)
    StageKind(first=0, blocks=(3, 0), has_embedding=True, has_head=False)
    StageKind(first=1, blocks=(3, 0), has_embedding=False, has_head=False)
    StageKind(first=2, blocks=(0, 3), has_embedding=False, has_head=False)
    StageKind(first=3, blocks=(0, 3), has_embedding=False, has_head=True)
    """
    order, total, stages = model.order, placement.num_chunks, placement.num_stages
    bounds = [-(-len(order) * i // total) for i in range(total + 1)]
    counts = np.zeros((stages, len(model.kinds)), int)
    for chunk, stage in enumerate(placement.stage_of_chunk):
        for kind in order[bounds[chunk] : bounds[chunk + 1]]:
            counts[stage, kind] += 1
    found, ends = {}, placement.stage_of_chunk
    for stage in range(stages):
        key = (*counts[stage], stage == ends[0], stage == ends[-1])
        found.setdefault(key, stage)
    return tuple(
        StageKind(first, tuple(int(c) for c in key[:-2]), bool(key[-2]), bool(key[-1]))
        for key, first in found.items()
    )


def of_worst_stage(model: ModelShape, layouts: Layouts, cost: Callable) -> dict[str, np.ndarray]:
    """Return by kind what the stage of each layout has that has most in all: arrays [N].

    Args:
        model: the `ModelShape`.
        layouts: the `Layouts`.
        cost: a function of a `StageKind`, the name of a schedule, and the numbers of the layouts
            that have both: what the stage has of a dict of kinds.
    """
    columns, worst = collections.defaultdict(lambda: np.zeros(len(layouts))), -np.ones(len(layouts))
    for chosen, _, schedule, p, v in layouts.by_pipeline():
        for stage in stage_kinds(model, SCHEDULES[schedule].place(p, v)):
            found = cost(stage, schedule, chosen)
            total = sum(found.values())
            is_worse = total > worst[chosen]
            worst[chosen] = np.where(is_worse, total, worst[chosen])
            for kind, value in found.items():
                columns[kind][chosen] = np.where(is_worse, value, columns[kind][chosen])
    return columns
