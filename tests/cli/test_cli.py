"""Commands lead from files to translations, and wrong input is an error of one line."""

import hashlib
import io
import json
import shutil
import subprocess
import sys

import pytest
import yaml

from dtransformer.cli import main
from dtransformer.cli.doctor import examine

WORDS = {
    "one": "un",
    "red": "rouge",
    "cat": "chat",
    "dog": "chien",
    "eats": "mange",
    "sees": "voit",
}
NOUNS = ("cat", "dog")
ENGLISH = [
    f"one {a} {verb} one {b} {color}".strip()
    for a in NOUNS
    for verb in ("eats", "sees")
    for b in NOUNS
    for color in ("", "red")
]
SETTINGS = [
    "tokenizer.vocab_size=48",
    "model.hidden_size=32",
    "model.num_heads=2",
    "model.encoder_layers=1",
    "model.decoder_layers=1",
    "model.dropout_rate=0",
    "data.batch_tokens=null",
    "data.batch_size=16",
    "data.num_buckets=1",
    "data.max_length=32",
    "training.epochs=12",
    "training.warmup_steps=10",
    "training.learning_rate=0.01",
    "training.label_smoothing=0",
]


def french(sentence):
    return " ".join(WORDS[word] for word in sentence.split())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Folder with a repeated small corpus and a config that reads it."""
    folder = tmp_path_factory.mktemp("corpus")
    for name, lines in (("train", ENGLISH * 20), ("dev", ENGLISH)):
        (folder / f"{name}.en").write_text("\n".join(lines) + "\n", encoding="utf-8")
        targets = "\n".join(french(line) for line in lines)
        (folder / f"{name}.fr").write_text(targets + "\n", encoding="utf-8")
    data = {
        "source": str(folder / "train.en"),
        "target": str(folder / "train.fr"),
        "dev_source": str(folder / "dev.en"),
        "dev_target": str(folder / "dev.fr"),
    }
    (folder / "config.yaml").write_text(yaml.safe_dump({"data": data}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def run(corpus):
    """Run folder, trained once for all tests."""
    folder = corpus / "run"
    arguments = ["train", "--config", str(corpus / "config.yaml"), "--run", str(folder)]
    assert main([*arguments, "--set", *SETTINGS]) == 0
    return folder


def test_run_folder_contains_all_files(run):
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "env.json",
        "logs",
        "loss.svg",
        "metrics.jsonl",
        "model.weights.h5",
        "run.json",
        "tokenizer",
    ]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    assert len(epochs) == 12
    assert epochs[-1]["val_loss"] < epochs[0]["val_loss"]
    for name in ("loss", "accuracy", "val_bleu", "gradient_norm", "tokens_per_second"):
        assert name in epochs[-1]
    assert "val_loss" in (run / "logs/rank-0.log").read_text()
    (start,) = json.loads((run / "env.json").read_text())
    config = (run / "config.yaml").read_bytes()
    assert start["config_sha256"] == hashlib.sha256(config).hexdigest()


def test_translate_prints_one_line_per_input_line(run, monkeypatch, capsys):
    text = "\n".join([ENGLISH[3], "", ENGLISH[0]]) + "\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert main(["translate", "--run", str(run)]) == 0
    assert capsys.readouterr().out.split("\n") == [french(ENGLISH[3]), "", french(ENGLISH[0]), ""]


def test_translate_warns_of_truncated_lines(run, monkeypatch, capsys):
    text = "one cat\n" + "one cat " * 100 + "\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert main(["translate", "--run", str(run), "--beam-size", "1"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 2
    assert "line 2" in captured.err and "only the first 32" in captured.err


def test_evaluate_prints_the_sacrebleu_signature(run, corpus, capsys):
    files = ["--src", str(corpus / "dev.en"), "--ref", str(corpus / "dev.fr")]
    assert main(["evaluate", "--run", str(run), *files]) == 0
    assert "BLEU|nrefs:1|" in capsys.readouterr().out
    assert main(["evaluate", "--run", str(run), *files, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bleu"] > 90 and result["sentences"] == len(ENGLISH)


def test_trained_run_is_not_replaced_by_accident(run, corpus, capsys):
    assert main(["train", "--config", str(corpus / "config.yaml"), "--run", str(run)]) == 2
    assert "--overwrite" in capsys.readouterr().err


def test_resume_continues_from_the_newest_checkpoint(run, corpus, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    arguments = ["train", "--config", str(corpus / "config.yaml"), "--run", str(folder)]
    assert main([*arguments, "--resume", "--set", *SETTINGS, "training.epochs=13"]) == 0
    printed = capsys.readouterr().out
    assert "step-00000240: epoch 13, batch 1" in printed
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines[-21:]] == [13] * 21
    assert json.loads(lines[-1])["step"] == 260
    assert main(["checkpoint", "verify", str(folder / "checkpoints")]) == 0


def test_checkpoint_inspect_prints_the_contents(run, tmp_path, capsys):
    folder = run / "checkpoints"
    newest = folder / "step-00000240"
    assert main(["checkpoint", "inspect", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert f"{newest}: step 240, saved 20" in printed
    assert "Next: epoch 13, batch 1" in printed
    assert "val_loss" in printed and "optimizer/velocities/source_embedding/table" in printed
    assert main(["checkpoint", "inspect", str(newest), "--json"]) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert manifest["step"] == 240 and "tokenizer/tokenizer.json" in manifest["files"]


def test_weights_of_a_checkpoint_are_exported(run, tmp_path, monkeypatch, capsys):
    folder = run / "checkpoints"
    for name in ("model.weights.h5", "model.safetensors"):
        assert main(["checkpoint", "export", str(folder), "--out", str(tmp_path / name)]) == 0
    shutil.copytree(run, tmp_path / "run")
    shutil.copy(tmp_path / "model.weights.h5", tmp_path / "run")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(ENGLISH[3].encode())))
    capsys.readouterr()
    assert main(["translate", "--run", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == french(ENGLISH[3]) + "\n"


def test_checkpoint_verify_names_damaged_files(run, tmp_path, capsys):
    folder = tmp_path / "checkpoints"
    shutil.copytree(run / "checkpoints", folder)
    data = folder / "step-00000240" / "state.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:-1])
    assert main(["checkpoint", "verify", str(folder)]) == 2
    captured = capsys.readouterr()
    assert f"{data} has" in captured.out and "files are intact" in captured.out
    assert "1 damaged" in captured.err
    assert main(["checkpoint", "export", str(data.parent), "--out", "model.safetensors"]) == 2
    assert main(["checkpoint", "inspect", str(tmp_path / "nothing")]) == 2
    assert "does not exist" in capsys.readouterr().err


def damaged_runs(run, folder):
    """Yield unusable run folders, each with the expected error."""
    for name, part in (("bare", "model.weights.h5"), ("wordless", "tokenizer")):
        shutil.copytree(run, folder / name)
        path = folder / name / part
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield folder / name, part
    shutil.copytree(run, folder / "torn")
    weights = folder / "torn" / "model.weights.h5"
    weights.write_bytes(weights.read_bytes()[:1000])
    yield folder / "torn", "damaged"
    yield folder / "nowhere", "nowhere` does not exist"


def test_unusable_run_folders_are_one_line_errors(run, tmp_path, monkeypatch, capsys):
    for folder, words in damaged_runs(run, tmp_path):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one cat\n")))
        assert main(["translate", "--run", str(folder)]) == 2
        error = capsys.readouterr().err
        assert str(folder) in error and words in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "settings, words",
    [
        (["data.source=missing.en"], ["missing.en"]),
        (["data.target=DEV.fr"], ["320", "16"]),
        (["data.source=LATIN"], ["LATIN", "line 2", "0xe9"]),
        (["data.source=EMPTY", "data.target=EMPTY"], ["EMPTY"]),
        (["data.source=X.sgm", "data.target=X.sgm"], ["X.sgm", "preprocess.py"]),
        (["training.epoch=2"], ["training.epochs"]),
        (["training.optimizer=fast"], ["training.optimizer", "'fast'"]),
        (["model.num_heads=5", "tokenizer.vocab_size=48"], ["num_heads=5", "hidden_size=256"]),
        (["model.hidden_act=gelly", "tokenizer.vocab_size=48"], ["gelly", "gelu"]),
        (["tokenizer.vocab_size=5000"], ["5000"]),
        (["parallel.model_parallel=2"], ["model_parallel=2", "2 ranks", "1"]),
        (["parallel.expert_parallel=2"], ["expert_parallel=2"]),
        (["data.max_length=2", "tokenizer.vocab_size=48"], ["max_length"]),
    ],
)
def test_train_rejects_wrong_settings(corpus, tmp_path, capsys, settings, words):
    (corpus / "LATIN").write_bytes(b"un\n\xe9t\xe9\n" + b"x\n" * 318)
    (corpus / "EMPTY").write_bytes(b"")
    (corpus / "DEV.fr").write_bytes((corpus / "dev.fr").read_bytes())
    (corpus / "X.sgm").write_text('<seg id="1">x</seg>\n')
    for name in ("LATIN", "EMPTY", "DEV.fr", "X.sgm"):
        settings = [setting.replace(f"={name}", f"={corpus / name}") for setting in settings]
    code = main(
        [
            "train",
            "--config",
            str(corpus / "config.yaml"),
            "--run",
            str(tmp_path),
            "--set",
            *settings,
        ]
    )
    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith("dtransformer: ") and error.count("\n") == 1
    for word in words:
        assert word in error


def test_translate_rejects_invalid_utf_8(run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ncaf\xe9\n")))
    assert main(["translate", "--run", str(run)]) == 2
    error = capsys.readouterr().err
    assert "line 2" in error and "0xe9" in error


def test_evaluate_rejects_files_of_different_lengths(run, corpus, capsys):
    files = ["--src", str(corpus / "train.en"), "--ref", str(corpus / "dev.fr")]
    assert main(["evaluate", "--run", str(run), *files]) == 2
    error = capsys.readouterr().err
    assert "320" in error and "16" in error


def test_prepare_keeps_existing_files(tmp_path, capsys):
    out = tmp_path / "corpus"
    command = ["prepare", "--embedded", "--out", str(out), "--num-train"]
    assert main([*command, "20"]) == main([*command, "20"]) == 0  # the same files again
    assert str(out / "train.en") in capsys.readouterr().out
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert main([*command, "30"]) == 2
    assert "train.en already exists with other content" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert main([*command, "30", "--overwrite"]) == 0
    assert (out / "train.en").read_bytes() != before["train.en"]


def test_doctor_lists_installed_packages():
    checks = {check["name"]: check for check in examine()}
    assert checks["tensorflow"]["ok"] and checks["compiled function"]["ok"]
    assert all(check["fix"] for check in checks.values() if not check["ok"])


def test_installed_command_is_quiet_and_exits_with_2(tmp_path):
    command = [sys.executable, "-m", "dtransformer.cli", "translate", "--run", str(tmp_path / "no")]
    result = subprocess.run(command, capture_output=True, text=True, input="")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1 and "Traceback" not in result.stderr
