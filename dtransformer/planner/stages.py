"""Assignment of blocks to pipeline stages, and the most expensive stage of each layout."""

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
    """Group of pipeline stages with the same blocks.

    Args:
        first: Index of the first stage, from 0. It stores the most micro-batches.
        blocks: Tuple with the number of blocks of each of the model's kinds.
        has_embedding, has_head: Booleans, whether the stage has the first or the last chunk.
    """

    first: int
    blocks: tuple[int, ...]
    has_embedding: bool
    has_head: bool


def stage_kinds(model: ModelShape, placement: Placement) -> tuple[StageKind, ...]:
    """Return the distinct stages of a model whose blocks are spread evenly over model chunks.

    Args:
        model: A `ModelShape`.
        placement: `Placement` of the chunks on stages.

    Example:

    >>> from dtransformer.planner.models import get_model
    >>> for kind in stage_kinds(get_model("transformer_base"), Placement.looped(4)):
    ...     print(kind)
    StageKind(first=0, blocks=(3, 0), has_embedding=True, has_head=False)
    StageKind(first=1, blocks=(3, 0), has_embedding=False, has_head=False)
    StageKind(first=2, blocks=(0, 3), has_embedding=False, has_head=False)
    StageKind(first=3, blocks=(0, 3), has_embedding=False, has_head=True)
    """
    order = model.order
    total = placement.num_chunks
    stages = placement.num_stages
    bounds = [-(-len(order) * i // total) for i in range(total + 1)]
    counts = np.zeros((stages, len(model.kinds)), int)
    for chunk, stage in enumerate(placement.stage_of_chunk):
        for kind in order[bounds[chunk] : bounds[chunk + 1]]:
            counts[stage, kind] += 1
    first_stages = {}
    stage_of_chunk = placement.stage_of_chunk
    for stage in range(stages):
        blocks = tuple(map(int, counts[stage]))
        is_first = bool(stage == stage_of_chunk[0])
        is_last = bool(stage == stage_of_chunk[-1])
        first_stages.setdefault((blocks, is_first, is_last), stage)
    return tuple(StageKind(stage, *key) for key, stage in first_stages.items())


def worst_stage_costs(model: ModelShape, layouts: Layouts, cost: Callable) -> dict[str, np.ndarray]:
    """Return the costs of each layout's most expensive stage.

    Args:
        model: A `ModelShape`.
        layouts: The `Layouts`.
        cost: Function `(stage_kind, schedule, indices) -> dict` that returns arrays by kind for
            the layouts at these indices.

    Returns:
        Dict from kinds to arrays [N], taken from the stage with the largest sum over kinds.
    """
    columns = collections.defaultdict(lambda: np.zeros(len(layouts)))
    worst = -np.ones(len(layouts))
    for indices, _, schedule, p, v in layouts.by_pipeline():
        for stage in stage_kinds(model, SCHEDULES[schedule].place(p, v)):
            costs = cost(stage, schedule, indices)
            total = sum(costs.values())
            is_worse = total > worst[indices]
            worst[indices] = np.where(is_worse, total, worst[indices])
            for kind, value in costs.items():
                columns[kind][indices] = np.where(is_worse, value, columns[kind][indices])
    return columns
