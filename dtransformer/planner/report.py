"""A plan as text, as JSON and as YAML."""

import dataclasses
import os

import numpy as np
import yaml

from dtransformer.architectures import ARCHITECTURES
from dtransformer.errors import check_installed, refusing
from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.planner.cost import Cost, evaluate
from dtransformer.planner.grid import grid_of
from dtransformer.planner.models import named
from dtransformer.planner.search import Plan
from dtransformer.tables import columns

_WORDS = {
    "products": "products and what is between them",
    "recompute": "computed again",
    "bubble": "stages wait",
    "model_parallel": "sums over the model axis",
    "context_parallel": "keys and values of other shards",
    "expert_parallel": "tokens to experts",
    "sends": "from stage to stage",
    "unsharding": "weights unsharded",
    "reduction": "gradients reduced, not hidden",
    "update": "optimizer",
}


def text_of(plan: Plan) -> str:
    """Return a plan as a text to read: the layouts, where the first spends what, and why it is it."""
    best, model = plan.best, plan.model
    trained = model.trained_parameters()
    share = "" if trained == model.parameters() else f", {trained:,} of them trained"
    lines = [
        f"{model.name}: {model.parameters() / 1e9:,.3g} B parameters{share}, sequences of "
        f"{model.sequence_length:,}, batch {plan.job.global_batch:,}, {plan.job.precision}, "
        f"{plan.job.optimizer}, on {plan.cluster}",
        f"{plan.num_layouts:,} layouts computed, {plan.num_fitting:,} fit into "
        f"{plan.cluster.memory_bytes / 1e9:,.4g} GB a device",
        "",
    ]
    rows = [("", "layout", "s a step", "tokens/s", "of peak", "GB a device")]
    for number, cost in enumerate(plan.costs, start=1):
        speed = f"{cost.step_seconds:,.4g}", f"{cost.tokens_per_second:,.0f}"
        shares = f"{cost.flops_share:.1%}", f"{cost.memory_bytes / 1e9:,.3g}"
        rows.append((number, cost.layout, *speed, *shares))
    lines += columns(rows, right=(0, 2, 3, 4, 5))
    lines += ["", *_spent(best), ""]
    if plan.fits:
        lines.append(f"Take 1: {plan.why}.")
    else:
        lines.append(f"{fit_line(best)} {plan.why}.")
    return "\n".join([*lines, *_checked_lines(plan.cluster.device)])


def _checked_lines(device):
    """Return the lines of which constants of a device measurements stand behind."""
    (checked, others), source = device.checked_constants(), device.constants.source
    lines = [f"Checked: {', '.join(checked)} of {device.name}: {source}."] if checked else []
    vendors = f"of {device.name} ({source}); its other figures are its vendor's. --measure measures"
    if others:
        told = f"Not checked against any measurement: {', '.join(others)}"
        lines.append(f"{told}." if checked else f"{told} {vendors} them.")
    return lines


def fit_line(cost: Cost) -> str:
    """Return whether a layout fits, in a sentence; and what would make it fit."""
    needed, there = cost.memory_bytes / 1e9, cost.available_bytes / 1e9
    if cost.fits:
        return f"It fits: {needed:,.4g} GB of {there:,.4g} GB a device."
    message = (
        f"It does not fit: {needed:,.4g} GB a device, {cost.missing_bytes:,} bytes more than the "
        f"{there:,.4g} GB that there are."
    )
    return f"{message} The cheapest change: {cost.change}." if cost.change else message


def _spent(cost):
    """Return the lines of where a layout spends time and memory."""
    seconds, needed = [("time", "s", "share")], [("memory of the fullest rank", "GB", "share")]
    for kind, value in cost.seconds_by_kind.items():
        if value:
            seconds.append((_WORDS[kind], f"{value:,.4g}", f"{value / cost.step_seconds:.1%}"))
    for kind, value in cost.bytes_by_kind.items():
        if value:
            needed.append((kind, f"{value / 1e9:,.3g}", f"{value / cost.memory_bytes:.1%}"))
    return [*columns(seconds, right=(1, 2)), "", *columns(needed, right=(1, 2))]


