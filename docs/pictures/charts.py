"""Charts from the library's own simulator and planner, and from measured results."""

import json
import pathlib

from matplotlib import pyplot
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator
from style import BLUE, GRAY, GREEN, INK, MUTED, ORANGE, PURPLE, save

from dtransformer.parallel.schedules.instruction import BACKWARD, FORWARD, WEIGHT_GRADIENTS
from dtransformer.parallel.schedules.schedules import SCHEDULES, instructions
from dtransformer.parallel.schedules.simulator import simulate
from dtransformer.planner.formulas import state_bytes
from harness.published_tables import published
from harness.published_tables.compared import make_layouts

RESULTS = pathlib.Path(__file__).parent / "results"
STAGES, MICRO_BATCHES = 4, 8
PEER_COLOR = "#f4c38a"  # a light orange


def draw_all():
    """Draw every chart."""
    timelines()
    zero_memory()
    speed()
    planner_error()
    curves()
    qlora()


def timelines():
    """Draw one step of 1F1B, interleaved and zero-bubble schedules on four stages."""
    rows = [
        ("1f1b", 1, "1F1B"),
        ("interleaved", 2, "Interleaved 1F1B, 2 chunks per stage"),
        ("zb_h1", 1, "Zero bubble (ZB-H1)"),
    ]
    figure, all_axes = pyplot.subplots(len(rows), 1, figsize=(9, 6.4), constrained_layout=True)
    for axes, (name, chunks, title) in zip(all_axes, rows):
        _timeline(axes, name, chunks, title)
    all_axes[-1].set_xlabel("time (forward pass of one stage = 1)")
    colors = {"forward": BLUE, "backward": GREEN, "weight gradients": ORANGE}
    handles = [Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    all_axes[0].legend(
        handles, list(colors), loc="lower right", bbox_to_anchor=(1, 1.0), ncols=3, fontsize=9
    )
    save(figure, "timelines")


def _timeline(axes, name, chunks, title):
    placement = SCHEDULES[name].place(STAGES, chunks)
    orders = instructions(name, placement, MICRO_BATCHES)
    has_weight_passes = name.startswith("zb")
    timeline = simulate(
        orders,
        placement,
        forward=1 / chunks,
        backward=(1 if has_weight_passes else 2) / chunks,
        weight_gradients=1 / chunks,
    )
    colors = {FORWARD: BLUE, BACKWARD: GREEN, WEIGHT_GRADIENTS: ORANGE}
    for stage in range(STAGES):
        for event in timeline.get_stage_events(stage):
            start, length = event.start, event.end - event.start
            is_second_chunk = event.instruction.chunk >= STAGES
            color = colors[event.instruction.kind]
            axes.add_patch(
                Rectangle((start, stage - 0.42), length, 0.84, facecolor=color, edgecolor="white",
                          linewidth=0.7, alpha=0.65 if is_second_chunk else 1.0)
            )  # fmt: skip
            if length >= 0.5:
                label = str(event.instruction.micro_batch)
                axes.text(
                    start + length / 2,
                    stage,
                    label,
                    size=7,
                    color="white",
                    ha="center",
                    va="center",
                )
    axes.set_xlim(0, 37)
    axes.set_ylim(STAGES - 0.4, -0.6)
    axes.set_yticks(range(STAGES), [f"stage {stage}" for stage in range(STAGES)])
    axes.set_title(f"{title}: {timeline.bubble:.0%} idle", loc="left")
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)


def zero_memory():
    """Draw bytes per GPU of weights, gradients and Adam states for a 7B model on 8 GPUs."""
    parameters, replicas = 7e9, 8
    figure, axes = pyplot.subplots(figsize=(7, 3.2), constrained_layout=True)
    names = ["no sharding", "level 1: optimizer", "level 2: + gradients", "level 3: + weights"]
    parts = (
        ("weights (bfloat16)", BLUE),
        ("gradients (bfloat16)", GREEN),
        ("Adam: float32 weights, mean, variance", ORANGE),
    )
    sizes = [
        [float(part) / 1e9 for part in state_bytes(parameters, replicas, level)]
        for level in range(4)
    ]
    left = [0.0] * 4
    for index, (label, color) in enumerate(parts):
        widths = [row[index] for row in sizes]
        axes.barh(names, widths, left=left, color=color, label=label, height=0.6)
        left = [a + b for a, b in zip(left, widths)]
    for row, total in enumerate(left):
        axes.text(total + 1, row, f"{total:.0f} GB", va="center", size=10)
    axes.axvline(80, color=MUTED, linestyle="--", linewidth=1)
    axes.text(81, 1, "memory of one H100", size=9, color=MUTED, va="center")
    axes.set_xlim(0, 135)
    axes.invert_yaxis()
    axes.set_xlabel("GB per GPU, 7B parameters, 8 GPUs")
    axes.legend(loc="lower right", fontsize=9)
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)
    save(figure, "zero_memory")


