"""Plans as text, JSON and pictures."""

import dataclasses
import os

import numpy as np

from dtransformer.errors import check_installed, raise_as_input_error
from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.planner.budget import training_hours
from dtransformer.planner.cost import Cost, evaluate
from dtransformer.planner.grid import enumerate_layouts
from dtransformer.planner.search import Plan
from dtransformer.tables import columns

_KIND_NAMES = {
    "products": "matrix products and elementwise operations",
    "recompute": "recomputation",
    "bubble": "pipeline bubble",
    "model_parallel": "tensor-parallel sums",
    "context_parallel": "keys and values of other shards",
    "expert_parallel": "tokens to experts and back",
    "sends": "sends between stages",
    "unsharding": "weight all-gathers",
    "reduction": "gradient reduction, exposed part",
    "update": "optimizer update",
}
_REFERENCE = (
    "Reference system: the same layout in Megatron-LM, with fused kernels and overlapped communication. "
    "All other figures are for this library."
)
_ASSUMPTIONS = (
    "Assumptions: devices and links keep their speed; reading data takes no time; half of the gradient "
    "reduction overlaps with the backward pass (none on a mesh or in a pipeline); 8% of the memory "
    "stays free. See docs/planner.md."
)


def plan_to_text(plan: Plan, tokens: float | None = None) -> str:
    """Return a plan as text: layouts, costs of the best layout, the reason and the accuracy.

    Args:
        plan: A `Plan`.
        tokens: Number of training tokens, for columns with hours. `None` omits them.
    """
    best = plan.best
    model = plan.model
    trained = model.trained_parameters()
    share = "" if trained == model.parameters() else f", {trained:,} of them trained"
    lines = [
        f"{model.name}: {model.parameters() / 1e9:,.3g} B parameters{share}, sequences of "
        f"{model.sequence_length:,} tokens, global batch {plan.job.global_batch:,}, "
        f"{plan.job.precision}, {plan.job.optimizer}, on {plan.cluster}",
        f"{plan.num_layouts:,} layouts computed, {plan.num_fitting:,} fit into "
        f"{plan.cluster.memory_bytes / 1e9:,.4g} GB/device",
        "",
    ]
    header = ["", "layout", "s/step", "tokens/s", "of peak", "GB/device"]
    has_reference = best.reference_seconds is not None
    if has_reference:
        header.insert(3, "reference s/step")
    if tokens:
        kind = "CPU" if plan.cluster.device.name == "cpu" else "GPU"
        header += ["hours", f"{kind}-hours"]
    rows = [header]
    for i, cost in enumerate(plan.costs, start=1):
        row = [i, cost.layout, f"{cost.step_seconds:,.4g}"]
        if has_reference:
            row.append(f"{cost.reference_seconds:,.4g}")
        row += [f"{cost.tokens_per_second:,.0f}", f"{cost.flops_share:.1%}"]
        row.append(f"{cost.memory_bytes / 1e9:,.3g}")
        if tokens:
            hours = training_hours(cost, tokens)
            row += [_hours_text(hours), _hours_text(hours * plan.cluster.num_devices)]
        rows.append(row)
    lines += columns(rows, right=(0, *range(2, len(header))))
    if has_reference:
        lines += ["", _REFERENCE]
    lines += ["", *_cost_tables(best), ""]
    if plan.fits:
        lines.append(f"Recommended: layout 1. {plan.why}")
    else:
        lines.append(f"{fit_line(best)} {plan.why}")
    return "\n".join([*lines, plan.cluster.device.accuracy(), _ASSUMPTIONS])


def _hours_text(hours):
    """Return hours with three significant digits, or without decimals from 1,000 on."""
    return f"{hours:,.0f}" if hours >= 1000 else f"{hours:.3g}"


def fit_line(cost: Cost) -> str:
    """Return a sentence with the needed and available memory, and the change that makes it fit."""
    needed = cost.memory_bytes / 1e9
    available = cost.available_bytes / 1e9
    if cost.fits:
        return f"It fits: {needed:,.4g} GB of {available:,.4g} GB per device."
    message = (
        f"It does not fit: {needed:,.4g} GB per device, {cost.missing_bytes:,} bytes more than the "
        f"available {available:,.4g} GB."
    )
    return f"{message} {cost.change}" if cost.change else message


def _cost_tables(cost):
    """Return the lines of two tables: time and memory of a layout by kind."""
    seconds = {_KIND_NAMES[kind]: value for kind, value in cost.seconds_by_kind.items()}
    gigabytes = {kind: value / 1e9 for kind, value in cost.bytes_by_kind.items()}
    time = _share_table(seconds, ("time", "s", "share"), ",.4g")
    memory = _share_table(gigabytes, ("memory of the fullest rank", "GB", "share"), ",.3g")
    return [*time, "", *memory]


