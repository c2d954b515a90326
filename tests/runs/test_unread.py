"""In every task, a key that the run does not use is an error before any file is read."""

import dataclasses

import pytest

from dtransformer.errors import InputError
from dtransformer.planner.clusters import Cluster, get_device
from dtransformer.runs.automatic import get_run_shape, plan_run
from dtransformer.runs.config import RunConfig, load_config
from dtransformer.runs.options import SECTIONS
from dtransformer.runs.unread import TASKS_BY_KEY, check_read


def test_read_table_contains_existing_keys():
    for key, tasks in TASKS_BY_KEY.items():
        assert tasks and all(key in RunConfig(task).keys() for task in tasks), key
        # A key outside the sections of the other tasks would be an unknown key.
        assert any(key in RunConfig(task).keys() for task in SECTIONS if task not in tasks), key


@pytest.mark.parametrize("task", SECTIONS)
def test_options_of_muon_need_the_optimizer_muon(task):
    options = {
        "training.muon={adam_lr_ratio: 0.5}": "`training.muon` has no effect with training.optimizer=",
        "training.groups=[{pattern: x, adamw: true}]": "only with muon",
    }
    for setting, message in options.items():
        check_read(load_config(None, [f"task={task}", setting, "training.optimizer=muon"]))
        with pytest.raises(InputError, match=message):
            check_read(load_config(None, [f"task={task}", setting]))


@pytest.mark.parametrize("task", SECTIONS)
def test_defaults_are_read(task):
    check_read(RunConfig(task))


@pytest.mark.parametrize(
    "task, setting, words",
    [
        (
            "preference",
            "training.label_smoothing=0.1",
            ["label_smoothing", "only in translation,"],
        ),
        ("reward", "training.label_smoothing=0.1", ["has no effect in task reward"]),
        ("preference", "data.train_on=all", ["data.train_on", "only in chat"]),
        ("reward", "evaluation.samples=[a]", ["evaluation.samples", "causal_lm, chat"]),
        ("reward", "data.packed=true", ["data.packed"]),
        ("classification", "evaluation.max_new_tokens=4", ["max_new_tokens"]),
        ("regression", "data.labels=[a, b]", ["data.labels", "classification"]),
        ("embedding", "training.label_smoothing=0.1", ["label_smoothing"]),
        ("masked_lm", "data.mean_span=2", ["data.mean_span", "span_corruption"]),
        ("chat", "training.bleu_sentences=3", ["bleu_sentences", "translation"]),
        ("translation", "tokenizer.folder=x", ["tokenizer.folder"]),
        ("seq2seq", "data.mixture=repeat", ["data.mixture"]),
        ("seq2seq", "data.train={path: a, weight: 1}", ["`data.train`: weight has no effect here"]),
        ("chat", "data.dev={path: a, weight: 1}", ["`data.dev`: weight has no effect here"]),
        ("chat", "training.decay_steps=3", ["decay_steps", "schedule='cosine'"]),
        ("translation", "training.final_learning_rate=0.1", ["'inverse_sqrt'"]),
        ("chat", "evaluation.every_steps=2", ["`evaluation.every_steps` needs held-out records"]),
        ("translation", "training.early_stopping=2", ["`training.early_stopping` needs held-out"]),
    ],
)
def test_rejects_keys_that_the_task_does_not_use(task, setting, words):
    with pytest.raises(InputError) as caught:
        check_read(load_config(None, [f"task={task}", setting]))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    "like, setting, is_read",
    [
        ("seq2seq", "data.train={path: a, target: b}", True),
        ("seq2seq", "data.train={path: a, weight: 1}", False),
        ("chat", "data.train={path: a, weight: 1}", True),
        ("causal_lm", "data.train={path: a, weight: 1}", True),
    ],
)
def test_registered_tasks_use_the_keys_of_their_model_task(like, setting, is_read, monkeypatch):
    from dtransformer.runs import tasks
    from dtransformer.runs.unread import BASE_TASKS

    for table in (SECTIONS, BASE_TASKS, tasks._REGISTERED):  # Pytest restores the tables.
        monkeypatch.setitem(table, "mine", None)
    tasks.register_task("mine", tasks.get_task_class(RunConfig(like)), like=like)
    config = load_config(None, ["task=mine", setting])
    if is_read:
        return check_read(config)
    with pytest.raises(
        InputError, match="weight has no effect here, only in data.train of tasks causal_lm, "
    ):
        check_read(config)


def test_evaluations_require_held_out_records():
    settings = ["task=chat", "data.dev=x", "evaluation.every_steps=2", "training.early_stopping=2"]
    check_read(load_config(None, settings))
    check_read(load_config(None, ["data.dev_source=x", "training.early_stopping=2"]))


@pytest.mark.parametrize(
    "settings, fix",
    [
        (["task=seq2seq"], "data.packed=true and a data.length that is a multiple of 2 minus 1"),
        (["task=seq2seq", "data.packed=true", "data.length=16"], "a multiple of 2 minus 1"),
        (["task=translation"], "data.packed_length to a multiple of 2"),
        (["task=translation", "data.packed_length=33"], "data.packed_length to a multiple of 2"),
    ],
)
def test_context_parallelism_needs_packed_rows_of_sentence_pairs(settings, fix):
    with pytest.raises(InputError, match="`parallel.context_parallel=2` must divide") as caught:
        check_read(load_config(None, [*settings, "parallel.context_parallel=2"]))
    assert fix in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        ["task=seq2seq", "data.packed=true", "data.length=15"],
        ["task=translation", "data.packed_length=32"],
        ["task=chat"],
    ],
)
def test_context_parallelism_accepts_rows_of_one_length(settings):
    check_read(load_config(None, [*settings, "parallel.context_parallel=2"]))


def test_rejects_training_options_for_a_given_tokenizer():
    settings = ["task=chat", "model.from=x", "tokenizer.vocab_size=50"]
    with pytest.raises(
        InputError, match=r"tokenizer.vocab_size` has no effect with model.from='x'"
    ):
        check_read(load_config(None, settings))


@pytest.mark.tensorflow
@pytest.mark.parametrize("targets", ["*_kernel", "*(key|gate)_kernel", "*kernel"])
def test_preview_counts_the_adapters_that_patterns_match(targets):
    from dtransformer.models import CausalLM, add_lora
    from tests.runs.small_records import LLAMA

    network = CausalLM(290, **LLAMA)
    network.build()
    add_lora(network, 4, targets=targets, kind="dora")
    sizes = {**LLAMA, "pad_id": None}
    config = RunConfig("chat")
    for name, value in sizes.items():
        if name in {field.name for field in dataclasses.fields(config.model)}:
            setattr(config.model, name, value)
    config.tokenizer.vocab_size = 290
    config.model.adapters = {"rank": 4, "targets": targets, "kind": "dora"}
    expected = sum(weight.shape.num_elements() for weight in network.trainable_variables)
    config.training.ema = 0.9  # one more state than AdamW's two
    job = plan_run(config, Cluster(get_device("h100-80"), 1)).job
    assert job.averages and job.system().parameter_bytes.states == 3 * 4
    assert get_run_shape(config, 16).trained_parameters() == expected
