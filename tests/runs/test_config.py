"""Promise: a wrong config is told in one line, with the nearest right one."""

import pathlib

import pytest

from dtransformer.errors import InputError
from dtransformer.parallel.config.config import MoEConfig, TransformerRecomputeConfig
from dtransformer.runs.automatic import shape_of_run
from dtransformer.runs.config import load_config, save_config
from dtransformer.runs.options import SECTIONS


def write(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_files_and_settings_in_this_order(tmp_path):
    path = write(tmp_path, "training:\n  epochs: 3\n  learning_rate: 1e-3\ndata:\n")
    config = load_config(path, ["training.epochs=5", "parallel.optimizer_shard=false"])
    assert config.training.epochs == 5
    assert config.training.learning_rate == 1e-3  # a text, to YAML
    assert config.model.hidden_size == load_config().model.hidden_size
    assert config.parallel.optimizer_shard is False


def test_a_saved_config_reads_back_the_same(tmp_path):
    config = load_config(None, ["model.hidden_size=64", "data.source=a.txt", "search.beam_size=2"])
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


def test_words_of_older_runs_are_read(tmp_path):
    (tmp_path / "old.yaml").write_text("training:\n  jit_compile: 'true'\n")
    assert load_config(tmp_path / "old.yaml").training.jit_compile is True


@pytest.mark.parametrize(
    "text, words",
    [
        ("training:\n  epoch: 3\n", ["training.epoch", "did you mean training.epochs?"]),
        ("trainin:\n  epochs: 3\n", ["trainin", "did you mean training.epochs?"]),
        ("lr: 3\n", ["unknown key lr; sections are data, "]),
        ("epochs: 3\n", ["epochs", "did you mean training.epochs?"]),
        ("model:\n  hiden_size: 3\n", ["model.hiden_size", "model.hidden_size"]),
        ("parallel:\n  data_paralel: 2\n", ["parallel.data_paralel", "parallel.data_parallel"]),
        ("training:\n  epochs: 0\n", ["training.epochs", "or equal to 1", "0"]),
        ("training:\n  epochs: two\n", ["training.epochs", "a valid integer", "'two'"]),
        ("training:\n  epochs: true\n", ["training.epochs", "a valid integer", "True"]),
        ("training:\n  learning_rate: fast\n", ["training.learning_rate", "number", "'fast'"]),
        ("training:\n  schedule: steps\n", ["training.schedule", "cosine", "'steps'"]),
        ("parallel:\n  model_parallel: 0\n", ["model_parallel", "greater than or equal to 1", "0"]),
        ("data:\n  shuffle: 7\n", ["data.shuffle", "a valid boolean", "7"]),
        ("training: 3\n", ["training", "3", "keys"]),
        ("- 1\n- 2\n", ["sections", "list"]),
        ("training: [\n", ["not YAML"]),
    ],
)
def test_wrong_files(tmp_path, text, words):
    path = write(tmp_path, text)
    with pytest.raises(InputError) as caught:
        load_config(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    for word in words:
        assert word in message


EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
CONFIGS = [
    path
    for path in sorted(EXAMPLES.rglob("*.yaml"))
    if path.parent.name not in ("launch", "long_context")  # Kubernetes', a script's
]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_examples_are_taken(path):
    assert load_config(path).task in SECTIONS


def test_a_key_of_another_task_says_so():
    with pytest.raises(InputError, match="task translation has none, .* is `task: .*` missing"):
        load_config(None, ["data.train=a.jsonl"])
    with pytest.raises(InputError, match="did you mean chat"):
        load_config(None, ["task=caht"])


def test_sources_and_adapters_are_mappings(tmp_path):
    text = (
        "task: chat\ndata:\n  train: [a.jsonl, {path: b.parquet, weight: 0.5}]\n"
        "model: {from: models/x, adapters: {rank: 4, targets: ['*kernel']}}\n"
    )
    path = write(tmp_path, text)
    config = load_config(path)
    assert [(x.path, x.weight) for x in config.data.train] == [
        ("a.jsonl", None),
        ("b.parquet", 0.5),
    ]
    assert config.model.from_ == "models/x" and config.model.adapters.rank == 4
    settings = ["model.adapters.kind=dora", "model.adapters.alpha=2"]
    adapters = load_config(path, settings).model.adapters
    assert (adapters.rank, adapters.kind, adapters.alpha) == (4, "dora", 2.0)
    with pytest.raises(InputError, match="model.adapters .* has no field 'sort'"):
        load_config(path, ["model.adapters.sort=dora"])
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


@pytest.mark.parametrize(
    "setting, words",
    [
        (
            "data.train={path: a, weigth: 2}",
            ["data.train", "Source has no field 'weigth'", "weight"],
        ),
        ("data.train=[{path: a, weight: 0}]", ["data.train", "weight should be greater than 0"]),
        ("data.train=[3]", ["data.train", "must be a path, or a list"]),
        (
            "model.adapters={rank: 0}",
            ["model.adapters", "rank should be greater than or equal to 1"],
        ),
        ("model.adapters={kind: vera}", ["model.adapters", "kind should be 'lora' or 'dora'"]),
        ("data.date=tomorrow", ["data.date"]),
        ("training.schedule=wdd", ["training.schedule", "wsd"]),
    ],
)
def test_wrong_values_of_new_keys(setting, words):
    with pytest.raises(InputError) as caught:
        load_config(None, ["task=chat", setting])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "setting, words",
    [
        ("training.epochs", ["section.key=value"]),
        ("training.epoch=1", ["--set", "training.epochs"]),
        ("training.epochs=[", ["not YAML"]),
        ("search.beam_size=-1", ["search.beam_size", "or equal to 1", "-1"]),
    ],
)
def test_wrong_settings(setting, words):
    with pytest.raises(InputError) as caught:
        load_config(None, [setting])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("task", ["[]", "{}", "3"])
def test_a_task_that_is_no_name(task):
    with pytest.raises(InputError, match="there is no task"):
        load_config(settings=[f"task={task}"])


def test_a_missing_file_is_named():
    with pytest.raises(InputError, match="nowhere.yaml"):
        load_config("nowhere.yaml")


def test_recompute_is_given_as_a_mapping(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("parallel:\n  recompute:\n    select: [attention]\n  optimizer_shard: 2\n")
    parallel = load_config(path).parallel
    assert parallel.recompute == TransformerRecomputeConfig(select=("attention",))
    assert parallel.optimizer_shard == 2


def test_experts_are_given_as_a_mapping(tmp_path):
    text = "model:\n  moe_config: {expert_num: 8, num_experts_chosen: 2}\n  moe_every: 2\n"
    config = load_config(write(tmp_path, text))
    assert config.model.moe_config == MoEConfig(expert_num=8, num_experts_chosen=2)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config
    model = shape_of_run(config, 32)
    assert (model.num_experts, model.experts_every) == (8, 2)


@pytest.mark.parametrize(
    "value, words",
    [
        ("{expert_nu: 8}", ["model.moe_config", "'expert_nu'", "expert_num"]),
        (
            "{expert_num: 0}",
            ["model.moe_config", "expert_num should be greater than or equal to 1"],
        ),
        ("8", ["model.moe_config", "keys and values", "8"]),
    ],
)
def test_wrong_experts(value, words):
    with pytest.raises(InputError) as caught:
        load_config(None, [f"model.moe_config={value}"])
    for word in words:
        assert word in str(caught.value)