def speed():
    """Draw tokens per second beside other libraries, from results/speed.json."""
    report = json.loads((RESULTS / "speed.json").read_text("utf-8"))
    workloads = report["workloads"]
    peers = [
        ("dtransformer", BLUE),
        ("dtransformer_without_onednn", GRAY),
        ("transformers", ORANGE),
        ("pytorch", ORANGE),
    ]
    figure, axes = pyplot.subplots(figsize=(7.6, 3.4), constrained_layout=True)
    names = list(workloads)
    for row, name in enumerate(names):
        speeds = workloads[name]["tokens_per_second"]
        present = [(color, speeds[key]) for key, color in peers if key in speeds]
        height = 0.8 / len(present)
        for place, (color, value) in enumerate(present):
            y = row - 0.4 + height * (place + 0.5)
            axes.barh(y, value, height=height * 0.9, color=color)
            axes.text(value + 40, y, f"{value:,}", va="center", size=8)
    axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
    axes.invert_yaxis()
    axes.set_xlim(0, 4400)
    axes.set_xlabel("tokens per second, one CPU core")
    labels = {"dtransformer": BLUE, "dtransformer, oneDNN off": GRAY, "PyTorch": ORANGE}
    handles = [Rectangle((0, 0), 1, 1, color=color) for color in labels.values()]
    axes.legend(handles, list(labels), loc="upper right", fontsize=9)
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)
    save(figure, "speed")


def planner_error():
    """Draw the planner's step times against published step times of the same layouts."""
    figure, axes = pyplot.subplots(figsize=(5.2, 4.6), constrained_layout=True)
    models = published.LAYOUT_MODELS
    for model, color in zip(models, (BLUE, GREEN, ORANGE, PURPLE, GRAY)):
        rows = [row for row in make_layouts(model).rows if row.digits is None]
        measured = [row.published for row in rows]
        planned = [row.ours for row in rows]
        axes.scatter(measured, planned, s=22, color=color, label=model, alpha=0.8, linewidths=0)
    low, high = 3, 90
    axes.plot((low, high), (low, high), color=INK, linewidth=1)
    axes.fill_between(
        (low, high),
        (low * 0.8, high * 0.8),
        (low * 1.2, high * 1.2),
        color=MUTED,
        alpha=0.12,
        linewidth=0,
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = (3, 5, 10, 20, 50)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_ticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_xlabel("published step time in seconds")
    axes.set_ylabel("planned step time in seconds")
    axes.legend(loc="upper left", fontsize=8)
    axes.text(
        0.97, 0.05, "gray: within 20 %", transform=axes.transAxes, ha="right", size=9, color=MUTED
    )
    save(figure, "planner")


def curves():
    """Draw the losses of dtransformer and transformers for four families, from results/curves.json."""
    report = json.loads((RESULTS / "curves.json").read_text("utf-8"))
    titles = {"gpt2": "GPT-2", "llama": "Llama", "bert": "BERT", "t5": "T5"}
    figure, all_axes = pyplot.subplots(2, 2, figsize=(5.6, 4.9), constrained_layout=True)
    for axes, (family, losses) in zip(all_axes.flat, report["families"].items()):
        steps = range(1, len(losses["transformers"]) + 1)
        axes.plot(steps, losses["transformers"], color=PEER_COLOR, linewidth=6)
        axes.plot(steps, losses["dtransformer"], color=INK, linewidth=1.2)
        axes.set_title(titles[family], loc="left")
        difference = f"{losses['largest_difference']:.1e}".replace("e-0", "e-")
        text = f"max. difference {difference}"
        axes.text(0.97, 0.93, text, transform=axes.transAxes, ha="right", va="top", size=10)
        axes.set_xlim(0, len(steps))
    for axes in all_axes[:, 0]:
        axes.set_ylabel("loss")
    handles = [
        Line2D([], [], color=PEER_COLOR, linewidth=6, label="transformers (PyTorch)"),
        Line2D([], [], color=INK, linewidth=1.2, label="dtransformer"),
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=2, fontsize=11)
    label = f"step (on {report['machine']}, {report['date']})"
    figure.supxlabel(label, size=11, color=INK)
    save(figure, "curves")


def qlora():
    """Draw the losses of LoRA and of QLoRA in both formats, from results/qlora.json."""
    report = json.loads((RESULTS / "qlora.json").read_text("utf-8"))
    styles = [(PEER_COLOR, 6), (BLUE, 1.5), (INK, 1.2)]
    figure, axes = pyplot.subplots(figsize=(6.4, 3.2), constrained_layout=True)
    for (name, case), (color, width) in zip(report["cases"].items(), styles, strict=True):
        label = f"{name}: kernels of {case['kernel_bytes'] / 2**20:.2f} MiB"
        steps = range(1, len(case["losses"]) + 1)
        axes.plot(steps, case["losses"], color=color, linewidth=width, label=label)
    axes.set_xlim(1, len(steps))
    axes.set_xticks([1, *steps[4::5]])
    axes.set_xlabel(f"step (on {report['machine']}, {report['date']})")
    axes.set_ylabel("loss")
    axes.legend()
    save(figure, "qlora")
