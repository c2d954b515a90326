"""A run folder is consistent, and no run is lost or replaced by accident."""

import hashlib
import io
import os
import pathlib
import shutil
import subprocess
import sys

import h5py
import pytest
import yaml

from dtransformer.cli import main
from dtransformer.datasets.tokenizer import SubwordTokenizer
from dtransformer.errors import InputError
from dtransformer.runs.identity import RunIdentity
from dtransformer.runs.run import check_weights_finite
from dtransformer.trainers import Trainer
from dtransformer.trainers.checkpoint.export import seal
from tests.cli.test_cli import ENGLISH, french
from tests.trainers.checkpoint.small import flip_bit, new_trainer

SETTINGS = [
    "tokenizer.vocab_size=48",
    "model.hidden_size=16",
    "model.num_heads=2",
    "model.encoder_layers=1",
    "model.decoder_layers=1",
    "data.batch_size=16",
    "data.num_buckets=1",
    "data.max_length=32",
    "training.epochs=1",
    "training.optimizer=sgd",
    "training.weight_decay=0",
]
WEIGHTS, STEP = "model.weights.h5", "step-00000002"


def train(corpus, folder, *arguments):
    """Train with flags and, as the last arguments, settings."""
    flags = [item for item in arguments if item.startswith("--")]
    settings = [item for item in arguments if not item.startswith("--")]
    command = ["train", "--config", str(corpus / "config.yaml"), "--run", str(folder), *flags]
    return main([*command, "--set", *SETTINGS, *settings])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "train.en").write_text("\n".join(ENGLISH * 2) + "\n")
    (folder / "train.fr").write_text("\n".join(map(french, ENGLISH * 2)) + "\n")
    (folder / "other.en").write_text("\n".join(ENGLISH[::-1] * 2) + "\n")
    data = {"source": str(folder / "train.en"), "target": str(folder / "train.fr")}
    (folder / "config.yaml").write_text(yaml.safe_dump({"data": data}))
    return folder


@pytest.fixture(scope="module")
def trained(corpus):
    """Two runs on the same data with different vocabularies and seeds."""
    assert train(corpus, corpus / "a") == 0
    assert train(corpus, corpus / "b", "tokenizer.lower_case=true", "training.seed=1") == 0
    return corpus


@pytest.fixture
def run(trained, tmp_path):
    """Copy of the first run."""
    return shutil.copytree(trained / "a", tmp_path / "run")


def snapshot(folder):
    """Return a dict from the paths of all files in a folder to their contents."""
    return {
        str(path.relative_to(folder)): path.is_dir() or hashlib.sha256(path.read_bytes()).digest()
        for path in sorted(folder.rglob("*"))
    }


def swap(part):
    """Return a function that replaces a part of a run with the part of another run."""

    def change(run, other):
        path = run / part
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        copy = shutil.copytree if (other / part).is_dir() else shutil.copy
        copy(other / part, path)

    return change


def lose_manifests(run, other):
    (run / "checkpoints" / STEP / "checkpoint.json").unlink()


def foreign(run, other):
    (run / "run.json").unlink()


def nan_weights(run, other):
    with h5py.File(run / WEIGHTS, "r+") as file:
        result = []
        file.visititems(lambda _, x: result.append(x) if isinstance(x, h5py.Dataset) else None)
        result[0][...] = float("nan")
    seal(run / WEIGHTS, RunIdentity.load(run).key)


