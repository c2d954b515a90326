"""Promise: documents are trained on as the config says, and a run that fails changes nothing."""

import json

import pytest
import yaml

from dtransformer.cli import main
from dtransformer.runs.loading import load_run
from tests.runs.test_folder import snapshot

SIZES = {"hidden_size": 16, "num_heads": 2, "num_layers": 1, "dropout_rate": 0.0}
TRAINING = {"batch_size": 4, "learning_rate": 0.01, "optimizer": "sgd", "weight_decay": 0}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a small text and its config, in which all commands run, and a run of it."""
    folder = tmp_path_factory.mktemp("documents")
    (folder / "text.txt").write_text("\n\n".join(f"one two {'three ' * n}" for n in range(1, 40)))
    config = {
        "task": "causal_lm",
        "data": {"train": "text.txt", "dev": "text.txt", "length": 16},
        "model": SIZES,
        "training": {**TRAINING, "max_steps": 3, "checkpoint_steps": 1},
    }
    (folder / "gpt.yaml").write_text(yaml.safe_dump(config))
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        assert train() == 0
        yield folder


def train(*settings, flags=(), run="runs/gpt"):
    """Train the config with settings; return the exit code."""
    options = ["--set", *settings] if settings else []
    return main(["train", "--config", "gpt.yaml", "--run", run, *flags, *options])


def test_a_small_text_bounds_the_vocabulary(place):
    assert 16 < load_run("runs/gpt").tokenizer.vocab_size < 100


def test_a_run_that_made_all_its_steps_makes_no_more(place):
    before = snapshot(place / "runs")
    assert train(flags=["--resume"]) == 0
    assert snapshot(place / "runs") == before
    assert train("training.max_steps=4", flags=["--resume"], run="runs/gpt") == 0
    lines = (place / "runs/gpt/metrics.jsonl").read_text().splitlines()
    assert [x["step"] for x in map(json.loads, lines) if x["kind"] == "step"] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "setting, told",
    [
        ("model.num_heads=3", "num_heads"),
        ("data.train=[{path: text.txt, weight: 1}, {path: text.txt, weight: 1}]", "a weight"),
        ("data.train={path: text.txt, target: text.txt}", "target is of task seq2seq"),
        ("tokenizer.vocab_size=5000", "5000"),
        ("data.mean_span=2.0", "data.mean_span: task causal_lm does not read it, of tasks span_"),
    ],
)
def test_what_is_refused_leaves_the_run_and_its_shards(setting, told, place, capsys):
    before = snapshot(place)
    for flags, run in ((["--overwrite"], "runs/gpt"), ([], "some/where")):
        other = [] if setting.startswith("data.train") else ["data.train=gpt.yaml"]
        assert train(setting, *other, flags=flags, run=run) == 2
        assert told in capsys.readouterr().err
    assert snapshot(place) == before
