"""KerasHub's tasks with tied tables train in pipelines with the losses of Keras' `fit`."""

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.trainers import Trainer
from harness.runs import Run
from harness.tolerances import PARITY_LOGITS, PARITY_LOSS
from tests.distributed.tasks import hub_tasks
from tests.shared_runs import parametrize_runs

pytest.importorskip("keras_hub", reason="the package keras-hub is not installed")
TASKS = "tests.distributed.tasks.hub_tasks:"
SCHEDULES = "pp2m2-1f1b@2x1", "pp2m4-1f1b@2x1", "pp2m4-gpipe@2x1", "pp2m4-interleaved2@2x1"
RUNS = [
    *[f"{TASKS}{kind}/{layout}" for kind in ("llama", "gemma", "gpt2") for layout in SCHEDULES],
    f"{TASKS}bert/pp2m2-1f1b@2x1",
    f"{TASKS}gemma/dp2pp2m2-1f1b@4x1",
]
LONG = [run for run in RUNS if run != f"{TASKS}gemma/pp2m2-1f1b@2x1"]


def one_process(run):
    return f"{run.split('/')[0]}/alone@1x1"


def parse_kind(run):
    return Run.from_name(run).task.removeprefix(TASKS)


@parametrize_runs(RUNS, LONG, lambda run: [one_process(run)])
def test_losses_and_accuracies_are_those_of_keras(run, rank_results):
    (expected,) = rank_results(one_process(run))
    assert len(set(expected["losses"])) == len(expected["losses"]) >= hub_tasks.SHORT_STEPS
    for rank in rank_results(run):
        np.testing.assert_allclose(rank["losses"], expected["losses"], rtol=PARITY_LOSS)
        np.testing.assert_allclose(rank["accuracies"], expected["accuracies"], rtol=PARITY_LOSS)
        np.testing.assert_allclose(rank["outputs"], expected["outputs"], rtol=0, atol=PARITY_LOGITS)
        assert rank["weights"] == expected["weights"]


@parametrize_runs(RUNS, LONG, lambda run: [one_process(run)])
def test_first_and_last_stage_have_the_table(run, rank_results):
    first, last = rank_results(run)[0]["stages"]
    assert sum("token_embedding" in name for name in first) == 1
    assert sum("token_embedding" in name or "masked_lm_head" in name for name in last) >= 1


@parametrize_runs(RUNS, LONG, lambda run: [one_process(run)])
def test_a_checkpoint_of_one_process_is_restored_in_the_pipeline(run, rank_results):
    (expected,) = rank_results(one_process(run))
    for rank in rank_results(run):
        np.testing.assert_allclose(rank["restored"], expected["outputs"], atol=PARITY_LOSS)


@parametrize_runs(RUNS, LONG, lambda run: [one_process(run)])
def test_a_checkpoint_of_the_pipeline_has_one_table_and_is_restored_in_one_process(
    run, rank_results
):
    ranks = rank_results(run)
    kind, layout = parse_kind(run), Run.from_name(run).layout
    path = hub_tasks.checkpoint_path(rank_results.folder, kind, layout.name)
    tables = [
        name
        for name, _ in tf.train.list_variables(str(path))
        if "token_embedding/embeddings" in name and "optimizer" not in name
    ]
    assert len(tables) == 1, tables
    trainer = Trainer(hub_tasks.make(kind))
    hub_tasks.compile_task(trainer)
    assert trainer.restore(path).missing == []
    outputs = trainer.predict(hub_tasks.make_inputs(kind), verbose=0)
    np.testing.assert_allclose(outputs, ranks[0]["outputs"], atol=PARITY_LOSS)
