"""Every task has the losses and scores of one process on two ranks, for every layout."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from dtransformer.datasets import load_tokenizer, write_token_shards
from harness.tolerances import PARITY_LOSS
from tests.runs.small_records import CONFIGS, write, write_config
from tests.shared_runs import needs_horovod

ROOT = pathlib.Path(__file__).parents[2]
LAYOUTS = {
    "data": [],
    "zero": ["parallel.optimizer_shard=3"],
    "model": ["parallel.model_parallel=2"],
}
# Layouts for a mixture of token shards, next to the layouts of all tasks.
MIXTURE_LAYOUTS = {
    "context": ["parallel.context_parallel=2"],
    "pipeline": ["parallel.pipeline_stage=2", "parallel.micro_batch_num=2"],
}
LOSSES = ("sigmoid_norm", "simpo", "orpo")
pytestmark = [needs_horovod, pytest.mark.long]


def command(place, name, run, ranks, settings):
    """Train a task in one process or two ranks. Return the losses and scores of its epochs."""
    path = write_config(name, place)
    # All rows have the same length. Otherwise ranks would pad them differently.
    train = ["-m", "dtransformer.cli", "train", "--config", str(path), "--run", run, "--overwrite"]
    launch = [str(pathlib.Path(sys.executable).parent / "horovodrun"), "--gloo", "-np", "2"]
    words = [*(launch if ranks == 2 else []), sys.executable, *train]
    words += ["--set", "export.folder=null", *settings]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, capture_output=True, text=True, env=environment, cwd=place, timeout=240
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    lines = (place / run / "metrics.jsonl").read_text().splitlines()
    return [
        [x[key] for key in ("loss", "val_loss", "val_f1", "val_mrr", "val_spearman") if key in x]
        for x in map(json.loads, lines)
        if x["kind"] == "epoch"
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    write(folder)
    documents = (folder / "text.txt").read_text().split("\n\n")
    tokenizer = load_tokenizer(folder / "llama")
    write_token_shards(documents[::3], tokenizer, folder / "web")
    write_token_shards(documents[1::3], tokenizer, folder / "code")
    command(folder, "chat", "runs/chat", 1, [])  # The preference task starts from it.
    return folder


MIXTURE = [
    "data.train=[{path: web, weight: 0.7}, {path: code, weight: 0.3}]",
    "training.max_steps=20",
    "training.epochs=20",
]
# Settings of at least 20 steps.
CASES = [
    *((name, []) for name in CONFIGS),
    ("kto", ["training.epochs=10"]),
    ("gpt", MIXTURE),
    *(("preference", [f"training.loss={loss}", "training.epochs=3"]) for loss in LOSSES),
]


def check_layouts(name, options, place, layouts):
    """Compare the epochs' losses and scores of two ranks under each layout with one process."""
    expected = command(place, name, f"runs/{name}-1", 1, options)
    for layout, settings in layouts.items():
        result = command(place, name, f"runs/{name}-{layout}", 2, [*options, *settings])
        # Small losses are differences of large logits.
        tolerances = {"rtol": PARITY_LOSS, "atol": 1e-6}
        np.testing.assert_allclose(result, expected, **tolerances, err_msg=f"{name}, {layout}")


@pytest.mark.parametrize("name, options", CASES)
def test_losses_on_ranks_match_one_process(name, options, place):
    check_layouts(name, options, place, LAYOUTS)


def test_mixture_has_the_same_losses_in_context_and_pipeline_parallelism(place):
    options = [*MIXTURE, "model.num_layers=2"]
    check_layouts("gpt", options, place, MIXTURE_LAYOUTS)
