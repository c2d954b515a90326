"""A cross-encoder is trained on labeled documents or on lists, as sentence-transformers does."""

import json

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.cli import main
from dtransformer.errors import InputError
from dtransformer.runs.config import load_config
from dtransformer.runs.run import make_trainer
from dtransformer.runs.tasks import load_run, make_task
from dtransformer.runs.tasks.ranking import RankingLoss
from dtransformer.runs.unread import check_read
from tests.runs.small_records import write, write_config


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    return tmp_path


def read_task(place, rows, *settings):
    (place / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = ["data.train=rows.jsonl", "data.dev=rows.jsonl"]
    task = make_task(load_config(write_config("ranking", place), [*files, *settings]))
    task.read()
    return task


def loss_and_gradient(labels, scores):
    x = tf.constant(scores, "float32")
    with tf.GradientTape() as tape:
        tape.watch(x)
        losses = RankingLoss().call(tf.constant(labels, "float32"), x)
    return losses.numpy(), tape.gradient(losses, x).numpy()


def test_single_documents_have_the_sigmoid_cross_entropy_of_pytorch():
    torch = pytest.importorskip("torch", reason="the reference environment has PyTorch")
    labels = np.array([[1.0], [0.0], [0.3], [1.0]])
    scores = np.array([[2.0], [-1.5], [0.7], [-30.0]])
    x = torch.tensor(scores, requires_grad=True)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(
        x, torch.tensor(labels), reduction="none"
    )
    loss.sum().backward()
    losses, gradient = loss_and_gradient(labels, scores)
    np.testing.assert_allclose(losses, loss.detach().numpy()[:, 0], rtol=1e-6)
    np.testing.assert_allclose(gradient, x.grad.numpy(), rtol=1e-5, atol=1e-7)


def test_lists_have_the_softmax_cross_entropy_of_pytorch():
    """The second list has one negative document, the third has two, the first has three."""
    torch = pytest.importorskip("torch", reason="the reference environment has PyTorch")
    scores = np.random.default_rng(0).normal(size=(3, 4))
    labels = np.array([[1, 0, 0, 0], [1, 0, -1, -1], [1, 0, 0, -1]])
    losses, gradient = loss_and_gradient(labels, scores)
    for i, count in enumerate((4, 2, 3)):
        x = torch.tensor(scores[i, :count], requires_grad=True)
        loss = torch.nn.functional.cross_entropy(x[None], torch.tensor([0]))
        loss.backward()
        assert losses[i] == pytest.approx(loss.item(), rel=1e-5)
        expected = np.pad(x.grad.numpy(), (0, 4 - count))
        np.testing.assert_allclose(gradient[i], expected, rtol=1e-5, atol=1e-6)


def test_rows_have_one_pair_of_texts_for_each_document(place):
    rows = [
        {"query": "one?", "positive": "one", "negative": "two", "negatives": ["six", "ten"]},
        {"query": "two?", "positive": "two", "negative": "one"},
    ]
    task = read_task(place, rows)
    task.make_network()
    records = task.records["train"]
    np.testing.assert_array_equal(records.targets, [[1, 0, 0, 0], [1, 0, -1, -1]])
    inputs, target, weight = task.build_row(records, [1], 24)
    assert {name: x.shape for name, x in inputs.items()} == dict.fromkeys(inputs, (4, 24))
    assert inputs["token_types"].shape == (4, 24) and weight == 1
    assert target.tolist() == [1, 0, -1, -1]
    texts = [task.tokenizer.decode_all(x[x != records.pad_id].tolist()) for x in inputs["tokens"]]
    assert "two?two" in texts[0].replace(" ", "") and "two?one" in texts[1].replace(" ", "")
    assert inputs["attention_mask"].sum(1).tolist()[2:] == [0, 0]


@pytest.mark.parametrize(
    "record, expected_message",
    [
        ({"query": "a", "document": "b"}, "`label` must be a finite number"),
        ({"query": "a", "document": "b", "label": 2}, "`label` between 0 and 1, got 2"),
        ({"query": "a", "document": "b", "label": 1, "negative": "c"}, "and no negatives"),
        ({"query": "a", "positive": "b", "negative": "c"}, "Use one kind only"),
        ({"document": "b", "label": 1}, "`query` is missing"),
        ({"query": "a", "label": 1}, "`document` is missing"),
    ],
)
def test_wrong_records_raise_an_error(record, expected_message, place):
    with pytest.raises(InputError, match=expected_message):
        read_task(place, [{"query": "q", "document": "d", "label": 0}, record])


def test_lists_without_negatives_raise_an_error(place):
    with pytest.raises(InputError, match="no document to compare with. Add `negative`"):
        read_task(place, [{"query": "a", "positive": "b"}])


def test_unused_options_raise_an_error(place):
    path = write_config("ranking", place)
    for setting in ("data.labels=[a,b]", "training.temperature=1"):
        with pytest.raises(InputError, match=setting.partition("=")[0]):
            check_read(load_config(path, [setting]))


def test_labeled_documents_are_ranked_by_query(place):
    """The last query has no relevant document and does not count. Two records have equal queries."""
    rows = [
        {"query": "a?", "document": "one", "label": 1},
        {"query": "b?", "document": "two", "label": 0},
        {"query": "a?", "document": "two two two", "label": 0},
        {"query": "b?", "document": "one one", "label": 1.0},
        {"query": "a?", "document": "six", "label": 0},
        {"query": "c?", "document": "six", "label": 0},
    ]
    task = read_task(place, rows, "data.length=10")
    task.make_network()
    trainer = make_trainer(task, 1)
    logits = task.predictions(trainer, "dev")[:, 0]
    ranks = [
        1 + sum(logits[i] >= logits[positive] for i in others)
        for positive, others in ((0, (2, 4)), (3, (1,)))
    ]
    result = task.score_dev(trainer)
    assert result["mrr@10"] == pytest.approx(np.mean([1 / rank for rank in ranks]))
    assert result["ndcg@10"] == pytest.approx(np.mean([1 / np.log2(1 + rank) for rank in ranks]))


def test_predictions_of_lists_have_a_score_for_each_document(place, capsys):
    path = write_config("ranking", place)
    assert main(["train", "--config", str(path), "--set", "training.max_steps=1"]) == 0
    capsys.readouterr()
    assert main(["predict", "--run", "runs/ranking", "--data", "lists.jsonl"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [len(line) for line in lines] == [4, 4, 4, 4, 4, 3, 2, 2]
    assert all(0 < float(score) < 1 for line in lines for score in line)


def test_training_on_labels_learns_and_predicts_probabilities(place, capsys):
    path = write_config("ranking", place)
    files = ["data.train=documents.jsonl", "data.dev=documents.jsonl"]
    options = ["training.learning_rate=0.01", "training.optimizer=adamw", "training.epochs=3"]
    assert main(["train", "--config", str(path), "--set", *files, *options]) == 0
    lines = (place / "runs/ranking/metrics.jsonl").read_text().splitlines()
    epochs = [x for x in map(json.loads, lines) if x["kind"] == "epoch"]
    assert epochs[-1]["val_loss"] < epochs[0]["val_loss"]
    assert 0 < epochs[-1]["val_mrr@10"] <= 1
    capsys.readouterr()
    command = ["predict", "--run", "runs/ranking", "--data", "documents.jsonl"]
    assert main(command) == 0
    scores = np.array([float(x) for x in capsys.readouterr().out.splitlines()])
    task = load_run("runs/ranking")
    task.read("dev")
    logits = task.predictions(make_trainer(task, 1), "dev")[:, 0]
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-logits)), rtol=1e-4)
