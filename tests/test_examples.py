"""The examples run as documented in their first lines."""

import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from dtransformer.cli import main
from dtransformer.models import MaskedLM, from_pretrained, save_pretrained
from tests.runs.small_records import write
from tests.shared_runs import needs_horovod

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
FOLDER = EXAMPLES / "language_model"


def run(*command, seconds=None):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=seconds,
    )
    assert not process.returncode, process.stdout + process.stderr
    return process.stdout


@pytest.mark.long
def test_language_model_examples_train_and_resume(tmp_path, monkeypatch):
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
    assert len(run(*generate, "--max-new-tokens", 8).strip()) > 2


@pytest.mark.long
def test_mixture_example_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(FOLDER / "embedded_text.py", "--sentences", 1500)
    prepare = ["-m", "dtransformer.cli", "prepare", "--lm", "--input"]
    run(*prepare, "data/lm/train.txt", "--train-tokenizer", 400, "--out", "data/corpus")
    pages = ROOT.glob("docs/*.md")
    run(*prepare, *pages, "--tokenizer", "data/corpus/tokenizer", "--out", "data/manual")
    train = ["-m", "dtransformer.cli", "train", "--config", FOLDER / "mixture.yaml"]
    printed = run(*train, "--set", "training.epochs=1", "training.max_steps=20")
    assert "Source data/manual: " in printed
    lines = pathlib.Path("runs/mixture/metrics.jsonl").read_text().splitlines()
    *_, last = map(json.loads, lines)
    assert last["epochs/data/corpus"] > 0 and last["gradient_norm/blocks/block_2"] > 0


@pytest.mark.long
def test_t5_learns_to_translate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("-m", "dtransformer.cli", "prepare", "--embedded", "--out", "data/embedded")
    train = ["-m", "dtransformer.cli", "train", "--config", EXAMPLES / "t5" / "translate.yaml"]
    run(*train, "--set", "training.epochs=1")
    lines = pathlib.Path("runs/translate/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["val_loss"] < 4
    assert from_pretrained("models/t5").arguments["positions"] == "relative"


# Data file of an example -> (records, model) of tests/runs/small_records.py.
SMALL = {
    "chat": ("chat", "llama"),
    "pairs": ("pairs", "llama"),
    "answers": ("answers", "llama"),
    "text": ("alpaca", "llama"),
    "labels": ("labels", "bert"),
    "words": ("words", "bert"),
    "numbers": ("numbers", "bert"),
    "queries": ("queries", "bert"),
    "documents": ("documents", "bert"),
}
RECORD_CONFIGS = sorted([*EXAMPLES.glob("chat/*.yaml"), *EXAMPLES.glob("labels/*.yaml")])
SETTINGS = ["training.batch_size=4", "training.epochs=1", "training.precision=float32"]


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory):
    """Return a folder with small files and models under the names that the examples use."""
    folder = tmp_path_factory.mktemp("examples")
    write(folder, hidden_size=64)  # Quantized kernels need a multiple of 64.
    (folder / "data").mkdir()
    (folder / "models").mkdir()
    for name, (source, _) in SMALL.items():
        for part in ("", "_dev"):
            shutil.copy(folder / f"{source}.jsonl", folder / f"data/{name}{part}.jsonl")
    for name in ("llama-3.2-1b-instruct", "llama-3.1-8b-instruct"):
        shutil.copytree(folder / "llama", folder / "models" / name)
    network = MaskedLM(290, hidden_size=16, num_heads=2, num_layers=1, max_length=128)
    network.build()
    save_pretrained(network, folder / "models/bert-base-uncased", "bert")
    shutil.copy(folder / "llama/tokenizer.json", folder / "models/bert-base-uncased")
    return folder


@pytest.mark.parametrize("path", RECORD_CONFIGS, ids=lambda path: path.stem)
def test_dry_runs_of_record_configs_succeed(path, data_folder, monkeypatch, capsys):
    monkeypatch.chdir(data_folder)
    sizes = ["data.length=64", "training.batch_size=4"]
    if path.stem == "preference":  # its model comes from another example
        sizes.append("model.from=models/llama-3.2-1b-instruct")
    assert main(["train", "--config", str(path), "--dry-run", "--set", *sizes]) == 0
    assert "Records (train): " in capsys.readouterr().out


@pytest.mark.long
def test_record_configs_train(data_folder, monkeypatch):
    """The files are sorted, so the preference example finds the model of the chat example."""
    monkeypatch.chdir(data_folder)
    for path in RECORD_CONFIGS:
        command = ["train", "--config", str(path), "--set", *SETTINGS, "data.length=64"]
        assert main(command) == 0, path


@pytest.mark.long
def test_long_context_example_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = run(EXAMPLES / "long_context" / "train.py", "--length", 256, "--steps", 3)
    assert "activations" in printed
    assert len(pathlib.Path("runs/long_context/metrics.jsonl").read_text().splitlines()) >= 3
    assert pathlib.Path("runs/long_context/losses.png").stat().st_size > 1000


NEEDS_KERAS_HUB = pytest.mark.skipif(
    importlib.util.find_spec("keras_hub") is None,
    reason="KerasHub is not installed: pip install keras-hub",
)


def test_keras_hub_example_is_the_program_of_the_tutorial():
    def code(text):
        return [
            line.split("#")[0].strip() for line in text.splitlines() if line.split("#")[0].strip()
        ]

    example = (EXAMPLES / "keras_hub_llama.py").read_text("utf-8").split('"""')[2]
    page = (ROOT / "docs/tutorials/keras-hub.md").read_text("utf-8")
    tutorial = page.partition("```python\n")[2].partition("```")[0]
    assert code(example) == code(tutorial)


@NEEDS_KERAS_HUB
@needs_horovod
@pytest.mark.long
def test_keras_hub_example_stores_half_of_the_weights_on_each_rank():
    program = EXAMPLES / "keras_hub_llama.py"
    printed = run("-m", "dtransformer.cli", "launch", "-np", 2, "--", sys.executable, program)
    share = re.search(r"Each device stores ([\d.]+)% of", printed)
    assert float(share[1]) <= 55


@needs_horovod
@pytest.mark.long
@pytest.mark.parametrize("name", ["parameter_server", "switch_parallelism"])
def test_examples_of_collectives_print_their_difference_from_one_process(name):
    """tests/distributed/test_collectives.py compares their losses in the quick suite."""
    program = EXAMPLES / "collectives" / f"{name}.py"
    launch = ["-m", "dtransformer.cli", "launch", "-np", 2, "--", sys.executable, program]
    printed = run(*launch, seconds=300)
    assert "Ranks: 2." in printed
    difference = re.search(r"Maximum relative difference from one process: (\S+)\.$", printed, re.M)
    assert float(difference[1]) <= 1e-5
