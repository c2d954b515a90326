"""Texts are compared with all different texts of a batch, on ranks and on meshes."""

import json

import keras
import numpy as np
import pytest

from harness.tolerances import PARITY_LOSS
from tests.on_mesh import on_mesh, start
from tests.runs.small_records import write, write_config
from tests.shared_runs import on_ranks

# Ids of queries and positives: rows 0 and 1 share their positive, rows 0 and 3 their query, the
# positive of row 5 is the query of row 4, and row 6 is padding.
TEXT_IDS = np.array([[1, 2], [3, 2], [4, 5], [1, 6], [7, 8], [9, 7], [0, 0], [10, 11]], "float32")
WEIGHT = (TEXT_IDS[:, 1] > 0).astype("float32")
TEMPERATURE = 0.05


def embedding_trainer():
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
    trainer.compile(keras.optimizers.SGD(0.1), InBatchLoss(TEMPERATURE))
    return trainer


def inputs():
    """Return token ids of pairs of texts. Texts with equal ids are equal."""
    texts = np.random.default_rng(0).integers(4, 30, (12, 6), "int32")
    tokens = texts[TEXT_IDS.astype(int)]
    return {"tokens": tokens, "attention_mask": np.ones_like(tokens)}


def losses():
    """Return the losses of two steps."""
    trainer = embedding_trainer()
    batch = inputs(), TEXT_IDS, WEIGHT
    return [float(trainer.train_on_batch(*batch, return_dict=True)["step_loss"]) for _ in range(2)]


def expected_loss(vectors):
    """Return the mean loss of the queries in NumPy, with equal texts left out one by one."""
    vectors = np.float64(vectors)
    vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
    result = []
    for i, (query, positive) in enumerate(TEXT_IDS):
        if not WEIGHT[i]:
            continue
        scores = [vectors[i, 0] @ vectors[i, 1]]
        for j, (other_query, other) in enumerate(TEXT_IDS):
            is_equal = other in (query, positive) or other_query == query
            if j != i and WEIGHT[j] and not is_equal:
                scores.append(vectors[i, 0] @ vectors[j, 1])
        scores = np.array(scores) / TEMPERATURE
        result.append(np.logaddexp.reduce(scores) - scores[0])
    return np.mean(result)


def check_evaluated_loss():
    trainer = embedding_trainer()
    result = trainer.evaluate(
        inputs(), TEXT_IDS, batch_size=8, sample_weight=WEIGHT, verbose=0, return_dict=True
    )
    vectors = trainer.predict(inputs(), batch_size=8, verbose=0)
    assert result["loss"] == pytest.approx(expected_loss(vectors), rel=PARITY_LOSS)


def test_equal_texts_of_a_batch_are_not_negatives():
    check_evaluated_loss()


@on_ranks("dp2@2x1")
def test_equal_texts_on_other_ranks_are_not_negatives():
    check_evaluated_loss()


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