SWAPS = {
    "another config": (swap("config.yaml"), "config.yaml` has changed since the run began"),
    "another tokenizer": (swap("tokenizer"), "has changed since the run began"),
    "other weights": (swap(WEIGHTS), "weights belong to another run"),
    "another run.json": (swap("run.json"), "has changed since the run began"),
    "a flipped bit": (lambda run, other: flip_bit(run / WEIGHTS), "weights are damaged"),
    "a flipped head": (lambda run, other: flip_bit(run / WEIGHTS, 0), "weights are damaged"),
    "a flipped end": (lambda run, other: flip_bit(run / WEIGHTS, 0.9999), "weights are damaged"),
    "a cut file": (lambda run, other: os.truncate(run / WEIGHTS, 9999), "weights are damaged"),
    "a damaged run.json": (lambda run, other: flip_bit(run / "run.json"), "run.json is damaged"),
    "a run.json that is no text": (
        lambda run, other: (run / "run.json").write_bytes(b"[" * 10**5), "run.json is damaged"),
    "no run.json": (foreign, "has no run.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*SWAPS, "no numbers"])
def test_files_of_another_run_are_rejected(name, run, trained, monkeypatch, capsys):
    change, words = {**SWAPS, "no numbers": (nan_weights, "not finite")}[name]
    change(run, trained / "b")
    files = ["--src", str(trained / "train.en"), "--ref", str(trained / "train.fr")]
    for command in (["translate"], ["evaluate", *files]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one cat\n")))
        assert main([*command, "--run", str(run)]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1


def do_nothing(run, other):
    pass


def add(name):
    return lambda run, other: (run / name).write_text("mine")


# Change of the run folder, arguments of train, and expected error.
REFUSED = [
    (do_nothing, [], "already contains a run. Add --resume or --overwrite, or choose another --run"),
    (foreign, [], "is not a run folder"),
    (foreign, ["--overwrite"], "is not a run folder"),
    (foreign, ["--resume"], "is not a run folder"),
    (add("notes.txt"), ["--overwrite"], "also contains notes.txt"),
    (SWAPS["a damaged run.json"][0], ["--overwrite"], "run.json is damaged"),
    (do_nothing, ["--overwrite", "data.source=missing.en"], "missing.en"),
    (do_nothing, ["--overwrite", "data.dev_source=missing.en"], "`data.dev_target` is missing"),
    (do_nothing, ["--overwrite", "training.optimizer=fast"], "training.optimizer"),
    (do_nothing, ["--overwrite", "training.epoch=2"], "training.epochs"),
    (do_nothing, ["--overwrite", "model.num_heads=5"], "num_heads=5"),
    (do_nothing, ["--overwrite", "model.hidden_act=gelly"], "gelly"),
    (do_nothing, ["--overwrite", "tokenizer.vocab_size=5000"], "5000"),
    (do_nothing, ["--overwrite", "parallel.model_parallel=2"], "model_parallel=2"),
    (do_nothing, ["--resume", "model.hidden_act=gelu"], "model.hidden_act is 'gelu'"),
    (do_nothing, ["--resume", "model.hidden_size=32"], "model.hidden_size is 32"),
    (do_nothing, ["--resume", "tokenizer.vocab_size=50"], "tokenizer.vocab_size is 50"),
    (do_nothing, ["--resume", "tokenizer.lower_case=true"], "tokenizer.lower_case is True"),
    (do_nothing, ["--resume", "data.max_length=16"], "data.max_length is 16"),
    (do_nothing, ["--resume", "data.batch_size=8"], "data.batch_size is 8"),
    (do_nothing, ["--resume", "training.seed=3"], "training.seed is 3"),
    (do_nothing, ["--resume", "data.source=OTHER"], "the train records have changed"),
    (
        do_nothing,
        ["--resume", "data.dev_source=OTHER", "data.dev_target=OTHER"],
        "the dev records have changed",
    ),
    (lose_manifests, ["--resume"], f"{STEP} has lost its checkpoint.json"),
    (swap("checkpoints"), ["--resume"], "a checkpoint of another run"),
    (swap(WEIGHTS), ["--resume"], "belong to another run"),
    (swap("tokenizer"), ["--resume"], "has changed since the run began"),
    (swap("config.yaml"), ["--resume"], "has changed since the run began"),
    (lambda run, other: flip_bit(run / WEIGHTS), ["--resume"], "weights are damaged"),
    (lambda run, other: shutil.rmtree(run / "checkpoints"), ["--resume"], "no checkpoint to"),
]  # fmt: skip


@pytest.mark.parametrize("change, arguments, words", REFUSED)
def test_rejected_training_changes_no_file(change, arguments, words, run, trained, capsys):
    change(run, trained / "b")
    before = snapshot(run.parent)
    arguments = [item.replace("OTHER", str(trained / "other.en")) for item in arguments]
    assert train(trained, run, *arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert snapshot(run.parent) == before


def test_folder_with_other_files_is_not_replaced(trained, tmp_path, capsys):
    shutil.copy(trained / "config.yaml", tmp_path)
    (tmp_path / "file").write_text("mine")
    for folder, flags in ((tmp_path, []), (tmp_path, ["--overwrite"]), (tmp_path / "file", [])):
        assert train(tmp_path, folder, *flags) == 2
    assert sorted(os.listdir(tmp_path)) == ["config.yaml", "file"]


@pytest.mark.parametrize("name", ["x" * 250, "file/run", "loop"])
def test_invalid_run_folders_are_one_line_errors(name, corpus, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    for command in (["translate"], ["train", "--config", str(corpus / "config.yaml")]):
        assert main([*command, "--run", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["file", "loop"]


def test_overwrite_rejects_a_config_inside_the_run_folder(run, capsys):
    before = snapshot(run)
    assert train(run, run, "--overwrite") == 2
    assert "is inside the run folder to replace" in capsys.readouterr().err
    assert snapshot(run) == before


@pytest.mark.parametrize("settings", [["model.num_heads=5"], ["data.source=missing.en"]])
def test_rejected_run_leaves_no_folder(settings, corpus, tmp_path, capsys):
    assert train(corpus, tmp_path / "some" / "where", *settings) == 2
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [InputError("no"), RuntimeError("crash"), KeyboardInterrupt()])
def test_failed_start_keeps_the_old_run(error, run, corpus, monkeypatch, capsys):
    before = snapshot(run.parent)

    def fit(*args, **kwargs):
        assert (run.parent / "run.replaced" / WEIGHTS).exists() or not flags
        raise error

    monkeypatch.setattr(Trainer, "fit", fit)
    for folder, flags in ((run, ["--overwrite"]), (run.parent / "some" / "where", [])):
        codes = {InputError: 2, RuntimeError: 1, KeyboardInterrupt: 130}
        assert train(corpus, folder, *flags) == codes[type(error)]
        assert snapshot(run.parent) == before


def test_full_disk_keeps_the_old_run(run, corpus, small_files, capsys):
    before = snapshot(run.parent)
    with small_files(40_000):
        assert train(corpus, run, "--overwrite") == 2
    error = capsys.readouterr().err
    assert f"{WEIGHTS}: cannot be written" in error and error.count("\n") == 1
    assert snapshot(run.parent) == before


def test_overwrite_replaces_a_run(run, corpus):
    before = RunIdentity.load(run)
    link = run.parent / "link"
    link.symlink_to(run)
    assert train(corpus, link, "--overwrite") == 0
    assert RunIdentity.load(run) != before and link.is_symlink()
    assert sorted(os.listdir(run.parent)) == ["link", "run"]
    RunIdentity.load(run).check(run)


def moved_aside(run):
    os.rename(run, f"{run}.replaced")


def half_written(run):
    shutil.copytree(run, f"{run}.unfinished")
    os.remove(f"{run}.unfinished/run.json")


def not_begun(run):
    shutil.copytree(run, f"{run}.replaced")
    shutil.rmtree(run / "checkpoints")
    (run / WEIGHTS).unlink()
    (run / "metrics.jsonl").write_text("{}")


def begun(run):
    shutil.copytree(run, f"{run}.replaced")
    shutil.rmtree(pathlib.Path(f"{run}.replaced") / "checkpoints")


@pytest.mark.parametrize("killed", [moved_aside, half_written, not_begun, begun])
def test_kill_at_any_moment_keeps_the_old_or_the_new_run(killed, run, corpus, capsys):
    before = snapshot(run.parent)
    killed(run)
    assert train(corpus, run) == 2
    assert "already contains a run" in capsys.readouterr().err
    assert snapshot(run.parent) == before


def test_leftover_folders_of_a_killed_run_are_reported(run, monkeypatch, capsys):
    not_begun(run)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one cat\n")))
    assert main(["translate", "--run", str(run)]) == 2
    assert f"{run}.replaced" in capsys.readouterr().err


def test_resumed_run_keeps_its_tokenizer_and_its_identity(run, corpus, monkeypatch, tmp_path):
    def learn(*args, **kwargs):
        raise AssertionError("the tokenizer is trained again")

    before = snapshot(run)
    monkeypatch.setattr(SubwordTokenizer, "train", learn)
    moved = shutil.copytree(corpus, tmp_path / "moved", ignore=shutil.ignore_patterns("a", "b"))
    (run / f".partial.{WEIGHTS}").write_text("left by a kill")
    assert train(corpus, run, "--resume", "training.epochs=2", f"data.source={moved}/train.en") == 0
    after = snapshot(run)
    for name in ("config.yaml", "run.json", "tokenizer/tokenizer.json"):
        assert after[name] == before[name]
        assert after[f"checkpoints/step-00000004/{name}"] == before[name]
    assert not any(".partial." in name for name in after)
    RunIdentity.load(run).check(run)


def test_rejects_nan_weights():
    trainer = new_trainer()
    trainer.training_state()
    trainer.network.head.bias.assign([1.0, float("nan")])
    with pytest.raises(InputError, match="checkpoints: head/bias has values that are not finite"):
        check_weights_finite(trainer, "checkpoints")


def test_verify_reports_all_problems(run, tmp_path, capsys):
    folder = run / "checkpoints"
    for name in ("step-00000001", "step-00000099"):
        shutil.copytree(folder / STEP, folder / name)
    (folder / "step-00000001" / "checkpoint.json").unlink()
    (folder / "step-00000003").symlink_to("nowhere")
    assert main(["checkpoint", "verify", str(folder)]) == 2
    message = capsys.readouterr()
    lines = {line.split(": ")[0].rpartition("/")[2]: line for line in message.out.splitlines()}
    assert "checkpoint.json is missing" in lines["step-00000001"]
    assert "checkpoint.json is missing" in lines["step-00000003"]
    assert "its name does not match its step 2" in lines["step-00000099"]
    assert "files are intact" in lines[STEP]
    assert "3 damaged" in message.err
    for path in ("", ".", "..", "/"):
        assert main(["checkpoint", "verify", path]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_export_command_writes_the_weights_of_the_run(run, trained, monkeypatch, capsys):
    command = [sys.executable, "-m", "dtransformer.cli", "checkpoint", "export"]
    arguments = [str(run / "checkpoints"), "--out", str(run / WEIGHTS)]
    refused = subprocess.run([*command, *arguments], capture_output=True, text=True)
    assert refused.returncode == 2 and "exists. Pass another path" in refused.stderr
    subprocess.run([*command, *arguments, "--overwrite"], check=True, capture_output=True)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one cat\n")))
    assert main(["translate", "--run", str(run)]) == 0
    of_another = [str(trained / "b" / "checkpoints"), "--out", str(run / WEIGHTS)]
    assert main(["checkpoint", "export", *of_another, "--overwrite"]) == 0
    assert main(["translate", "--run", str(run)]) == 2
    assert "belong to another run" in capsys.readouterr().err
