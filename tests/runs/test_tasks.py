"""One command trains each task from files to a run, and resumes it bit for bit."""

import argparse
import io
import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.cli import main
from dtransformer.cli.chat import chat
from dtransformer.errors import InputError
from dtransformer.models import CausalLM, from_pretrained
from dtransformer.runs.config import load_config
from dtransformer.runs.evaluating import evaluate_run
from dtransformer.runs.loading import opened
from dtransformer.runs.optimizers import group_weights, make_optimizer
from dtransformer.runs.options import SECTIONS
from dtransformer.runs.preview import new_config
from dtransformer.runs.run import make_trainer
from dtransformer.runs.tasks import documents, load_run, make_task
from dtransformer.runs.tasks.classification import label_name
from dtransformer.trainers import Muon
from tests.runs.small_records import CONFIGS, write, write_config

OTHERS = [name for name in CONFIGS if name not in ("gpt", "chat", "preference")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Working folder with records, a model and its tokenizer."""
    folder = tmp_path_factory.mktemp("place")
    write(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        yield folder


def train(name, place, *options, code=0):
    """Train a task's config. Return the losses of its epochs, on held-out records if any."""
    path = write_config(name, place)
    assert main(["train", "--config", str(path), *options]) == code
    if code:
        return None
    lines = (place / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [x.get("val_loss", x["loss"]) for x in map(json.loads, lines) if x["kind"] == "epoch"]


@pytest.fixture(scope="module")
def chatted(place):
    """Chat run with adapters and a mixture in packed rows, trained once for all tests."""
    return train("chat", place, "--set", "training.epochs=3")


def test_gpt_from_text_is_exported(place, capsys):
    settings = ["evaluation.samples=[one]", "evaluation.max_new_tokens=2"]
    train("gpt", place, "--set", *settings, "export.saved_model=models/served")
    tokens = tf.constant(np.arange(3, 35)[None], "int32")
    inputs = {"tokens": tokens, "segments": tf.ones_like(tokens)}
    served = tf.saved_model.load("models/served")
    np.testing.assert_allclose(
        served.serve(inputs), load_run("runs/gpt").network(inputs), atol=1e-5
    )
    printed = capsys.readouterr().out
    assert "Documents (train): 96 with" in printed and "epoch: 1, one … " in printed
    assert from_pretrained("models/gpt").num_parameters() > 0
    assert main(["evaluate", "--run", "runs/gpt", "--data", "text.txt", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["perplexity"] == pytest.approx(np.exp(result["loss"]))


def test_chat_learns_answers_and_saves_only_adapters(place, chatted, capsys):
    assert chatted[-1] < chatted[0]
    names = {path.name for path in (place / "runs" / "chat").iterdir()}
    assert "adapters" in names and "model.weights.h5" not in names
    assert main(["evaluate", "--run", "runs/chat", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["loss"] == pytest.approx(min(chatted), rel=1e-5)


def test_chat_in_the_terminal(place, chatted):
    options = {"model": "runs/chat", "adapters": None, "system": None, "temperature": 0.0}
    arguments, out = argparse.Namespace(**options, max_new_tokens=3), io.StringIO()
    chat(arguments, ["one and two?", "", "/reset", "one and two?", "/quit", "lost"], out)
    first, *answers = out.getvalue().split("\n")
    assert "/reset" in first and answers[0] == answers[1] and answers[2:] == [""]


def test_adapters_are_merged_or_exported_separately(place, chatted):
    for merge in ("true", "false"):
        settings = [f"export.folder=models/chat-{merge}", f"export.merge_adapters={merge}"]
        path = write_config("chat", place)
        run = ["--run", f"runs/{merge}"]
        assert main(["train", "--config", str(path), *run, "--set", *settings]) == 0
    tokens = np.arange(3, 11, dtype="int32")[None]
    logits = load_run("runs/true").network(tokens)
    np.testing.assert_allclose(from_pretrained("models/chat-true")(tokens), logits, atol=1e-5)
    assert (place / "models/chat-false/adapter_config.json").is_file()


def test_packed_and_padded_rows_have_one_loss(place, chatted, capsys):
    result = []
    for packed in ("true", "false"):
        run = load_run("runs/chat")
        run.config.data.packed = packed == "true"
        run.read("dev")
        result.append(run.results(make_trainer(run, 1), run.batches("dev"))["loss"])
    assert result[0] == pytest.approx(result[1], rel=1e-6)


@pytest.mark.parametrize("stop", [5, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 8))])
def test_stopped_chat_resumes_bit_for_bit(place, chatted, stop):
    path, run = write_config("chat", place), f"runs/stopped-{stop}"
    command = ["train", "--config", str(path), "--run", run]
    settings = ["training.epochs=3", "training.schedule=constant"]
    if not (place / "runs/whole").exists():
        assert main([*command[:-1], "runs/whole", "--set", *settings]) == 0
    assert main([*command, "--set", *settings, f"training.max_steps={stop}"]) == 0
    assert main([*command, "--resume", "--set", *settings]) == 0
    weights = [load_run(name).network.get_weights() for name in ("runs/whole", run)]
    for expected, value in zip(*weights, strict=True):
        np.testing.assert_array_equal(value, expected)


def test_preference_model_starts_equal_to_the_reference(place, chatted, capsys):
    settings = ["training.epochs=2", "export.folder=models/preferred"]
    losses = train("preference", place, "--set", *settings)
    assert from_pretrained("models/preferred").num_parameters() > 0
    assert losses[-1] < losses[0] < np.log(2)
    lines = (place / "runs/preference/metrics.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    assert first["step_loss"] == pytest.approx(np.log(2), rel=1e-5) and first["margin"] == 0
    last = json.loads(lines[-1])
    capsys.readouterr()
    assert main(["evaluate", "--run", "runs/preference", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward")
    expected = {name: pytest.approx(last[f"val_{name}"], rel=1e-5, abs=1e-6) for name in names}
    assert result == expected
    # The chat run's adapters are merged before the new ones are added.
    _, beside = opened("runs/chat", "float32", "runs/preference/adapters")
    tokens = np.arange(3, 11, dtype="int32")[None]
    logits = load_run("runs/preference").core(tokens)
    np.testing.assert_allclose(beside(tokens), logits, atol=1e-5)


def test_unrelated_answers_of_kto_are_those_of_the_record_before(place):
    task = make_task(load_config(write_config("kto", place), ["training.batch_size=2"]))
    task.read()
    records = task.records["dev"]
    decode = task.tokenizer.decode_all

    def answer(index, side):
        ids, labels = records.sequence(index, side)
        return decode(ids[labels >= 0].tolist())

    assert len({answer(index, 0) for index in range(len(records))}) > 2
    for index in range(len(records)):
        assert answer(index, 1) == answer(index - 1 if index else len(records) - 1, 0)
    assert records.targets[:, 2].tolist() == [-1, 1, 1, -1, 1, 1, -1, 1]


@pytest.mark.parametrize(
    "record, expected_message",
    [
        ({"prompt": "a", "completion": "b"}, "`label` must be true for a desirable"),
        ({"prompt": "a", "completion": "b", "label": "yes"}, "got 'yes'"),
        ({"prompt": "a", "completion": 3, "label": True}, "completion"),
        ({"completion": "b", "label": True}, "prompt"),
        (
            {"prompt": [{"role": "user", "content": "a"}], "completion": "b", "label": True},
            "must be texts, or messages",
        ),
    ],
)
def test_wrong_records_of_kto_raise_an_error(record, expected_message, place):
    rows = [{"prompt": "a", "completion": "b", "label": False}, record]
    (place / "wrong.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = make_task(load_config(write_config("kto", place), ["data.train=wrong.jsonl"]))
    with pytest.raises(InputError, match=expected_message):
        task.read("train")


@pytest.mark.parametrize("name", OTHERS)
def test_remaining_tasks_train_and_evaluate(name, place, capsys):
    losses = train(name, place)
    assert np.isfinite(losses).all() and losses[-1] <= losses[0]
    assert main(["evaluate", "--run", f"runs/{name}", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["loss"] == pytest.approx(min(losses), rel=1e-4)
    expected = {
        "classification": "f1",
        "token_classification": "matthews",
        "regression": "spearman",
        "kto": "margin",
        "reward": "margin",
        "embedding": "ndcg@10",
        "ranking": "ndcg@10",
    }
    assert expected.get(name, "loss") in result


def test_exported_classifier_can_be_trained_further(place, capsys):
    train("token_classification", place, "--overwrite", "--set", "export.folder=models/labels")
    config = json.loads((place / "models/labels/config.json").read_text())
    assert config["architectures"] == ["LlamaForTokenClassification"]
    labels = [config["id2label"][key] for key in sorted(config["id2label"])]
    assert labels == load_run("runs/token_classification").config.data.labels
    trained = from_pretrained("models/labels").head.classifier.get_weights()[0]
    settings = ["model.from=models/labels", "training.learning_rate=1e-9"]
    train("token_classification", place, "--overwrite", "--set", *settings)
    again = load_run("runs/token_classification").core.head.classifier.get_weights()[0]
    np.testing.assert_allclose(again, trained, atol=1e-6)
    config |= {"problem_type": "multi_label_classification"}
    (place / "models/labels/config.json").write_text(json.dumps(config))
    train("token_classification", place, "--overwrite", "--set", *settings, code=2)
    assert "problem_type is multi_label" in capsys.readouterr().err


def test_dry_run_marks_learned_text_and_writes_nothing(place, capsys):
    path = write_config("chat", place)
    before = sorted(place.rglob("*"))
    assert main(["train", "--config", str(path), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert sorted(place.rglob("*")) == before
    assert "⟦three</s>⟧" in printed or "⟦two</s>⟧" in printed
    assert re.search(
        r"Records \(train\): 48 with [\d,]+ tokens, \d+\.\d% of them in the loss", printed
    )
    assert "It fits" in printed and "rank" not in printed.split("\n")[0]


def test_train_accepts_the_planners_config(tmp_path, capsys):
    options = ["--device", "h100-80", "--devices", "8", "--global-batch", "64"]
    path = str(tmp_path / "llama.yaml")
    assert main(["plan", "--model", "llama3_8b", *options, "--yaml", path]) == 0
    assert main(["train", "--config", path, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert (
        "Model: llama3_8b, 8,030,261,248 parameters" in printed and "data is not given" in printed
    )


@pytest.mark.parametrize("task", SECTIONS)
def test_train_accepts_configs_from_new(task, tmp_path):
    (tmp_path / "new.yaml").write_text(new_config(task))
    assert load_config(tmp_path / "new.yaml").task == task


@pytest.mark.parametrize(
    "name, setting, message",
    [
        ("chat", "data.train=nowhere.jsonl", "nowhere.jsonl"),
        ("chat", "data.train=null", "`data.train` is missing"),
        ("chat", "data.length=4", "more than data.length=4 tokens"),
        ("chat", "data.train=pairs.jsonl", "completion: Expected a list of messages"),
        ("chat", "model.from=nowhere", "nowhere"),
        ("chat", "model.preset=gpt2_small", "`model.preset` are both set"),
        ("chat", "model.adapters={targets: nothing}", "model.adapters"),
        ("gpt", "export.family=llama", "save it as another family"),
        ("gpt", "model.adapters={rank: 2}", "Set `model.from` to the folder"),
        ("gpt", "training.groups=nothing", "training.groups: The pattern 'nothing'"),
        ("gpt", "training.groups=['*', '*bias']", "matches groups 1 and 2"),
        ("gpt", "training.groups=[{learning_rate_factor: 2}]", "must be a pattern, a mapping"),
        ("classification", "data.labels=[yes]", "must have at least two labels"),
        (
            "classification",
            "data.labels=[yes, maybe]",
            "line 1: the label 'no' is not in 'yes, maybe'",
        ),
        ("regression", "data.train=labels.jsonl", "must be a finite number"),
        ("token_classification", "data.train=labels.jsonl", "expected a list of words"),
        ("reward", "data.packed=true", "data.packed"),
        ("preference", "training.beta=0", "`training.beta` must be greater than 0"),
        ("seq2seq", "data.train=labels.jsonl", "`prompt` is missing"),
    ],
)
def test_wrong_task_options_are_one_line_errors(name, setting, message, place, capsys):
    run = ["--run", "runs/wrong"]
    path = write_config(name, place)
    settings = [*(["export.folder=models/other"] if name == "gpt" else []), setting]
    assert main(["train", "--config", str(path), *run, "--set", *settings]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert message in error and error.startswith("dtransformer: ")
    assert not (place / "runs/wrong").exists()


def test_embeddings_reject_pipelines_with_micro_batches(place, capsys):
    path = write_config("embedding", place)
    fields = ["pipeline_chunks=2", "pipeline_schedule=interleaved", "micro_batch_num=2"]
    command = ["train", "--config", str(path), "--run", "runs/wrong"]
    assert main([*command, "--set", *(f"parallel.{field}" for field in fields)]) == 2
    assert "or micro_batch_num=1" in capsys.readouterr().err


@pytest.mark.parametrize("label", [None, True, 0.5, [], "", "x" * 101])
def test_rejects_invalid_labels(label):
    with pytest.raises(InputError, match="^here: label is .*, expected a text of at most 100"):
        label_name(label, "here")


def test_rejects_runs_of_another_task(place, chatted, capsys):
    with pytest.raises(InputError, match="is a run of task chat, expected task translation"):
        load_run("runs/chat", task="translation")
    path = write_config("classification", place)
    command = ["train", "--config", str(path), "--run", "runs/chat", "--resume"]
    assert main(command) == 2
    assert "the run has task chat" in capsys.readouterr().err


def test_register_task_rejects_built_in_names_and_other_classes():
    from dtransformer.runs.tasks import register_task
    from dtransformer.runs.tasks.causal_lm import LanguageModel

    with pytest.raises(InputError, match="Task chat is built in"):
        register_task("chat", LanguageModel, like="causal_lm")
    with pytest.raises(InputError, match="subclass of Task, got 3"):
        register_task("mine", 3, like="causal_lm")
    with pytest.raises(InputError, match="did you mean causal_lm"):
        register_task("mine", LanguageModel, like="causallm")


def test_depth_determines_sizes_batch_and_rate(tmp_path, capsys):
    """The width is GPT-2's. The expected values follow from the published laws."""
    command = ["new", "causal_lm", "--depth", "12", "--device", "h100", "--devices", "8"]
    assert main(command) == 0
    text = capsys.readouterr().out
    (tmp_path / "deep.yaml").write_text(text)
    config = load_config(tmp_path / "deep.yaml")
    assert (config.model.hidden_size, config.model.num_heads, config.model.num_layers) == (
        768,
        12,
        12,
    )
    tokens = 20 * 84_934_656
    flops = (6 * 84_934_656 + 12 * 12 * 768 * 1024) * tokens
    training = config.training
    assert training.batch_size * 1024 / (0.2920 * flops**0.3271) == pytest.approx(1, rel=0.42)
    assert training.learning_rate == pytest.approx(0.3118 * flops**-0.125, rel=0.03)
    assert training.max_steps * training.batch_size * 1024 == pytest.approx(tokens, rel=1e-3)
    assert training.layout == "auto" and training.precision == "mixed_bfloat16"
    assert "# 1  data 8" in text and "# Recommended: layout 1" in text
    assert main(["new", "chat", "--depth", "2"]) == 2
    assert main(["new", "chat", "--device", "h100"]) == 2


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_weight_decay_excludes_biases(optimizer, decay):
    """Also if it is 0, although Keras' default is different."""
    settings = [f"training.optimizer={optimizer}", f"training.weight_decay={decay}"]
    settings += ["training.clip_norm=null", "training.learning_rate=1", "training.warmup_steps=0"]
    created = make_optimizer(load_config(None, settings), total_steps=10)
    kernel, bias = (keras.Variable(np.ones(2, "float32"), name=x) for x in ("kernel", "bias"))
    created.apply([np.zeros(2, "float32")] * 2, [kernel, bias])
    np.testing.assert_allclose(kernel.numpy(), 1 - decay, rtol=1e-6)
    np.testing.assert_array_equal(bias.numpy(), 1)


def test_yaml_sets_the_options_of_muon():
    settings = ["training.optimizer=muon", "training.beta_2=0.9", "training.weight_decay=0.2"]
    settings += ["training.muon={adam_lr_ratio: 0.5, rms_rate: null, momentum: 0.8}"]
    muon = make_optimizer(load_config(None, settings), total_steps=10)
    assert type(muon) is Muon and muon.weight_decay == 0.2 and muon.adam_beta_2 == 0.9
    assert muon.adam_weight_decay == 0.1
    assert (muon.adam_lr_ratio, muon.rms_rate, muon.momentum) == (0.5, None, 0.8)


def test_groups_exclude_matrices_from_muon():
    groups = "training.groups=[{pattern: '*query_kernel', adamw: true}]"
    config = load_config(None, ["task=causal_lm", "training.optimizer=muon", groups])
    network = CausalLM(9, hidden_size=8, num_heads=2, num_layers=1)
    network.build()
    group_weights(network, config)
    optimizer = make_optimizer(config, total_steps=10)
    kernels = {w.name: w for w in network.trainable_variables if w.name.endswith("y_kernel")}
    shapes = {name: optimizer.matrix_shape(kernel) for name, kernel in kernels.items()}
    assert shapes["query_kernel"] is None and len(shapes["key_kernel"]) == 2


def test_records_are_encoded_in_groups(place, monkeypatch):
    full, parts = (make_task(load_config(write_config("classification", place))) for _ in range(2))
    full.read()
    monkeypatch.setattr("dtransformer.runs.tasks.records._GROUP_SIZE", 5)
    parts.read()
    assert parts.records["train"].fingerprint == full.records["train"].fingerprint
    rows = [{"text": "a", "label": str(n % 2)} for n in range(5)]
    rows += [{**row, "text_pair": "b"} for row in rows]
    (place / "some_pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    mixed = load_config(write_config("classification", place), ["data.train=some_pairs.jsonl"])
    with pytest.raises(InputError, match="Some records have a text_pair and others do not"):
        make_task(mixed).read("train")


def test_simultaneous_evaluations_use_different_folders(place, monkeypatch):
    """Token shards are written to temporary folders. Existing folders stay."""
    if not (place / "runs/gpt").exists():
        train("gpt", place)
    other_folder = place / "runs/gpt.evaluated"
    other_folder.mkdir()
    (other_folder / "notes").write_text("")
    before, folders = sorted((place / "runs").iterdir()), []
    write = documents.write_token_shards
    note = lambda texts, tokenizer, folder, **options: [
        folders.append(folder),
        write(texts, tokenizer, folder, **options),
    ]
    monkeypatch.setattr(documents, "write_token_shards", note)
    for _ in range(2):
        evaluate_run("runs/gpt", ["text.txt"])
    assert len(set(folders)) == 2 and sorted((place / "runs").iterdir()) == before
    assert (other_folder / "notes").exists()


def test_targets_have_a_position_for_the_start_token(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    length = load_config(write_config("seq2seq", place)).data.length
    settings = ["--set", "model.positions=learned", "--set", f"model.max_length={length}"]
    train("seq2seq", place, "--run", "runs/short", *settings, code=2)
    assert f"results in rows of {length + 1} tokens" in capsys.readouterr().err
