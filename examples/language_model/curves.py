"""Draw the losses of several runs into one picture.

python examples/language_model/curves.py runs/gpt runs/experts --out curves.png
"""

import argparse
import json
import pathlib

from matplotlib.figure import Figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "runs", nargs="+", type=pathlib.Path, help="run folders, of dtransformer train"
    )
    parser.add_argument("--out", default="curves.png")
    parser.add_argument("--smooth", type=int, default=20, help="steps of which the mean is shown")
    args = parser.parse_args()
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for number, run in enumerate(args.runs):
        lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        lines = list(lines)
        losses = [x["step_loss"] for x in lines if x["kind"] == "step"]
        groups = [losses[i : i + args.smooth] for i in range(0, len(losses), args.smooth)]
        ends = [min((i + 1) * args.smooth, len(losses)) for i in range(len(groups))]
        means = [sum(group) / len(group) for group in groups]
        axes.plot(ends, means, lw=0.8, color=f"C{number}", label=f"{run.name}: training")
        epochs = [x for x in lines if x["kind"] == "epoch"]
        held_out = [x["val_loss"] for x in epochs]
        label = f"{run.name}: held-out text, {held_out[-1]:.3f}"
        axes.plot([x["step"] for x in epochs], held_out, "o--", color=f"C{number}", label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    figure.savefig(args.out, dpi=120)
    print(args.out)


if __name__ == "__main__":
    main()
