"""Texts are compared with all different texts of a batch, on ranks and on meshes."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.errors import InputError
from harness.tolerances import PARITY_LOSS
from tests.on_mesh import on_mesh, start
from tests.runs.small_records import write, write_config
from tests.shared_runs import on_ranks

# Ids of queries and positives: rows 0 and 1 share their positive, rows 0 and 3 their query, the
# positive of row 5 is the query of row 4, and row 6 is padding.
TEXT_IDS = np.array([[1, 2], [3, 2], [4, 5], [1, 6], [7, 8], [9, 7], [0, 0], [10, 11]], "float32")
WEIGHT = (TEXT_IDS[:, 1] > 0).astype("float32")
TEMPERATURE = 0.05


# Text ids of two negative texts per query. The negatives of row 2 are its positive and missing, and
# a negative of row 5 is the query of row 4.
NEGATIVE_IDS = np.array(
    [[3, 9], [11, 0], [5, 0], [2, 5], [1, 1], [7, 4], [0, 0], [0, 0]], "float32"
)


def embedding_trainer(dimensions=()):
    from dtransformer.layers.heads import PoolingHead
    from dtransformer.models import MaskedLM
    from dtransformer.models.one_stack import with_task_head
    from dtransformer.models.pairs import GroupModel
    from dtransformer.runs.tasks.embedding import InBatchLoss
    from dtransformer.trainers import Trainer

    keras.utils.set_random_seed(0)
    core = MaskedLM(30, hidden_size=16, num_heads=2, num_layers=1, dropout_rate=0.0)
    core.build()
    trainer = Trainer(GroupModel(with_task_head(core, PoolingHead("mean"))))
    trainer.compile(keras.optimizers.SGD(0.1), InBatchLoss(TEMPERATURE, dimensions))
    return trainer


def inputs(ids=TEXT_IDS):
    """Return token ids of the texts of each row. Texts with equal ids are equal."""
    texts = np.random.default_rng(0).integers(4, 30, (12, 6), "int32")
    tokens = texts[ids.astype(int)]
    return {"tokens": tokens, "attention_mask": np.ones_like(tokens)}


def losses():
    """Return the losses of two steps."""
    trainer = embedding_trainer()
    batch = inputs(), TEXT_IDS, WEIGHT
    return [float(trainer.train_on_batch(*batch, return_dict=True)["step_loss"]) for _ in range(2)]


def expected_loss(vectors, ids=TEXT_IDS):
    """Return the mean loss of the queries in PyTorch, with equal texts left out one by one."""
    import torch

    vectors = torch.nn.functional.normalize(vectors, dim=-1)
    losses = []
    for i, (query, positive, *_) in enumerate(ids):
        if not WEIGHT[i]:
            continue
        scores = [vectors[i, 0] @ vectors[i, 1]]
        for j, (other_query, *texts) in enumerate(ids):
            for side, text in enumerate(texts, start=1):
                is_equal = text in (query, positive) or (side == 1 and other_query == query)
                if text and not is_equal:
                    scores.append(vectors[i, 0] @ vectors[j, side])
        scores = torch.stack(scores)[None] / TEMPERATURE
        losses.append(torch.nn.functional.cross_entropy(scores, torch.tensor([0])))
    return torch.stack(losses).mean()


def check_evaluated_loss(ids=TEXT_IDS, dimensions=()):
    torch = pytest.importorskip("torch", reason="the reference environment has PyTorch")
    trainer = embedding_trainer(dimensions)
    result = trainer.evaluate(
        inputs(ids), ids, batch_size=8, sample_weight=WEIGHT, verbose=0, return_dict=True
    )
    vectors = torch.tensor(np.float64(trainer.predict(inputs(ids), batch_size=8, verbose=0)))
    expected = sum(expected_loss(vectors[..., :size], ids) for size in dimensions or [None])
    assert result["loss"] == pytest.approx(expected.item(), rel=PARITY_LOSS)


WITH_NEGATIVES = np.concatenate([TEXT_IDS, NEGATIVE_IDS], 1)


def test_equal_texts_of_a_batch_are_not_negatives():
    check_evaluated_loss()


def test_negative_texts_of_all_records_count():
    check_evaluated_loss(WITH_NEGATIVES)


def test_losses_of_the_first_features_are_summed():
    check_evaluated_loss(WITH_NEGATIVES, dimensions=(4, 16))


@on_ranks("dp2@2x1")
def test_texts_on_other_ranks_are_negatives_unless_equal():
    check_evaluated_loss()
    check_evaluated_loss(WITH_NEGATIVES, dimensions=(4, 16))


def test_gradients_match_pytorch():
    torch = pytest.importorskip("torch", reason="the reference environment has PyTorch")
    from dtransformer.runs.tasks.embedding import InBatchLoss

    vectors = np.random.default_rng(0).normal(size=(8, 4, 6)).astype("float32")
    x = tf.constant(vectors)
    with tf.GradientTape() as tape:
        tape.watch(x)
        losses = InBatchLoss(TEMPERATURE, (3, 6)).call(tf.constant(WITH_NEGATIVES), x)
        loss = tf.reduce_sum(losses * WEIGHT) / WEIGHT.sum()
    y = torch.tensor(np.float64(vectors), requires_grad=True)
    expected = sum(expected_loss(y[..., :size], WITH_NEGATIVES) for size in (3, 6))
    expected.backward()
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(tape.gradient(loss, x), y.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_two_queries_with_the_same_positive_have_no_loss():
    from dtransformer.runs.tasks.embedding import InBatchLoss

    vectors = np.random.default_rng(0).normal(size=(2, 2, 4)).astype("float32")
    vectors[1, 1] = vectors[0, 1]
    equal = np.array([[1, 2], [3, 2]], "float32")
    np.testing.assert_allclose(InBatchLoss().call(equal, vectors), 0)
    different = np.array([[1, 2], [3, 4]], "float32")
    np.testing.assert_allclose(InBatchLoss().call(different, vectors), np.log(2), rtol=1e-6)


def test_records_with_equal_texts_get_equal_ids_and_are_counted(tmp_path, monkeypatch):
    from dtransformer.runs.config import load_config
    from dtransformer.runs.tasks import make_task

    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    rows = [("one?", "one"), ("1?", "one"), ("two?", "two"), ("one", "1?")]
    text = "\n".join(json.dumps({"query": query, "positive": text}) for query, text in rows)
    (tmp_path / "repeated.jsonl").write_text(text)
    task = make_task(
        load_config(write_config("embedding", tmp_path), ["data.train=repeated.jsonl"])
    )
    with pytest.warns(UserWarning, match=r"Records \(train\): 3 of 8 texts repeat another text"):
        task.read("train")
    ids = task.records["train"].targets
    a, b, c, d, e = ids[0, 0], ids[0, 1], ids[1, 0], ids[2, 0], ids[2, 1]
    np.testing.assert_array_equal(ids, [[a, b], [c, b], [d, e], [b, c]])
    assert len({a, b, c, d, e}) == 5 and min(a, b, c, d, e) > 0


@on_mesh
def test_losses_on_a_mesh_match_one_device():
    expected = losses()
    start(model_parallel=2)
    np.testing.assert_allclose(losses(), expected, rtol=PARITY_LOSS)


def make_embedding_task(folder, rows, *settings):
    from dtransformer.runs.config import load_config
    from dtransformer.runs.tasks import make_task

    write(folder)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return make_task(
        load_config(write_config("embedding", folder), ["data.train=rows.jsonl", *settings])
    )


def test_records_have_different_numbers_of_negatives(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [
        {"query": "one?", "positive": "one"},
        {"query": "two?", "positive": "two", "negative": "one"},
        {"query": "six?", "positive": "six", "negative": "two", "negatives": ["zero", "one"]},
    ]
    task = make_embedding_task(tmp_path, rows)
    with pytest.warns(UserWarning, match=r"Records \(train\): 3 of 10 texts repeat"):
        task.read("train")
    records = task.records["train"]
    assert records.num_sequences == 5
    assert (records.targets > 0).sum(1).tolist() == [2, 3, 5]
    id_of_one, id_of_two = records.targets[0, 1], records.targets[1, 1]
    assert records.targets[1, 2] == records.targets[2, 4] == id_of_one
    assert records.targets[2, 2] == id_of_two


@pytest.mark.parametrize(
    "negatives, message",
    [("one", "must be a list of texts, got 'one'"), (["one", 2], "must be a text, got 2")],
)
def test_wrong_negatives_raise_an_error(negatives, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"query": "one?", "positive": "one", "negatives": negatives}]
    with pytest.raises(InputError, match=message):
        make_embedding_task(tmp_path, rows).read("train")


def test_more_matryoshka_features_than_the_network_has_raise_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"query": f"{word}?", "positive": word} for word in ("one", "two", "six", "ten")]
    task = make_embedding_task(tmp_path, rows, "training.matryoshka=[8,64]")
    task.read("train")
    task.make_network()
    with pytest.raises(InputError, match=r"at most 16, .* got \[8, 64\]"):
        task.loss()
