"""Draw the loss curves of one or more runs into docs/images, in the style of the other pictures.

python docs/pictures/curves.py runs/gpt --name tutorial_gpt
python docs/pictures/curves.py runs/alone runs/distilled --name distillation \
    --labels "labels only" "labels and teacher" --held-out val_loss val_hard_loss
"""

import argparse
import json
import pathlib

from matplotlib import pyplot
from style import DEVICE_COLORS, ORANGE, save

AVERAGED_STEPS = 10  # Used only if a plot has several runs.


def read_points(run, kind, field):
    """Return the steps and values of a field in a run's metrics.jsonl.

    Args:
        run: Folder of the run.
        kind: `"step"` or `"epoch"`.
        field: Name of the metric.
    """
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    points = [
        (record["step"], float(record[field])) for record in records if record["kind"] == kind
    ]
    return zip(*points)


def average(steps, values, size):
    """Return the last step and the mean value of each group of `size` points."""
    starts = range(0, len(steps), size)
    ends = [steps[start : start + size][-1] for start in starts]
    groups = [values[start : start + size] for start in starts]
    return ends, [sum(group) / len(group) for group in groups]


def main():
    """Draw the curves of the runs that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=pathlib.Path, help="folders of runs")
    parser.add_argument("--name", required=True, help="name of the picture")
    parser.add_argument("--labels", nargs="+", default=[""], help="one label per run")
    parser.add_argument(
        "--held-out", nargs="+", default=[], help="plot only this held-out loss of each run"
    )
    arguments = parser.parse_args()
    is_single = len(arguments.runs) == 1
    fields = arguments.held_out or ["val_loss"] * len(arguments.runs)
    figure, axes = pyplot.subplots(figsize=(6.4, 3.2), constrained_layout=True)
    for run, label, color, field in zip(arguments.runs, arguments.labels, DEVICE_COLORS, fields):
        prefix = f"{label}: " if label else ""
        if not arguments.held_out:
            steps, losses = read_points(run, "step", "step_loss")
            if not is_single:
                steps, losses = average(steps, losses, AVERAGED_STEPS)
            axes.plot(steps, losses, color=color, linewidth=1, label=f"{prefix}training")
        steps, losses = read_points(run, "epoch", field)
        axes.plot(
            steps,
            losses,
            color=ORANGE if is_single else color,
            linewidth=1.5,
            linestyle="-" if is_single else "--",
            marker="o",
            markersize=4,
            label=f"{prefix}held out",
        )
    if not arguments.held_out:
        axes.set_ylim(0)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    save(figure, arguments.name)


if __name__ == "__main__":
    main()
