"""A dry run rejects everything that training would reject, without memory for weights."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dtransformer.cli import main
from dtransformer.models.pretrained.stored_weights import StoredWeights
from dtransformer.runs import needs
from tests.runs.small_records import CONFIGS, write, write_config


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Working folder with records, a model and its tokenizer."""
    folder = tmp_path_factory.mktemp("dry")
    write(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        yield folder


@pytest.fixture
def dry_run(place, capsys):
    """Function that runs a config with --dry-run, and returns exit code, output and errors."""

    def run(name, *settings, options=()):
        path = write_config(name, place)
        setting = ["--set", *settings] if settings else []
        code = main(["train", "--config", str(path), "--dry-run", *options, *setting])
        return code, *capsys.readouterr()

    return run


def change_weights(place, name, change):
    """Copy the small Llama, and change the tensors of the copy."""
    shutil.rmtree(place / name, ignore_errors=True)
    shutil.copytree(place / "llama", place / name)
    path = place / name / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "preference"])
def test_every_task_is_checked(name, dry_run):
    code, out, err = dry_run(name)
    assert (code, err.count("dtransformer:")) == (0, 0)
    assert "\nChecked: " in out


def test_weight_values_are_not_read(dry_run, monkeypatch):
    def read(*_):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(StoredWeights, "read", read)
    code, out, _ = dry_run("chat")
    assert code == 0 and "Checked: 272 of 13,440 parameters are trained" in out


def test_frozen_weights_are_not_counted_as_trained(dry_run):
    _, out, _ = dry_run("gpt")
    total = int(out.split("Checked: ")[1].split()[0].replace(",", ""))
    _, out, _ = dry_run("gpt", "model.freeze=embedding/*")
    trained = int(out.split("Checked: ")[1].split()[0].replace(",", ""))
    assert total - trained == 280 * 16


WRONG_WEIGHTS = {
    "lacks": (lambda x: x.pop("model.norm.weight"), "missing model.norm.weight"),
    "more": (lambda x: x.update(extra=np.zeros(2, "float32")), "unexpected extra"),
    "shape": (
        lambda x: x.update({"model.norm.weight": np.ones(3, "float32")}),
        "model.norm.weight has shape [3], not [16]",
    ),
}


@pytest.mark.parametrize("name", WRONG_WEIGHTS)
def test_weights_that_do_not_match_the_config_are_refused(name, place, dry_run):
    change, message = WRONG_WEIGHTS[name]
    change_weights(place, name, change)
    code, _, err = dry_run("chat", f"model.from={name}")
    assert code == 2 and f"{name} does not match its config: {message}" in err


def test_weights_that_do_not_fit_into_memory_are_refused(dry_run, monkeypatch):
    monkeypatch.setattr(needs, "free_memory", lambda: 40_000)
    for name in ("chat", "gpt"):
        code, _, err = dry_run(name)
        assert code == 2 and "needs at least" in err
    # Two ranks may share them. If they are not started, their memory is unknown.
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    assert dry_run("chat")[0] == 0
    monkeypatch.delenv("HOROVOD_SIZE")
    assert dry_run("gpt", "parallel.data_parallel=4")[0] == 0


def test_weights_of_another_kind_are_refused(place, dry_run):
    sizes = ("hidden_size", "num_heads", "encoder_layers", "decoder_layers", "dropout_rate")
    settings = ["tokenizer.vocab_size=null", *(f"model.{key}=null" for key in sizes)]
    code, _, err = dry_run("seq2seq", "model.from=llama", *settings)
    assert code == 2 and "trains a EncoderDecoderLM" in err


def test_existing_export_raises_an_error_without_overwrite(place, dry_run):
    code, _, err = dry_run("chat", "export.folder=llama")
    assert code == 2 and "llama exists already" in err
    assert dry_run("chat", "export.folder=llama", options=["--overwrite"])[0] == 0
    (place / "served").mkdir(exist_ok=True)
    code, _, err = dry_run("chat", "export.saved_model=served")
    assert code == 2 and "`export.saved_model`: served exists" in err


def test_unsupported_export_raises_an_error(dry_run):
    code, _, err = dry_run("gpt", "export.family=bert")
    assert code == 2 and "Save it as another family" in err


@pytest.mark.parametrize(
    "setting, message",
    [
        ("training.groups=[{pattern: nowhere/*}]", "'nowhere/*' matches no weight"),
        ("model.adapters.targets=nowhere", "'nowhere' matches no weight"),
        ("training.beta_2=0.5", "beta_2 is not an argument of optimizer sgd"),
    ],
)
def test_options_that_training_rejects_raise_an_error(setting, message, dry_run):
    code, _, err = dry_run("chat", setting)
    assert code == 2 and message in err


