"""Promise: a key that a run would not read is an error before anything is read, in every task."""

import dataclasses

import pytest

from dtransformer.errors import InputError
from dtransformer.runs.automatic import shape_of_run
from dtransformer.runs.config import RunConfig, load_config
from dtransformer.runs.options import SECTIONS
from dtransformer.runs.unread import READ, check_read


def test_the_table_has_keys_that_there_are():
    for key, tasks in READ.items():
        assert tasks and all(key in RunConfig(task).keys() for task in tasks), key
        # All others are unknown to the other tasks already.
        assert any(key in RunConfig(task).keys() for task in SECTIONS if task not in tasks), key


@pytest.mark.parametrize("task", SECTIONS)
def test_defaults_are_read(task):
    check_read(RunConfig(task))


@pytest.mark.parametrize(
    "task, setting, words",
    [
        (
            "preference",
            "training.label_smoothing=0.1",
            ["label_smoothing", "of tasks translation,"],
        ),
        ("reward", "training.label_smoothing=0.1", ["task reward does not read it"]),
        ("preference", "data.train_on=all", ["data.train_on", "of tasks chat"]),
        ("reward", "evaluation.samples=[a]", ["evaluation.samples", "causal_lm, chat"]),
        ("reward", "data.packed=true", ["data.packed"]),
        ("classification", "evaluation.max_new_tokens=4", ["max_new_tokens"]),
        ("regression", "data.labels=[a, b]", ["data.labels", "classification"]),
        ("embedding", "training.label_smoothing=0.1", ["label_smoothing"]),
        ("masked_lm", "data.mean_span=2", ["data.mean_span", "span_corruption"]),
        ("chat", "training.bleu_sentences=3", ["bleu_sentences", "translation"]),
        ("translation", "tokenizer.folder=x", ["tokenizer.folder"]),
        ("seq2seq", "data.mixture=repeat", ["data.mixture"]),
        ("seq2seq", "data.train={path: a, weight: 1}", ["data.train: a weight"]),
        ("chat", "data.dev={path: a, weight: 1}", ["data.dev: a weight"]),
        ("chat", "training.decay_steps=3", ["decay_steps", "schedule is 'cosine'"]),
        ("translation", "training.final_learning_rate=0.1", ["'inverse_sqrt'"]),
    ],
)
def test_what_a_task_does_not_read_is_told(task, setting, words):
    with pytest.raises(InputError) as caught:
        check_read(load_config(None, [f"task={task}", setting]))
    for word in words:
        assert word in str(caught.value)


def test_a_tokenizer_that_is_given_is_not_trained():
    settings = ["task=chat", "model.from=x", "tokenizer.vocab_size=50"]
    with pytest.raises(
        InputError, match=r"tokenizer.vocab_size is not read where model.from is 'x'"
    ):
        check_read(load_config(None, settings))


@pytest.mark.tensorflow
@pytest.mark.parametrize("targets", ["*_kernel", "*(key|gate)_kernel", "*kernel"])
def test_a_preview_counts_the_adapters_that_patterns_match(targets):
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
    assert shape_of_run(config, 16).trained_parameters() == expected
