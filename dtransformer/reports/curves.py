"""The picture of a run's losses."""

import json
import os
import pathlib

from dtransformer.errors import check_installed
from dtransformer.files import replacing


def draw_losses(metrics: str | os.PathLike, picture: str | os.PathLike) -> None:
    """Draw the losses of a run's steps, and of its validation data after each epoch.

    Args:
        metrics: a file that `MetricsFile` has written.
        picture: the file to write, `.png`, `.svg` or `.pdf`; one that is there is replaced.

    Raises:
        InputError: matplotlib is not there.
    """
    check_installed("matplotlib", "pictures")
    from matplotlib.figure import Figure

    lines = [json.loads(x) for x in pathlib.Path(metrics).read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    epochs = [line for line in lines if line["kind"] == "epoch" and "val_loss" in line]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    # The mean of the epoch so far, where the loss of the step is not logged.
    losses = [x.get("step_loss", x["loss"]) for x in steps]
    axes.plot([x["step"] for x in steps], losses, lw=0.8, label="training")
    if epochs:
        held_out = [x["val_loss"] for x in epochs]
        axes.plot([x["step"] for x in epochs], held_out, "o-", label="held-out data")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    picture = pathlib.Path(picture)
    with replacing(picture) as file:
        figure.savefig(file, format=picture.suffix.removeprefix("."), dpi=120)
