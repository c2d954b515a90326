"""Promise: the examples run as their first lines say, here for a moment each."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from dtransformer.models import from_pretrained

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
FOLDER = EXAMPLES / "language_model"


def run(*command):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, env=environment
    )
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_language_models_from_scratch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(FOLDER / "embedded_text.py", "--sentences", 3000)
    for name in ("gpt", "bert", "experts"):
        train = ["-m", "dtransformer.cli", "train", "--config", FOLDER / f"{name}.yaml"]
        small = ["tokenizer.vocab_size=400"]
        run(*train, "--set", *small, "training.epochs=1")
        printed = run(*train, "--resume", "--set", *small, "training.epochs=2")
        assert "epoch 2, batch 1" in printed
        lines = (pathlib.Path("runs") / name / "metrics.jsonl").read_text().splitlines()
        losses = [x["val_loss"] for x in map(json.loads, lines) if x["kind"] == "epoch"]
        assert len(losses) == 2 and losses[1] < losses[0]
    run(FOLDER / "curves.py", "runs/gpt", "runs/experts")
    assert pathlib.Path("curves.png").stat().st_size > 1000
    generate = ["-m", "dtransformer.cli", "generate", "--model", "models/gpt", "--prompt", "We"]
    assert len(run(*generate, "--max-new-tokens", 8).split()) > 2


@pytest.mark.long
def test_a_t5_that_translates(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("-m", "dtransformer.cli", "prepare", "--embedded", "--out", "data/embedded")
    printed = run(EXAMPLES / "t5" / "train.py", "--epochs", 1)
    assert float(re.search(r"BLEU = ([\d.]+)", printed)[1]) > 5
    assert pathlib.Path("runs/t5/losses.png").stat().st_size > 1000
    assert from_pretrained("runs/t5/model").arguments["positions"] == "relative"


@pytest.mark.long
def test_adapters_learn_and_are_saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(EXAMPLES / "fine_tuning" / "train.py", "--epochs", 3)
    lines = pathlib.Path("runs/fine_tuning/metrics.jsonl").read_text().splitlines()
    losses = [x["val_loss"] for x in map(json.loads, lines) if x["kind"] == "epoch"]
    assert losses[-1] < losses[0]
    assert pathlib.Path("runs/fine_tuning/losses.png").stat().st_size > 1000
    assert pathlib.Path("runs/fine_tuning/adapters/adapter_model.safetensors").exists()


@pytest.mark.long
def test_long_sequences(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = run(EXAMPLES / "long_context" / "train.py", "--length", 256, "--steps", 3)
    assert "activations" in printed
    assert len(pathlib.Path("runs/long_context/metrics.jsonl").read_text().splitlines()) >= 3
    assert pathlib.Path("runs/long_context/losses.png").stat().st_size > 1000