def _share_table(values, header, form):
    """Return the lines of a table of the nonzero values with their shares of the total."""
    total = sum(values.values())
    rows = [(kind, f"{x:{form}}", f"{x / total:.1%}") for kind, x in values.items() if x]
    return columns([header, *rows], right=(1, 2))


def plan_to_json(plan: Plan, tokens: float | None = None) -> dict:
    """Return a plan as a JSON object. Names of numeric fields end with their unit.

    Args:
        plan: A `Plan`.
        tokens: Number of training tokens, for hours per layout. `None` omits them.
    """
    layouts = [cost_to_json(cost) for cost in plan.costs]
    if tokens:
        for fields, cost in zip(layouts, plan.costs):
            fields["hours"] = training_hours(cost, tokens)
            fields["device_hours"] = fields["hours"] * plan.cluster.num_devices
    return {
        "model": dataclasses.asdict(plan.model) | {"parameters": plan.model.parameters()},
        "device": plan.cluster.device.name,
        "num_devices": plan.cluster.num_devices,
        "devices_per_node": plan.cluster.devices_per_node,
        "global_batch": plan.job.global_batch,
        "precision": plan.job.precision,
        "optimizer": plan.job.optimizer,
        "accuracy": plan.cluster.device.accuracy(),
        "layouts_computed": plan.num_layouts,
        "layouts_fitting": plan.num_fitting,
        "fits": plan.fits,
        "why": plan.why,
        "layouts": layouts,
    }


def cost_to_json(cost: Cost) -> dict:
    """Return a cost as a JSON object."""
    extra = {
        "config": get_changed_fields(cost.config),
        "fits": cost.fits,
        "missing_bytes": cost.missing_bytes,
    }
    return {**vars(cost), **extra}


def get_changed_fields(config: TransformerOpParallelConfig) -> dict:
    """Return the config fields that differ from their defaults, with plain values."""
    default = dataclasses.asdict(TransformerOpParallelConfig())
    fields = dataclasses.asdict(config)
    return {name: value for name, value in fields.items() if value != default[name]}


def draw(plan: Plan, path: str | os.PathLike) -> None:
    """Draw a plan with matplotlib: bars of its layouts, and all layouts by memory and time.

    Args:
        plan: A `Plan`.
        path: Path of a .png, .svg or .pdf file to write.

    Raises:
        InputError: If matplotlib is missing or does not support the file type.
    """
    check_installed("matplotlib", "Pictures")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained")
    times, memories, frontier = figure.subplots(1, 3)
    _draw_bars(times, [cost.seconds_by_kind for cost in plan.costs], 1, "s/step")
    _draw_bars(memories, [cost.bytes_by_kind for cost in plan.costs], 1e9, "GB/device")
    memories.axvline(plan.cluster.memory_bytes / 1e9, color="black", linestyle="--")
    _draw_frontier(frontier, plan)
    names = "\n".join(f"{i}: {cost.layout}" for i, cost in enumerate(plan.costs, start=1))
    figure.suptitle(f"{plan.model.name} on {plan.cluster}\n{names}", fontsize=8)
    with raise_as_input_error(f"{path}: unknown file type"):
        figure.savefig(path, dpi=120)


def _draw_bars(axes, by_kind, unit, label):
    """Draw a stacked bar per layout with one segment for each kind that is not zero everywhere."""
    start = 0
    places = range(1, len(by_kind) + 1)
    for kind in by_kind[0]:
        values = np.array([costs[kind] / unit for costs in by_kind])
        if values.any():
            axes.barh(places, values, left=start, label=kind.replace("_", " "))
            start += values
    axes.set_yticks(places)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.legend(fontsize=7)


def _draw_frontier(axes, plan):
    """Draw all layouts by memory and time, with the Pareto frontier."""
    layouts = enumerate_layouts(plan.model, plan.cluster, plan.job)
    memory, time = evaluate(plan.model, plan.cluster, plan.job, layouts)
    needed = memory.total / 1e9
    seconds = time.total
    axes.scatter(needed, seconds, s=4, color="lightgray", label="all layouts")
    order = np.lexsort((seconds, needed))
    best = np.minimum.accumulate(seconds[order])
    first = np.r_[True, best[1:] < best[:-1]]
    axes.plot(needed[order][first], best[first], "o-", markersize=3, label="Pareto frontier")
    axes.axvline(plan.cluster.memory_bytes / 1e9, color="black", linestyle="--", label="available")
    axes.set(xscale="log", yscale="log", xlabel="GB/device", ylabel="s/step")
    axes.legend(fontsize=7)
