"""A wrong config raises an error of one line that suggests the nearest key."""

import pathlib

import pytest

from dtransformer.errors import InputError
from dtransformer.parallel.config.config import MoEConfig, TransformerRecomputeConfig
from dtransformer.runs.automatic import get_run_shape
from dtransformer.runs.config import RunConfig, load_config, save_config
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


def test_saved_config_is_read_back(tmp_path):
    config = load_config(None, ["model.hidden_size=64", "data.source=a.txt", "search.beam_size=2"])
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


def test_values_of_older_runs_are_read(tmp_path):
    (tmp_path / "old.yaml").write_text("training:\n  jit_compile: 'true'\n")
    assert load_config(tmp_path / "old.yaml").training.jit_compile is True


@pytest.mark.parametrize(
    "text, words",
    [
        ("training:\n  epoch: 3\n", ["training.epoch", "Did you mean `training.epochs`?"]),
        ("trainin:\n  epochs: 3\n", ["trainin", "Did you mean `training.epochs`?"]),
        ("lr: 3\n", ["unknown key `lr`", "Sections: data, "]),
        ("epochs: 3\n", ["epochs", "Did you mean `training.epochs`?"]),
        ("model:\n  hiden_size: 3\n", ["model.hiden_size", "model.hidden_size"]),
        ("parallel:\n  data_paralel: 2\n", ["parallel.data_paralel", "parallel.data_parallel"]),
        ("training:\n  epochs: 0\n", ["training.epochs", "must be at least 1", "0"]),
        ("training:\n  epochs: two\n", ["training.epochs", "must be an integer", "'two'"]),
        ("training:\n  epochs: true\n", ["training.epochs", "must be an integer", "True"]),
        ("training:\n  learning_rate: fast\n", ["training.learning_rate", "number", "'fast'"]),
        ("training:\n  schedule: steps\n", ["training.schedule", "cosine", "'steps'"]),
        ("parallel:\n  model_parallel: 0\n", ["model_parallel", "greater than or equal to 1", "0"]),
        ("data:\n  shuffle: 7\n", ["data.shuffle", "must be true or false", "7"]),
        ("training: 3\n", ["training", "3", "keys"]),
        ("- 1\n- 2\n", ["sections", "list"]),
        ("training: [\n", ["cannot be parsed as YAML"]),
    ],
)
def test_rejects_wrong_files(tmp_path, text, words):
    path = write(tmp_path, text)
    with pytest.raises(InputError) as caught:
        load_config(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    for word in words:
        assert word in message


CHAT = "task: chat\ndata: {train: a.jsonl}\n"
MISTAKES = {
    "key of data": ("data: {trian: a}", "data.trian", "'a'", "data.train"),
    "key of tokenizer": (
        "tokenizer: {vocabsize: 9}",
        "tokenizer.vocabsize",
        "9",
        "tokenizer.vocab_size",
    ),
    "key of model": ("model: {hiden_size: 64}", "model.hiden_size", "64", "model.hidden_size"),
    "key of training": (
        "training: {lr_rate: 1}",
        "training.lr_rate",
        "1",
        "training.learning_rate",
    ),
    "key of parallel": (
        "parallel: {data_paralel: 2}",
        "parallel.data_paralel",
        "2",
        "data_parallel",
    ),
    "key of evaluation": ("evaluation: {sample: [x]}", "evaluation.sample", "['x']", "samples"),
    "key of logs": ("logs: {tensorbord: true}", "logs.tensorbord", "True", "logs.tensorboard"),
    "key of export": ("export: {foldr: out}", "export.foldr", "'out'", "export.folder"),
    "key in another section": (
        "data: {batch_size: 8}",
        "data.batch_size",
        "8",
        "training.batch_size",
    ),
    "key of a source": ("data: {train: [{paht: a}]}", "data.train", "'a'", "did you mean path?"),
    "key of adapters": ("model: {adapters: {rnak: 8}}", "model.adapters", "`rnak`, got 8", "rank?"),
    "key of experts": (
        "model: {moe_config: {expert_nmu: 4}}",
        "moe_config",
        "got 4",
        "expert_num?",
    ),
    "section": ("train: {epochs: 2}", "train.epochs", "2", "Did you mean `training.epochs`?"),
    "empty section": ("modle: {}", "modle", "{}", "Did you mean `model`?"),
    "section without a value": ("modle:", "modle", "None", "Did you mean `model`?"),
    "section as text": ("model: llama", "`model`", "'llama'", "keys and values"),
    "layout as text": ("parallel: automatic", "`parallel`", "'automatic'", "`auto`"),
    "text for an integer": (
        "training: {epochs: three}",
        "training.epochs",
        "'three'",
        "an integer",
    ),
    "quoted number": ("training: {batch_size: '16'}", "training.batch_size", "'16'", "an integer"),
    "fraction": ("training: {epochs: 1.5}", "training.epochs", "1.5", "must be an integer"),
    "list for a number": ("model: {num_layers: [2]}", "model.num_layers", "[2]", "an integer"),
    "number for text": ("tokenizer: {folder: 3}", "tokenizer.folder", "3", "must be text"),
    "number for a path": ("data: {train: 3}", "data.train", "3", "must be a path"),
    "yes": ("data: {packed: yes}", "data.packed", "'yes'", "must be true or false"),
    "1 for true": ("data: {shuffle: 1}", "data.shuffle", "got 1", "must be true or false"),
    "1 for jit_compile": (
        "training: {jit_compile: 1}",
        "jit_compile",
        "got 1",
        "'auto' or true or false",
    ),
    "choice": ("training: {schedule: cosin}", "schedule", "'cosin'", "did you mean cosine?"),
    "precision": ("training: {precision: fp16}", "precision", "'fp16'", "'mixed_float16'"),
    "too small": ("training: {epochs: 0}", "training.epochs", "got 0", "must be at least 1"),
    "too large": ("model: {dropout_rate: 1.5}", "model.dropout_rate", "1.5", "must be less than 1"),
    "negative": ("training: {learning_rate: -1}", "learning_rate", "-1", "must be at least 0"),
    "degree": (
        "parallel: {model_parallel: 9999}",
        "model_parallel",
        "9999",
        "must be at most 4096",
    ),
    "part out of range": (
        "model: {adapters: {rank: 0}}",
        "model.adapters",
        "`rank`",
        "at least 1, got 0",
    ),
}


@pytest.mark.parametrize("text, words", [(x[0], x[1:]) for x in MISTAKES.values()], ids=MISTAKES)
def test_error_names_key_value_and_allowed_values(tmp_path, text, words):
    start = CHAT.splitlines()[0] + "\n" if text.startswith("data") else CHAT
    path = write(tmp_path, f"{start}{text}\n")
    with pytest.raises(InputError) as caught:
        load_config(path)
    message = str(caught.value)
    for word in (str(path), *words):
        assert word in message
    assert message[-1] in ".?)" and " should be a valid" not in message


EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
CONFIGS = [
    path
    for path in sorted(EXAMPLES.rglob("*.yaml"))
    if path.parent.name not in ("launch", "long_context")  # Kubernetes', a script's
]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_example_configs_are_valid(path):
    assert load_config(path).task in SECTIONS


def test_key_of_another_task_raises_an_error():
    with pytest.raises(
        InputError, match="Task translation does not have this key.* Is `task: .*` missing"
    ):
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
    adapters = load_config(path, ["model.adapters.base_dtype=nf4"]).model.adapters
    assert (adapters.base_dtype, adapters.base_targets) == ("nf4", "*_kernel")
    for wrong in ("base_dtype=fp4", "load_in_4bit=true"):
        with pytest.raises(InputError, match=f"model.adapters.*{wrong.partition('=')[0]}"):
            load_config(path, [f"model.adapters.{wrong}"])
    with pytest.raises(InputError, match="`model.adapters`: unknown key `sort`"):
        load_config(path, ["model.adapters.sort=dora"])
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


@pytest.mark.parametrize(
    "setting, words",
    [
        (
            "data.train={path: a, weigth: 2}",
            ["data.train", "unknown key `weigth`, got 2", "did you mean weight?"],
        ),
        ("data.train=[{path: a, weight: 0}]", ["data.train", "`weight` must be greater than 0"]),
        ("data.train=[3]", ["data.train", "must be a path, a mapping with `path`"]),
        (
            "model.adapters={rank: 0}",
            ["model.adapters", "`rank` must be at least 1"],
        ),
        (
            "model.adapters={kind: vera}",
            ["model.adapters", "`kind` must be 'lora' or 'dora', got 'vera'"],
        ),
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
        ("training.epochs=[", ["cannot be parsed as YAML"]),
        ("search.beam_size=-1", ["search.beam_size", "must be at least 1", "-1"]),
    ],
)
def test_rejects_wrong_settings(setting, words):
    with pytest.raises(InputError) as caught:
        load_config(None, [setting])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("task", ["[]", "{}", "3"])
def test_invalid_task_name_raises_an_error(task):
    with pytest.raises(InputError, match="unknown task"):
        load_config(settings=[f"task={task}"])


def test_missing_file_is_named():
    with pytest.raises(InputError, match="nowhere.yaml"):
        load_config("nowhere.yaml")


def test_recompute_accepts_a_mapping(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("parallel:\n  recompute:\n    select: [attention]\n  optimizer_shard: 2\n")
    parallel = load_config(path).parallel
    assert parallel.recompute == TransformerRecomputeConfig(select=("attention",))
    assert parallel.optimizer_shard == 2


def test_moe_config_accepts_a_mapping(tmp_path):
    text = "model:\n  moe_config: {expert_num: 8, num_experts_chosen: 2}\n  moe_every: 2\n"
    config = load_config(write(tmp_path, text))
    assert config.model.moe_config == MoEConfig(expert_num=8, num_experts_chosen=2)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config
    model = get_run_shape(config, 32)
    assert model.experts.expert_num == 8
    assert [kind.has_experts for kind in model.kinds][:2] == [False, True]


@pytest.mark.tensorflow
@pytest.mark.parametrize("task", ["masked_lm", "next_sentence"])
def test_masked_tasks_compute_logits_at_masked_positions_by_default(task):
    from dtransformer.runs.tasks import get_task_class

    config = RunConfig(task)
    batch_options = get_task_class(config)(config).get_batch_options()
    assert batch_options["all_positions"] is False
    assert get_run_shape(config, 512).num_predictions == 77
    config.data.all_positions = True
    assert get_task_class(config)(config).get_batch_options()["all_positions"] is True
    assert get_run_shape(config, 512).num_predictions == 512


@pytest.mark.parametrize(
    "value, words",
    [
        ("{expert_nu: 8}", ["model.moe_config", "`expert_nu`", "did you mean expert_num?"]),
        (
            "{expert_num: 0}",
            ["model.moe_config", "expert_num should be greater than or equal to 1"],
        ),
        ("8", ["model.moe_config", "keys and values", "8"]),
    ],
)
def test_rejects_wrong_expert_options(value, words):
    with pytest.raises(InputError) as caught:
        load_config(None, [f"model.moe_config={value}"])
    for word in words:
        assert word in str(caught.value)
