"""Plot the losses of several runs.

python examples/language_model/curves.py runs/gpt runs/experts --out curves.png
"""

import argparse
import json
import pathlib

from matplotlib.figure import Figure


def losses_by_step(lines, kind, name):
    """Return the steps and losses of one kind of metric lines, in the order of the steps.

    A resumed run repeats steps. The last line of a step counts.
    """
    losses = {line["step"]: float(line[name]) for line in lines if line["kind"] == kind}
    steps = sorted(losses)
    return steps, [losses[step] for step in steps]


def smooth(steps, losses, size):
    """Return the last step and the mean loss of each group of `size` lines."""
    starts = range(0, len(steps), size)
    step_groups = [steps[start : start + size] for start in starts]
    loss_groups = [losses[start : start + size] for start in starts]
    ends = [group[-1] for group in step_groups]
    means = [sum(group) / len(group) for group in loss_groups]
    return ends, means


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "runs", nargs="+", type=pathlib.Path, help="run folders of dtransformer train"
    )
    parser.add_argument("--out", default="curves.png")
    parser.add_argument("--smooth", type=int, default=20, help="number of steps to average")
    args = parser.parse_args()
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for index, run in enumerate(args.runs):
        text = (run / "metrics.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        steps, losses = losses_by_step(lines, "step", "step_loss")
        steps, losses = smooth(steps, losses, args.smooth)
        axes.plot(steps, losses, lw=0.8, color=f"C{index}", label=f"{run.name}: training")
        steps, losses = losses_by_step(lines, "epoch", "val_loss")
        label = f"{run.name}: held-out text, {losses[-1]:.3f}"
        axes.plot(steps, losses, "o--", color=f"C{index}", label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    figure.savefig(args.out, dpi=120)
    print(args.out)


if __name__ == "__main__":
    main()
