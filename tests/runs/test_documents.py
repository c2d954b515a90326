"""Training on documents follows the config, and a rejected run changes nothing."""

import csv
import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf
import yaml

from dtransformer import TransformerOpParallelConfig
from dtransformer.cli import main
from dtransformer.datasets import TokenShards
from dtransformer.runs import loading
from dtransformer.runs.tasks import load_run
from dtransformer.trainers import Trainer
from tests.runs.test_folder import snapshot

SIZES = {"hidden_size": 16, "num_heads": 2, "num_layers": 1, "dropout_rate": 0.0}
TRAINING = {"batch_size": 4, "learning_rate": 0.01, "optimizer": "sgd", "weight_decay": 0}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Working folder with a small text, its config and a run."""
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
    """Train the config with settings and return the exit code."""
    options = ["--set", *settings] if settings else []
    return main(["train", "--config", "gpt.yaml", "--run", run, *flags, *options])


def test_small_text_limits_the_vocabulary(place):
    assert 260 < load_run("runs/gpt").tokenizer.vocab_size < 300


def test_completed_run_trains_no_more_steps(place):
    before = snapshot(place / "runs")
    assert train(flags=["--resume"]) == 0
    assert snapshot(place / "runs") == before
    assert train("training.max_steps=4", flags=["--resume"], run="runs/gpt") == 0
    lines = (place / "runs/gpt/metrics.jsonl").read_text().splitlines()
    assert [x["step"] for x in map(json.loads, lines) if x["kind"] == "step"] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "setting, message",
    [
        ("model.num_heads=3", "num_heads"),
        (
            "data.train=[{path: text.txt, weight: 1}, {path: text.txt, weight: 1}]",
            "text.txt contains no token shards",
        ),
        (
            "data.train={path: text.txt, target: text.txt}",
            "target has no effect here, only in tasks seq2seq",
        ),
        (
            f"data.train=[{{path: {'x' * 300}, weight: 1}}, {{path: text.txt, weight: 1}}]",
            "is too long",
        ),
        ("tokenizer.vocab_size=5000", "5000"),
        ("data.mean_span=2.0", "`data.mean_span` has no effect in task causal_lm, only in span_"),
    ],
)
def test_rejected_training_keeps_the_run_and_its_shards(setting, message, place, capsys):
    before = snapshot(place)
    for flags, run in ((["--overwrite"], "runs/gpt"), ([], "some/where")):
        other = [] if setting.startswith("data.train") else ["data.train=gpt.yaml"]
        assert train(setting, *other, flags=flags, run=run) == 2
        assert message in capsys.readouterr().err
    assert snapshot(place) == before


def test_resume_uses_the_tokenizer_of_the_run(place, capsys):
    assert train("tokenizer.vocab_size=18", run="runs/old") == 0
    assert train("tokenizer.vocab_size=17", flags=["--resume"], run="runs/old") == 2
    assert "tokenizer.vocab_size is 17, but the run began with 18" in capsys.readouterr().err


def test_rejects_reading_options_for_token_shards(place, capsys):
    """Folders of token shards were already read by `prepare`, with its options."""
    prepare = ["prepare", "--lm", "--input", "text.txt", "--train-tokenizer", "18", "--out"]
    assert main([*prepare, "shards"]) == 0
    rows = [json.dumps({"content": f"one two {'three ' * n}"}) for n in range(1, 9)]
    (place / "dev.jsonl").write_text("\n".join(rows))
    shard_settings = ["data.train=shards", "data.dev=shards"]
    for setting, message in (
        ("data.field=content", "`data.field` has no effect on folders of token shards"),
        ("data.documents=line", "pass --documents to `dtransformer prepare --lm`"),
        ("data.sentences=true", "shards was prepared without sentences"),
    ):
        assert train(*shard_settings, setting, run="runs/prepared") == 2
        assert message in capsys.readouterr().err
    assert (
        train(shard_settings[0], "data.dev=dev.jsonl", "data.field=content", run="runs/prepared")
        == 0
    )
    assert "Documents (dev): 8 with" in capsys.readouterr().out


def read_metrics(run, kind):
    """Return the records of one kind in a run's metrics."""
    lines = pathlib.Path(run, "metrics.jsonl").read_text().splitlines()
    return [x for x in map(json.loads, lines) if x["kind"] == kind]


