"""Draw the plots of four tutorials from the files that they write.

python docs/pictures/tutorials.py classification FOLDER

FOLDER is the folder where the commands of the tutorial ran.
"""

import argparse
import json
import pathlib

import numpy as np
from matplotlib import pyplot
from style import BLUE, DEVICE_COLORS, GREEN, MUTED, ORANGE, save


def read_json_lines(path):
    """Return the objects of a file with one JSON object per line."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def read_metrics(run, kind):
    """Return the lines of a run's metrics.jsonl with a kind: step or epoch."""
    return [row for row in read_json_lines(run / "metrics.jsonl") if row["kind"] == kind]


def two_axes(ratios=(1, 1)):
    """Return a figure and two axes side by side."""
    return pyplot.subplots(1, 2, figsize=(9, 3.4), width_ratios=ratios, constrained_layout=True)


def draw_losses(axes, steps, epochs):
    """Draw the loss of every step and the validation loss of every epoch."""
    axes.plot(
        [row["step"] for row in steps],
        [row["step_loss"] for row in steps],
        color=BLUE,
        linewidth=0.8,
        label="training, each step",
    )
    axes.plot(
        [row["step"] for row in epochs],
        [row["val_loss"] for row in epochs],
        color=ORANGE,
        marker="o",
        label="held-out",
    )
    axes.set_xlabel("step")
    axes.set_title("Loss", loc="left")
    axes.legend(fontsize=9)


def classification(folder):
    """Draw losses and the confusion matrix of the text classifier."""
    run = folder / "runs" / "reviews"
    figure, (left, right) = two_axes((1.6, 1))
    draw_losses(left, read_metrics(run, "step"), read_metrics(run, "epoch"))
    names = ["negative", "mixed", "positive"]
    counts = np.zeros((3, 3), int)
    labels = [row["label"] for row in read_json_lines(folder / "dev.jsonl")]
    predictions = [row["label"] for row in read_json_lines(folder / "predicted.jsonl")]
    for label, prediction in zip(labels, predictions, strict=True):
        counts[names.index(label), names.index(prediction)] += 1
    right.imshow(counts, cmap="Blues", vmax=1.4 * counts.max())
    for (row, column), count in np.ndenumerate(counts):
        right.text(column, row, str(count), ha="center", va="center")
    right.set_xticks(range(3), names)
    right.set_yticks(range(3), names)
    right.set_xlabel("prediction")
    right.set_ylabel("label in the file")
    right.set_title("500 held-out texts", loc="left")
    save(figure, "tutorial_classification")


def embeddings(folder):
    """Draw recall per epoch and the similarities of the first held-out pairs."""
    epochs = read_metrics(folder / "runs" / "vectors", "epoch")
    figure, (left, right) = two_axes((1.4, 1))
    numbers = [row["epoch"] for row in epochs]
    for key, color in (("val_recall@1", BLUE), ("val_recall@5", GREEN), ("val_mrr", ORANGE)):
        values = [row[key] for row in epochs]
        left.plot(numbers, values, color=color, marker="o", label=key.removeprefix("val_"))
    left.set_xticks(numbers)
    left.set_xlabel("epoch")
    left.set_title("Retrieval, 500 held-out pairs", loc="left")
    left.legend(fontsize=9)
    english, french = np.load(folder / "english.npy"), np.load(folder / "french.npy")
    picture = right.imshow(english[:40] @ french[:40].T, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(picture, ax=right)
    right.set_xlabel("French sentence")
    right.set_ylabel("English sentence")
    right.set_title("Cosine similarity", loc="left")
    save(figure, "tutorial_embeddings")


def keras_model(folder):
    """Draw epoch losses of every layout, and how far they are from one process."""
    layouts = {
        "plain-2": ("two data-parallel ranks", 4),
        "zero-2": ("the same with ZeRO level 2", 1.5),
        "pipeline-2": ("two pipeline stages", 1.5),
    }
    reference = json.loads((folder / "plain-1.json").read_text("utf-8"))
    numbers = np.arange(1, len(reference["loss"]) + 1)
    figure, (left, right) = two_axes()
    left.plot(numbers, reference["loss"], color=MUTED, linewidth=5, alpha=0.4, label="one process")
    for (name, (label, width)), color in zip(layouts.items(), DEVICE_COLORS):
        history = json.loads((folder / f"{name}.json").read_text("utf-8"))
        left.plot(numbers, history["loss"], color=color, linestyle="--", label=label)
        difference = np.abs(np.divide(history["loss"], reference["loss"]) - 1)
        right.plot(numbers, difference, color=color, linewidth=width, marker="o")
    for axes, title in ((left, "Training loss"), (right, "Relative difference to one process")):
        axes.set_xticks(numbers)
        axes.set_xlabel("epoch")
        axes.set_title(title, loc="left")
    left.legend(fontsize=9)
    right.axhline(1e-5, color=MUTED, linestyle=":")
    right.text(1, 1.2e-5, "tolerance of the tests", size=9, color=MUTED, va="bottom")
    right.set_yscale("log")
    right.set_ylim(5e-10, 1e-4)
    save(figure, "tutorial_keras_model")


def wmt14(folder):
    """Draw losses and BLEU of the translation run."""
    run = folder / "runs" / "embedded"
    steps, epochs = read_metrics(run, "step"), read_metrics(run, "epoch")
    figure, (left, right) = two_axes((1.6, 1))
    draw_losses(left, steps, epochs)
    bleu = [(row["epoch"], row["val_bleu"]) for row in epochs]
    right.bar(
        [str(epoch) for epoch, _ in bleu], [value for _, value in bleu], color=BLUE, width=0.5
    )
    for place, (_, value) in enumerate(bleu):
        right.text(place, value + 1, f"{value:.1f}", ha="center")
    right.set_ylim(0, 110)
    right.set_xlabel("epoch")
    right.set_title("BLEU, 200 held-out sentences", loc="left")
    save(figure, "tutorial_wmt14")


PLOTS = {
    "classification": classification,
    "embeddings": embeddings,
    "keras-model": keras_model,
    "wmt14": wmt14,
}


def main():
    """Draw the plot of one tutorial."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tutorial", choices=PLOTS)
    parser.add_argument("folder", type=pathlib.Path)
    arguments = parser.parse_args()
    PLOTS[arguments.tutorial](arguments.folder)


if __name__ == "__main__":
    main()
