"""Search: evaluate every layout, drop layouts that do not fit and return the fastest."""

import contextlib
import dataclasses

import numpy as np

from dtransformer.errors import InputError
from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.planner.clusters import Cluster
from dtransformer.planner.cost import Cost, build_costs, evaluate
from dtransformer.planner.grid import enumerate_layouts
from dtransformer.planner.job import Job
from dtransformer.planner.layouts import Layouts, layout_from_config
from dtransformer.planner.shape import ModelShape

TIE_SHARE = 0.02  # A roomier or simpler layout may be slower by this fraction.
ROOM_SHARE = 0.1  # Memory differences below this fraction of a device do not count.
_MAX_GROWTH = 64  # Largest multiple of the devices that is tried if no layout fits.


@dataclasses.dataclass(frozen=True)
class Plan:
    """Best layouts for a job on a cluster.

    Args:
        model, cluster, job: Inputs of `plan`. The job's precision is resolved.
        costs: Tuple with the `Cost` of the best layouts, the recommended one first. If none
            fits, only the layout that needs the least memory.
        num_layouts: Number of evaluated layouts.
        num_fitting: Number of layouts that fit.
        why: One line with the reason for the recommended layout, or the change that makes a
            layout fit.
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
        """Cost of the recommended layout."""
        return self.costs[0]

    @property
    def fits(self) -> bool:
        """True if at least one layout fits."""
        return self.num_fitting > 0


def plan(model: ModelShape, cluster: Cluster, job: Job, top: int = 5) -> Plan:
    """Return the best layouts for training a model on a cluster.

    The search covers only layouts that this library can train. Among layouts within 2% of the
    fastest, the one with the most free memory comes first. If free memory differs by less than a
    tenth of a device, the one with the fewest techniques does.

    Args:
        model: A `ModelShape`, such as `models.get_model("gpt_175b")`.
        cluster: A `Cluster`.
        job: A `Job`.
        top: Integer. Maximum number of layouts to return.

    Raises:
        InputError: If no layout has the fields that the job fixes, or if the device does not
            support the job's precision.

    Example:

    >>> from dtransformer.planner.clusters import get_device
    >>> from dtransformer.planner.models import get_model
    >>> result = plan(get_model("llama2_7b"), Cluster(get_device("h100"), 8), Job(global_batch=64))
    >>> result.fits, result.best.config.data_parallel, result.best.config.pipeline_stage
    (True, 4, 2)
    """
    job = job.on(cluster.device)
    layouts = enumerate_layouts(model, cluster, job)
    memory, time = evaluate(model, cluster, job, layouts)
    seconds = time.total
    needed = memory.total
    fits = needed <= cluster.memory_bytes
    if not fits.any():
        indices = np.array([np.argmin(needed)])
        why = _explain_no_fit(model, cluster, job)
    else:
        order = np.flatnonzero(fits)[np.argsort(seconds[fits], kind="stable")]
        indices, why = _select_best(layouts, seconds, needed, order, cluster, top)
    costs = build_costs(model, cluster, job, layouts, memory, time, np.asarray(indices))
    return Plan(model, cluster, job, costs, len(layouts), int(fits.sum()), why)


def _select_best(layouts: Layouts, seconds, needed, order, cluster, top):
    """Return the indices of the best layouts, and the reason for the first."""
    fastest = order[0]
    near = order[seconds[order] <= seconds[fastest] * (1 + TIE_SHARE)]
    near = near[needed[near] <= needed[near].min() + ROOM_SHARE * cluster.memory_bytes]
    first = near[np.lexsort((needed[near], seconds[near], layouts.techniques[near]))][0]
    rest = [i for i in order[: top + 1] if i != first][: top - 1]
    why = f"It is the fastest of {len(order):,} layouts that fit."
    if first != fastest:
        slower = seconds[first] / seconds[fastest] - 1
        room = (needed[fastest] - needed[first]) / 1e9
        better = f"leaves {room:,.3g} GB more memory" if room >= 0.05 else "is simpler"
        why = (
            f"It is {slower:.1%} slower than the fastest of {len(order):,} layouts that fit, "
            f"{layouts.describe(fastest)}, but {better}."
        )
    return [first, *rest], why


def _explain_no_fit(model, cluster, job):
    """Return one line with the smallest larger cluster that has a layout that fits."""
    num_devices = cluster.num_devices
    per_node = cluster.devices_per_node
    for factor in (2**power for power in range(1, _MAX_GROWTH.bit_length())):
        if num_devices <= cluster.devices_per_node:
            per_node = min(cluster.device.devices_per_node, num_devices * factor)
        enough = num_devices * factor
        sizes = {"num_devices": enough, "devices_per_node": per_node}
        with contextlib.suppress(InputError):
            larger = dataclasses.replace(cluster, **sizes)
            memory, _ = evaluate(model, larger, job, enumerate_layouts(model, larger, job))
            if (memory.total <= larger.memory_bytes).any():
                return f"No layout of {num_devices} devices fits. {enough} devices are enough."
    return (
        f"No layout fits, even on {_MAX_GROWTH} times the devices. Use a larger global batch, "
        "devices with more memory, or fewer fixed fields."
    )


def cost(
    model: ModelShape, cluster: Cluster, job: Job, config: TransformerOpParallelConfig
) -> Cost:
    """Return the cost of one layout. If it does not fit, `change` is the cheapest fix.

    Args:
        model: A `ModelShape`.
        cluster: A `Cluster`.
        job: A `Job`. Its fixed fields are ignored.
        config: The layout, a `TransformerOpParallelConfig`.

    Raises:
        InputError: If the product of the degrees is not the number of devices, or if
            `data_parallel · micro_batch_num` does not divide the batch.
    """
    layouts = layout_from_config(config, job.global_batch, cluster)
    fixed = {name: getattr(config, name) for name in ("gradient_dtype", "optimizer_state_dtype")}
    job = dataclasses.replace(job.on(cluster.device), fixed=fixed)
    memory, time = evaluate(model, cluster, job, layouts)
    (result,) = build_costs(model, cluster, job, layouts, memory, time, np.arange(1))
    change = "" if result.fits else cheapest_change(model, cluster, job, layouts)
    return dataclasses.replace(result, config=config.resolve(cluster.num_devices), change=change)


def cheapest_change(model: ModelShape, cluster: Cluster, job: Job, current: Layouts) -> str:
    """Return one line with the closest layout that fits, and its step time.

    The closest layout changes the fewest fields of `current`. The fastest one breaks ties.
    """
    state_dtype = job.fixed_config().optimizer_state_dtype
    free = dataclasses.replace(job, fixed={"optimizer_state_dtype": state_dtype})
    try:
        layouts = enumerate_layouts(model, cluster, free)
    except InputError:
        return _explain_no_fit(model, cluster, free)
    memory, time = evaluate(model, cluster, free, layouts)
    fits = np.flatnonzero(memory.total <= cluster.memory_bytes)
    if not len(fits):
        return _explain_no_fit(model, cluster, free)
    fitting = layouts[fits]
    # The size and the number of micro-batches depend on each other, so they count as one change.
    names = ("model", "stage", "context", "expert", "chunks", "schedule", "recompute", "level")
    names += ("reduces", "sequence", "micro_batches")
    changed = sum((getattr(fitting, name) != getattr(current, name)).astype(int) for name in names)
    best = np.lexsort((time.total[fits], changed))[0]
    return f"The cheapest change: {fitting.describe(best)}, {time.total[fits][best]:,.3g} s/step."
