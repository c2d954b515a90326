"""Draw the loss curves of a run into docs/images, in the style of the other pictures.

python docs/pictures/curves.py runs/gpt tutorial_gpt
"""

import argparse
import json
import pathlib

from matplotlib import pyplot
from style import BLUE, ORANGE, save


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


def main():
    """Draw the curves of the run that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=pathlib.Path, help="folder of a run")
    parser.add_argument("name", help="name of the picture")
    arguments = parser.parse_args()
    figure, axes = pyplot.subplots(figsize=(6.4, 3.2), constrained_layout=True)
    steps, losses = read_points(arguments.run, "step", "step_loss")
    axes.plot(steps, losses, color=BLUE, linewidth=1, label="training")
    steps, losses = read_points(arguments.run, "epoch", "val_loss")
    axes.plot(
        steps, losses, color=ORANGE, linewidth=1.5, marker="o", markersize=4, label="held out"
    )
    axes.set_ylim(0)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    save(figure, arguments.name)


if __name__ == "__main__":
    main()
