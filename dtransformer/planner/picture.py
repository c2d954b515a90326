"""Pictures of a plan, which need matplotlib: time and memory by kind, and the frontier of both."""

import os

import numpy as np

from dtransformer.errors import InputError, check_installed
from dtransformer.planner.cost import evaluate
from dtransformer.planner.grid import grid_of
from dtransformer.planner.search import Plan


def draw(plan: Plan, path: str | os.PathLike) -> None:
    """Write a picture of a plan: bars of its layouts, and all layouts by memory and time.

    Args:
        plan: the `Plan`.
        path: the file, .png, .svg or .pdf.

    Raises:
        InputError: matplotlib is not installed, or does not know such files.
    """
    check_installed("matplotlib", "pictures", "plot")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained")
    times, memories, frontier = figure.subplots(1, 3)
    _bars(times, [cost.seconds_by_kind for cost in plan.costs], 1, "s a step")
    _bars(memories, [cost.bytes_by_kind for cost in plan.costs], 1e9, "GB a device")
    memories.axvline(plan.cluster.memory_bytes / 1e9, color="black", linestyle="--")
    _frontier(frontier, plan)
    names = "\n".join(f"{i}: {cost.layout}" for i, cost in enumerate(plan.costs, start=1))
    figure.suptitle(f"{plan.model.name} on {plan.cluster}\n{names}", fontsize=8)
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise InputError(f"{path}: is no kind of picture that is known ({error})") from None


def _bars(axes, by_kind, unit, label):
    start, places = np.zeros(len(by_kind)), np.arange(len(by_kind))
    for number, kind in enumerate(by_kind[0]):
        values = np.array([one[kind] / unit for one in by_kind])
        if values.any():
            hatch = "//" * (number // 10)
            name = kind.replace("_", " ")
            axes.barh(places, values, left=start, label=name, color=f"C{number % 10}", hatch=hatch)
            start += values
    axes.set_yticks(places, [str(place + 1) for place in places])
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.legend(fontsize=7)


def _frontier(axes, plan):
    """Draw all layouts, and those that no other one beats in time and in memory."""
    layouts = grid_of(plan.model, plan.cluster, plan.job)
    memory, time = evaluate(plan.model, plan.cluster, plan.job, layouts)
    needed, seconds = memory.total / 1e9, time.total
    axes.scatter(needed, seconds, s=4, color="lightgray", label="all layouts")
    order = np.lexsort((seconds, needed))
    best = np.minimum.accumulate(seconds[order])
    first = np.r_[True, best[1:] < best[:-1]]
    axes.plot(needed[order][first], best[first], "o-", markersize=3, label="none is better in both")
    axes.axvline(plan.cluster.memory_bytes / 1e9, color="black", linestyle="--", label="there is")
    axes.set(xscale="log", yscale="log", xlabel="GB a device", ylabel="s a step")
    axes.legend(fontsize=7)