def json_of(plan: Plan) -> dict:
    """Return a plan as what JSON has; units are in the names."""
    checked, others = plan.cluster.device.checked_constants()
    return {
        "model": dataclasses.asdict(plan.model) | {"parameters": plan.model.parameters()},
        "device": plan.cluster.device.name,
        "num_devices": plan.cluster.num_devices,
        "devices_per_node": plan.cluster.devices_per_node,
        "global_batch": plan.job.global_batch,
        "precision": plan.job.precision,
        "optimizer": plan.job.optimizer,
        "constants_checked": checked,
        "constants_not_checked": others,
        "layouts_computed": plan.num_layouts,
        "layouts_fitting": plan.num_fitting,
        "fits": plan.fits,
        "why": plan.why,
        "layouts": [json_of_cost(cost) for cost in plan.costs],
    }


def json_of_cost(cost: Cost) -> dict:
    """Return a cost as what JSON has."""
    fields = {field.name: getattr(cost, field.name) for field in dataclasses.fields(cost)}
    return {
        **fields,
        "config": fields_of(cost.config),
        "fits": cost.fits,
        "missing_bytes": cost.missing_bytes,
    }


def fields_of(config: TransformerOpParallelConfig) -> dict:
    """Return the fields of a config that are not their defaults, as YAML and JSON have them."""
    default = dataclasses.asdict(TransformerOpParallelConfig())
    fields = dataclasses.asdict(config)
    return {name: value for name, value in fields.items() if value != default[name]}


_TASKS = {"CausalLM": "causal_lm", "MaskedLM": "masked_lm", "EncoderDecoderLM": "span_corruption"}


def yaml_of(plan: Plan) -> str:
    """Return the first layout as the YAML of a run's config, to train with."""
    model, job, ranks = plan.model, plan.job, plan.cluster.num_devices
    content = {"parallel": fields_of(plan.best.config)}
    is_published = model.name in ARCHITECTURES and job.precision != "bfloat16"
    if is_published and model == named(model.name, sequence_length=model.sequence_length):
        content = {
            "task": _TASKS[ARCHITECTURES[model.name].network],
            "data": {"length": model.sequence_length},
            "model": {"preset": model.name},
            "training": {
                "batch_size": job.global_batch,
                "precision": job.precision,
                "optimizer": job.optimizer,
            },
            **content,
        }
    head = (
        f"# {model.name} on {plan.cluster}: {plan.best.layout}\n"
        f"# For {ranks} ranks: what a config of `dtransformer train` begins with; in Python\n"
        "# TransformerOpParallelConfig(**yaml.safe_load(open(THIS_FILE))['parallel']).\n"
    )
    return f"{head}{yaml.safe_dump(content, sort_keys=False)}"


# Pictures of a plan, which need matplotlib: time and memory by kind, and the frontier of both.


def draw(plan: Plan, path: str | os.PathLike) -> None:
    """Write a picture of a plan: bars of its layouts, and all layouts by memory and time.

    Args:
        plan: the `Plan`.
        path: the file, .png, .svg or .pdf.

    Raises:
        InputError: matplotlib is not installed, or does not know such files.
    """
    check_installed("matplotlib", "pictures")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained")
    times, memories, frontier = figure.subplots(1, 3)
    _bars(times, [cost.seconds_by_kind for cost in plan.costs], 1, "s a step")
    _bars(memories, [cost.bytes_by_kind for cost in plan.costs], 1e9, "GB a device")
    memories.axvline(plan.cluster.memory_bytes / 1e9, color="black", linestyle="--")
    _frontier(frontier, plan)
    names = "\n".join(f"{i}: {cost.layout}" for i, cost in enumerate(plan.costs, start=1))
    figure.suptitle(f"{plan.model.name} on {plan.cluster}\n{names}", fontsize=8)
    with refusing(f"{path}: is no kind of picture that is known"):
        figure.savefig(path, dpi=120)


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
