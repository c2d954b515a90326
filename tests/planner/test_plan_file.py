"""The YAML file of a plan trains the planned layout, or explains how to complete it."""

import json

import pytest
import yaml

from dtransformer.cli import main
from dtransformer.planner import Cluster, Job, get_device, get_model, plan
from dtransformer.planner.plan_file import plan_to_yaml
from dtransformer.runs.config import load_config

LLAMA = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_plan(folder, *options):
    """Return the content and the comments of the file that the command writes."""
    path = folder / "plan.yaml"
    ask = ["plan", "--devices", "2", "--device", "h100", "--global-batch", "8", "--yaml", str(path)]
    assert main([*ask, *options]) == 0
    text = path.read_text()
    comments = "\n".join(line for line in text.split("\n") if line.startswith("#"))
    return yaml.safe_load(text), comments


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "my-llama"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(LLAMA))
    return path


@pytest.mark.tensorflow
@pytest.mark.parametrize("precision", ["mixed_bfloat16", "bfloat16"])
def test_published_folder_with_adapters_is_a_full_config(precision, folder, tmp_path):
    options = ["--model", str(folder), "--lora", "16", "--precision", precision]
    content, comments = write_plan(tmp_path, *options)
    assert content["task"] == "causal_lm" and content["data"] == {"length": 128}
    assert content["model"] == {"from": str(folder), "adapters": {"rank": 16}}
    training = {"batch_size": 8, "precision": precision, "optimizer": "adamw"}
    assert content["training"] == training
    assert "Add data.train" in comments and "launch -np 2" in comments
    config = load_config(tmp_path / "plan.yaml")
    assert (config.model.from_, config.model.adapters.rank) == (str(folder), 16)


@pytest.mark.tensorflow
def test_plan_of_quantized_kernels_writes_their_format(folder, tmp_path):
    options = ["--model", str(folder), "--lora", "16", "--base-dtype", "nf4"]
    content, _ = write_plan(tmp_path, *options)
    assert content["model"]["adapters"] == {"rank": 16, "base_dtype": "nf4"}


@pytest.mark.tensorflow
def test_published_folder_trains_from_its_weights(folder, tmp_path):
    content, comments = write_plan(tmp_path, "--model", str(folder))
    assert content["model"] == {"from": str(folder)}
    assert "random weights" not in comments


@pytest.mark.tensorflow
def test_folder_named_like_a_preset_trains_from_its_weights(folder, tmp_path):
    folder = folder.rename(tmp_path / "llama2_7b")
    content, _ = write_plan(tmp_path, "--model", str(folder))
    assert content["model"] == {"from": str(folder)}


@pytest.mark.tensorflow
def test_file_freezes_the_planned_blocks(folder, tmp_path):
    from dtransformer.models import CausalLM, freeze

    content, _ = write_plan(tmp_path, "--model", str(folder), "--freeze", "2")
    network = CausalLM(50, hidden_size=8, num_heads=2, num_layers=3, max_length=8)
    network.build()
    frozen = freeze(network, content["model"]["freeze"])
    assert {"embedding/table", "positions/table"} <= set(frozen)
    blocks = {path.split("/")[1] for path in frozen if path.startswith("blocks/")}
    assert blocks == {"block_0", "block_1"}


def test_named_model_with_adapters_asks_for_its_weights(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content, comments = write_plan(tmp_path, "--model", "llama2-7b", "--lora", "16")
    assert content["model"] == {"from": "models/llama2_7b", "adapters": {"rank": 16}}
    assert "Put the weights to fine-tune into models/llama2_7b" in comments


@pytest.mark.tensorflow
def test_named_model_with_adapters_needs_its_weights(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("one two\n")
    write_plan(tmp_path, "--model", "llama2-7b", "--lora", "16", "--devices", "1")
    train = ["train", "--config", "plan.yaml", "--set", "data.train=text.txt"]
    assert main(train) == 2
    assert "the folder 'models/llama2_7b' does not exist" in capsys.readouterr().err


def test_preset_states_that_weights_are_random(tmp_path):
    content, comments = write_plan(tmp_path, "--model", "gpt2-small")
    assert content["model"] == {"preset": "gpt2_small"}
    assert "`preset:` starts from random weights. `from: FOLDER` reads" in comments


@pytest.mark.tensorflow
def test_layout_alone_is_rejected_with_steps_to_complete_it(tmp_path, capsys):
    model = {"hidden_size": 64, "num_heads": 4, "num_layers": 2, "vocab_size": 1000}
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump({**model, "sequence_length": 64}))
    content, comments = write_plan(tmp_path, "--model", str(path))
    assert content.keys() == {"parallel"}
    assert "Only a layout" in comments and "dtransformer new causal_lm" in comments
    for option in ([], ["--dry-run"], ["--set", "training.epochs=1"]):
        assert main(["train", "--config", str(tmp_path / "plan.yaml"), *option]) == 2
        printed = capsys.readouterr().err
        assert (
            "expected `task`, `data` and `model`" in printed
            and "dtransformer new causal_lm" in printed
        )


@pytest.mark.parametrize("changes", [{"num_layers": 48}, {}])
def test_custom_networks_get_only_a_layout(changes):
    precision = None if changes else "bfloat16"
    result = plan(
        get_model("llama2_7b", **changes), Cluster(get_device("h100"), 8), Job(64, precision)
    )
    assert yaml.safe_load(plan_to_yaml(result)).keys() == {"parallel"}


def test_settings_complete_a_layout(tmp_path):
    (tmp_path / "plan.yaml").write_text("parallel: {data_parallel: 2}\n")
    config = load_config(tmp_path / "plan.yaml", ["task=chat"], needs_task=True)
    assert config.task == "chat" and config.parallel.data_parallel == 2


@pytest.mark.parametrize("text", ["parallel: auto", "training: {seed: 1}", ""])
def test_config_without_task_and_data_is_rejected(text, tmp_path):
    from dtransformer.errors import InputError

    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(InputError, match="expected `task`, `data` and `model`"):
        load_config(tmp_path / "mine.yaml", needs_task=True)
    (tmp_path / "mine.yaml").write_text("data: {source: a, target: b}")
    assert load_config(tmp_path / "mine.yaml", needs_task=True).task == "translation"