def test_evaluations_within_an_epoch_do_not_change_its_logs(place, capsys):
    settings = ["training.max_steps=null", "training.checkpoint_steps=0"]
    assert train(*settings, run="runs/plain") == 0
    assert train(*settings, "evaluation.every_steps=2", "logs.csv=true", run="runs/looked") == 0
    printed = capsys.readouterr().out
    (plain,), (looked,) = (read_metrics(f"runs/{name}", "epoch") for name in ("plain", "looked"))
    for name in ("loss", "val_loss", "accuracy"):
        assert looked[name] == plain[name]
    result = read_metrics("runs/looked", "evaluation")
    assert [x["step"] for x in result] == list(range(2, plain["step"] + 1, 2)) != []
    assert f"val_loss: {result[0]['val_loss']:.6g}" in printed and "\nstep: 2, val_" in printed
    with open("runs/looked/metrics.csv") as file:
        (row,) = csv.DictReader(file)
    assert float(row["val_loss"]) == looked["val_loss"]


def test_perplexities_match_the_log_probability_of_the_text(place, capsys):
    assert main(["evaluate", "--run", "runs/gpt", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    run, documents = load_run("runs/gpt"), (place / "text.txt").read_text().split("\n\n")
    tokenizer, total, index = run.tokenizer, 0.0, 0
    for text in documents:
        (ids,) = tokenizer.encode([text]).to_list()
        # Each document is scored in a single row, because some are longer than the run's rows.
        ids = np.array([[tokenizer.start_id, *ids, tokenizer.end_id]])
        index += ids.shape[1] - 1
        total += len(text.encode())
    words = sum(len(text.split()) for text in documents)
    nats = result["loss"] * index
    assert result["perplexity"] == pytest.approx(np.exp(result["loss"]))
    assert result["byte_perplexity"] == pytest.approx(np.exp(nats / total))
    assert result["word_perplexity"] == pytest.approx(np.exp(nats / words))


def test_out_of_memory_prints_layouts_that_fit(place, monkeypatch, capsys):
    def fails(*_, **__):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")

    monkeypatch.setattr(Trainer, "fit", fails)
    assert train(run="runs/full") == 2
    message = capsys.readouterr().err
    assert "layouts computed" in message and "The memory of a device is full" in message


def test_run_of_several_ranks_is_evaluated_on_one_rank(place, monkeypatch, capsys):
    parallel = TransformerOpParallelConfig(data_parallel=2, model_parallel=2)
    checked = loading.check_run

    def of_ranks(folder):
        config = checked(folder)
        config.parallel = parallel
        return config

    monkeypatch.setattr(loading, "check_run", of_ranks)
    assert main(["evaluate", "--run", "runs/gpt", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["loss"] > 0


def test_profile_is_written_into_the_run(place, capsys):
    flags = ["--overwrite", "--profile", "2-3"]
    assert train(flags=flags, run="runs/profiled") == 0
    assert list(place.glob("runs/profiled/profile/**/*.xplane.pb"))
    assert train(flags=["--overwrite", "--profile", "3-2"], run="runs/profiled") == 2
    assert "must be a range of steps" in capsys.readouterr().err


CODE = "def f(x):\n\tif x:\n\n        return  x  # no\n"


@pytest.mark.parametrize("algorithm, text", [("null", CODE), ("wordpiece", " ".join(CODE.split()))])
def test_language_model_tokenizers_keep_white_space(algorithm, text, place):
    (place / "code.txt").write_text(CODE)
    settings = [
        "data.train=code.txt",
        "data.dev=[]",
        "data.documents=file",
        "training.max_steps=1",
        "data.length=8",
    ]
    run = f"runs/code-{algorithm}"
    settings += [f"tokenizer.algorithm={algorithm}", "training.batch_size=1"]
    assert train(*settings, run=run) == 0
    tokenizer = load_run(run).tokenizer
    assert tokenizer.decode(tokenizer.encode([CODE])) == [text]
    (document,) = TokenShards(place / run / "shards" / "train")
    assert tokenizer.decode([document]) == [text.rstrip("\n")]


@pytest.fixture(scope="module")
def sources(place):
    """Folders of token shards, "web" and "code" with one tokenizer, and "other" with another."""
    for name, count in (("web", 30), ("code", 9)):
        texts = [f"{name} one two {'three ' * n}" for n in range(1, count)]
        (place / f"{name}.txt").write_text("\n\n".join(texts))
    prepare = ["prepare", "--lm", "--input"]
    assert main([*prepare, "web.txt", "--train-tokenizer", "20", "--out", "web"]) == 0
    assert main([*prepare, "code.txt", "--tokenizer", "web/tokenizer", "--out", "code"]) == 0
    assert main([*prepare, "web.txt", "--train-tokenizer", "18", "--out", "other"]) == 0
    return place


def mixture(*weights, paths=("web", "code")):
    """Return the settings of a mixture without steps limit."""
    train = [{"path": path, "weight": weight} for path, weight in zip(paths, weights)]
    return [f"data.train={json.dumps(train)}", "training.max_steps=null"]


def test_mixture_logs_the_epochs_of_its_sources(sources, capsys):
    settings = [*mixture(0.5, 0.5), "training.epochs=2", "training.checkpoint_steps=0"]
    assert train(*settings, run="runs/mixed") == 0
    printed = capsys.readouterr().out
    steps = read_metrics("runs/mixed", "step")
    epochs = read_metrics("runs/mixed", "epoch")
    assert len(steps) == steps[-1]["step"] == epochs[-1]["step"]
    # Every second row is from each source. Rows of an epoch are rounded up to full batches.
    num_rows = [step["step"] * 4 / 2 for step in steps]
    for name in ("web", "code"):
        values = [step[f"epochs/{name}"] for step in steps]
        np.testing.assert_allclose(np.array(values) / values[0], np.array(num_rows) / num_rows[0])
        assert epochs[-1][f"epochs/{name}"] == values[-1]
        assert f"Source {name}: {values[-1]:.3g} epochs in this run\n" in printed
    assert epochs[-1]["epochs/code"] > 2 > epochs[-1]["epochs/web"] > 0
    assert main(["evaluate", "--run", "runs/mixed"]) == 0


def test_resumed_mixture_has_the_losses_of_a_straight_run(sources, capsys):
    settings = [*mixture(0.7, 0.3)[:1], "training.epochs=5", "training.schedule=constant"]
    assert train(*settings, "training.max_steps=30", run="runs/straight") == 0
    assert train(*settings, "training.max_steps=13", run="runs/resumed") == 0
    limit = "training.max_steps=30"
    assert train(*settings, limit, run="runs/resumed", flags=["--resume"]) == 0
    names = ("step_loss", "epochs/web", "epochs/code")
    results = [
        [[step[name] for name in names] for step in read_metrics(run, "step")]
        for run in ("runs/straight", "runs/resumed")
    ]
    assert results[0] == results[1]
    changed = mixture(0.6, 0.4)[:1]
    assert train(*settings[1:], *changed, limit, run="runs/resumed", flags=["--resume"]) == 2
    assert "--resume: data.train is (0.6, 0.4)" in capsys.readouterr().err


def test_dry_run_of_a_mixture_prints_the_epochs_of_its_sources(sources, capsys):
    settings = [*mixture(3, 1), "training.epochs=4"]
    assert train(*settings, flags=["--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "Source web: " in printed and "Source code: " in printed


@pytest.mark.parametrize(
    "weights, paths, message",
    [
        ((1, None), ("web", "code"), "1 of 2 folders of token shards have no weight"),
        ((None, None), ("web", "code"), "2 of 2 folders of token shards have no weight"),
        ((1, 0), ("web", "code"), "must be greater than 0"),
        ((1, -2), ("web", "code"), "must be greater than 0"),
        ((1, 1), ("web", "missing"), "missing contains no token shards"),
        ((1, 1), ("web", "web"), "web is listed twice"),
        ((1, 1), ("web", "other"), "other was written with another tokenizer"),
    ],
)
def test_wrong_mixtures_are_rejected(weights, paths, message, sources, capsys):
    before = snapshot(sources)
    assert train(*mixture(*weights, paths=paths), run="runs/wrong") == 2
    assert message in capsys.readouterr().err
    assert snapshot(sources) == before


def test_unknown_key_of_a_mixture_is_rejected(sources, capsys):
    assert train("data.train=[{path: web, wieght: 1}]", run="runs/wrong") == 2
    assert "unknown key `wieght`" in capsys.readouterr().err