def test_run_with_adapters_can_be_the_base_of_a_run(place, dry_run, capsys):
    path = write_config("chat", place)
    assert main(["train", "--config", str(path), "--run", "runs/chat"]) == 0
    capsys.readouterr()
    code, out, _ = dry_run("preference")
    assert code == 0 and "weights of runs/chat" in out


def start_ranks(monkeypatch, size, rank):
    for name, value in {"SIZE": size, "LOCAL_SIZE": size, "RANK": rank}.items():
        monkeypatch.setenv(f"HOROVOD_{name}", str(value))


def test_plan_covers_the_started_ranks_and_rank_0_prints_it(dry_run, monkeypatch):
    start_ranks(monkeypatch, 2, 0)
    code, out, _ = dry_run("gpt")
    assert code == 0 and "Layout: data 2 · batch 2, 2 × cpu" in out
    start_ranks(monkeypatch, 2, 1)
    assert dry_run("gpt") == (0, "", "")


def test_automatic_layouts_are_planned_for_the_started_ranks(dry_run, monkeypatch):
    start_ranks(monkeypatch, 2, 0)
    code, out, _ = dry_run("gpt", "parallel=auto")
    assert code == 0 and "2 × cpu" in out


@pytest.mark.parametrize("setting", ["parallel.data_parallel=8", "parallel.pipeline_stage=3"])
def test_layout_that_does_not_fit_the_ranks_raises_an_error(setting, dry_run, monkeypatch):
    start_ranks(monkeypatch, 2, 0)
    code, _, err = dry_run("gpt", setting)
    assert code == 2 and "but the job has 2" in err


@pytest.mark.parametrize(
    "settings, message",
    [
        (["model_parallel=4"], "model_parallel=4 does not divide num_heads=2"),
        (["pipeline_stage=2", "micro_batch_num=2"], "pipeline_stage=2 is more than the 1 blocks"),
        (
            ["context_parallel=3"],
            "`context_parallel=3` must divide the positions of a sequence, got 32",
        ),
        (["expert_parallel=2"], "expert_parallel=2 does not divide num_experts=1"),
        (["data_parallel=3"], "global_batch=4 is not divisible by data_parallel=3"),
    ],
)
def test_layout_that_does_not_fit_network_or_batch_raises_an_error(settings, message, dry_run):
    code, _, err = dry_run("gpt", *(f"parallel.{setting}" for setting in settings))
    assert code == 2 and message in err


def test_incompatible_techniques_raise_an_error(dry_run):
    settings = ["pipeline_stage=2", "model_parallel=2", "micro_batch_num=2"]
    settings += ["pipeline_schedule=zb_h1"]
    options = [f"parallel.{setting}" for setting in settings]
    code, _, err = dry_run("gpt", "model.num_layers=2", *options)
    assert code == 2 and "needs stages of one device" in err
    options = ["parallel.data_parallel=2", "parallel.optimizer_shard=3"]
    code, _, err = dry_run("gpt", *options, "training.optimizer=adafactor")
    assert code == 2 and "Adafactor computes with full weights" in err
    assert dry_run("gpt", *options)[0] == 0


def test_dry_run_prints_the_number_of_ranks_to_start(dry_run):
    _, out, _ = dry_run("gpt", "parallel.data_parallel=2")
    assert "2 × cpu" in out and "dtransformer launch -np 2" in out
    assert "launch" not in dry_run("gpt")[1]


def test_dry_run_reports_random_weights(dry_run):
    assert "random weights" in dry_run("gpt")[1]
    assert "weights of llama" in dry_run("chat")[1]


def test_adapters_without_weights_are_refused(dry_run):
    code, _, err = dry_run("chat", "model.from=null", "model.preset=llama3_8b")
    assert code == 2 and "`model.adapters` (rank 2) requires weights to adapt" in err


@pytest.mark.parametrize("name", ["gpt", "classification", "reward"])
def test_bfloat16_is_refused_for_weights_that_are_trained(name, dry_run):
    code, _, err = dry_run(name, "training.precision=bfloat16")
    assert code == 2 and "would lose small updates" in err


def test_adapters_train_with_frozen_bfloat16_weights(place, capsys):
    path = write_config("chat", place)
    losses = {}
    for precision in ("float32", "bfloat16"):
        run = ["--run", f"runs/{precision}", "--set", f"training.precision={precision}"]
        assert main(["train", "--config", str(path), *run]) == 0
        lines = (place / f"runs/{precision}/metrics.jsonl").read_text().splitlines()
        epochs = [x for x in map(json.loads, lines) if x["kind"] == "epoch"]
        losses[precision] = epochs[-1]["val_loss"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.01)
