"""The search: every layout is computed, what does not fit is left out, the fastest are returned."""

import contextlib
import dataclasses

import numpy as np

from dtransformer.errors import InputError
from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.planner.clusters import Cluster
from dtransformer.planner.cost import Cost, cost_of, evaluate
from dtransformer.planner.grid import grid_of
from dtransformer.planner.job import Job
from dtransformer.planner.layouts import Layouts, layout_of
from dtransformer.planner.shape import ModelShape

TIE_SHARE = 0.02  # of the time, which a layout may take more that leaves more memory, or is simpler
ROOM_SHARE = 0.1  # of a device's memory, by which one has to leave more for that
_MAX_GROWTH = 64  # times the devices, as far as a cluster is asked for that is large enough


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which layouts are best for a job on a cluster.

    Args:
        model, cluster, job: what was asked.
        costs: the best layouts, as `Cost`s, the one to take first. Where none fits, the one that
            lacks the least.
        num_layouts: how many were computed.
        num_fitting: how many of them fit.
        why: one line: why the first is to be taken; or what would make it fit.
    """

    model: ModelShape
    cluster: Cluster
    job: Job
    costs: tuple[Cost, ...]
    num_layouts: int
    num_fitting: int
    why: str

    @property
    def best(self) -> Cost:
        """The layout to take."""
        return self.costs[0]

    @property
    def fits(self) -> bool:
        """Whether there is a layout that fits."""
        return self.num_fitting > 0


def plan(model: ModelShape, cluster: Cluster, job: Job, top: int = 5) -> Plan:
    """Return the best layouts of a model's training on a cluster.

    Only layouts are computed that this library trains. Of those within 2 % of the fastest the one
    comes first that leaves the most memory; where that is within a tenth of the device's, the one
    with the fewest techniques.

    Args:
        model: the `ModelShape`, such as `models.named("gpt_175b")`.
        cluster: the `Cluster`.
        job: the `Job`.
        top: how many to return.

    Raises:
        InputError: no layout has what the job fixes, or the device has not its precision.

    Example:

    >>> from dtransformer.planner.clusters import device_named
    >>> from dtransformer.planner.models import named
    >>> found = plan(named("llama2_7b"), Cluster(device_named("h100"), 8), Job(global_batch=64))
    >>> found.fits, found.best.config.data_parallel * found.best.config.model_parallel
    (True, 8)
    """
    job = job.on(cluster.device)
    layouts = grid_of(model, cluster, job)
    memory, time = evaluate(model, cluster, job, layouts)
    seconds, needed = time.total, memory.total
    fits = needed <= cluster.memory_bytes
    if not fits.any():
        chosen = np.array([np.argmin(needed)])
        why = _what_would_fit(model, cluster, job)
    else:
        order = np.flatnonzero(fits)[np.argsort(seconds[fits], kind="stable")]
        chosen, why = _roomiest_first(layouts, seconds, needed, order, cluster, top)
    costs = tuple(
        cost_of(model, cluster, job, layouts, memory, time, int(number)) for number in chosen
    )
    return Plan(model, cluster, job, costs, len(layouts), int(fits.sum()), why)


def _roomiest_first(layouts: Layouts, seconds, needed, order, cluster, top):
    """Return the numbers of the best layouts, and why the first of them is."""
    fastest = order[0]
    near = order[seconds[order] <= seconds[fastest] * (1 + TIE_SHARE)]
    near = near[needed[near] <= needed[near].min() + ROOM_SHARE * cluster.memory_bytes]
    first = near[np.lexsort((needed[near], seconds[near], layouts.techniques[near]))][0]
    others = [number for number in order[: top + 1] if number != first][: top - 1]
    why = f"it is the fastest of {len(order):,} that fit"
    if first != fastest:
        slower = seconds[first] / seconds[fastest] - 1
        room = (needed[fastest] - needed[first]) / 1e9
        better = f"leaves {room:,.3g} GB more" if room >= 0.05 else "is simpler"
        why = (
            f"it is within {slower:.1%} of the fastest of {len(order):,} that fit, "
            f"{layouts.describe(fastest)}, and {better}"
        )
    return [first, *others], why


def _what_would_fit(model, cluster, job):
    """Return one line: with how many devices there is a layout that fits."""
    number, per_node = cluster.num_devices, cluster.devices_per_node
    for times in (2**power for power in range(1, _MAX_GROWTH.bit_length())):
        if number <= cluster.devices_per_node:
            per_node = min(cluster.device.devices_per_node, number * times)
        sizes = {"num_devices": number * times, "devices_per_node": per_node}
        with contextlib.suppress(InputError):
            larger = dataclasses.replace(cluster, **sizes)
            memory, _ = evaluate(model, larger, job, grid_of(model, larger, job))
            if (memory.total <= larger.memory_bytes).any():
                return f"no layout of {number} devices fits; with {number * times} devices there is one"
    return (
        f"no layout fits, nor of {_MAX_GROWTH} times the devices: give a larger global batch, devices "
        "with more memory, or fewer fixed fields"
    )


def cost(
    model: ModelShape, cluster: Cluster, job: Job, config: TransformerOpParallelConfig
) -> Cost:
    """Return what one layout costs, and what would make it fit where it does not.

    Args:
        model: the `ModelShape`.
        cluster: the `Cluster`.
        job: the `Job`.
        config: the layout, a `TransformerOpParallelConfig`.

    Raises:
        InputError: its degrees do not multiply to the devices, or do not divide the batch.
    """
    layouts = layout_of(config, job.global_batch, cluster)
    job = dataclasses.replace(
        job.on(cluster.device), fixed={"gradient_dtype": config.gradient_dtype}
    )
    memory, time = evaluate(model, cluster, job, layouts)
    found = cost_of(model, cluster, job, layouts, memory, time, 0)
    change = "" if found.fits else cheapest_change(model, cluster, job, layouts)
    return dataclasses.replace(found, config=config.resolve(cluster.num_devices), change=change)


def cheapest_change(model: ModelShape, cluster: Cluster, job: Job, own: Layouts) -> str:
    """Return one line: what would make a layout fit, and what it would cost.

    Of the layouts that fit those that change the fewest fields of it, and of these the fastest.
    """
    free = dataclasses.replace(job, fixed={})
    try:
        layouts = grid_of(model, cluster, free)
    except InputError:
        return _what_would_fit(model, cluster, free)
    memory, time = evaluate(model, cluster, free, layouts)
    fits = np.flatnonzero(memory.total <= cluster.memory_bytes)
    if not len(fits):
        return _what_would_fit(model, cluster, free)
    some = layouts[fits]
    # Micro-batches follow from the other degrees: fewer sequences each, and more of them, is one.
    names = ("model", "stage", "context", "expert", "chunks", "schedule", "recompute", "level")
    names += ("sequence", "micro_batches")
    changed = sum((getattr(some, name) != getattr(own, name)).astype(int) for name in names)
    best = np.lexsort((time.total[fits], changed))[0]
    return f"{some.describe(best)}: {time.total[fits][best]:,.3g} s/step"
