"""A custom Keras model trains on every layout with the losses of Keras' `fit`."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from harness.runs import Run
from harness.tolerances import PARITY_LOSS
from tests.distributed.tasks import own_models
from tests.distributed.tasks.own_models import STEPS
from tests.shared_runs import parametrize_runs

TASKS = "tests.distributed.tasks.own_models:"
LAYOUTS = """
    dp2@2x1  mp2@2x1  pp2m2-1f1b@2x1  dp2mp2@2x2  dp2@2x1+shard1  dp2@2x1+shard2  dp2@2x1+shard3
""".split()
RUNS = [f"{TASKS}{model}/{layout}" for model in own_models.TASKS for layout in LAYOUTS]
PIPELINES = [run for run in RUNS if "pp2" in run]


def one_process(run):
    return f"{run.split('/')[0]}/alone@1x1"


@parametrize_runs(RUNS, RUNS, lambda run: [one_process(run)])
def test_losses_weights_and_predictions_match_keras(run, rank_results):
    (expected,) = rank_results(one_process(run))
    assert len(set(expected["losses"])) == STEPS
    for rank in rank_results(run):
        assert rank["parameters"] == expected["parameters"]
        np.testing.assert_allclose(rank["losses"], expected["losses"], rtol=PARITY_LOSS)
        for name, value in expected["evaluation"].items():
            assert rank["evaluation"][name] == pytest.approx(value, rel=PARITY_LOSS), name
        for name in (name for name in expected if "/" in name):
            np.testing.assert_allclose(rank[name], expected[name], atol=PARITY_LOSS)


@parametrize_runs(RUNS, RUNS, lambda run: [one_process(run)])
def test_saved_model_is_loaded_in_one_process(run, rank_results):
    rank_results(run)
    name, layout = Run.from_name(run).task.removeprefix(TASKS), Run.from_name(run).layout
    classes = own_models.Tagger, own_models.VisionTransformer, own_models.Block
    custom_objects = {cls.__name__: cls for cls in classes}
    model = keras.saving.load_model(
        own_models.model_path(rank_results.folder, name, layout), custom_objects
    )
    outputs = keras.tree.flatten(model.predict(own_models.INPUTS[name], verbose=0))
    (expected,) = rank_results(one_process(run))
    for i, output in enumerate(outputs):
        np.testing.assert_allclose(output, expected[f"outputs/{i}"], atol=PARITY_LOSS)


@parametrize_runs(RUNS, RUNS, lambda run: [one_process(run)])
def test_exported_model_is_served(run, rank_results):
    rank_results(run)
    name, layout = Run.from_name(run).task.removeprefix(TASKS), Run.from_name(run).layout
    served = tf.saved_model.load(
        own_models.model_path(rank_results.folder, name, layout).with_suffix("")
    )
    outputs = keras.tree.flatten(served.serve(own_models.INPUTS[name]))
    (expected,) = rank_results(one_process(run))
    for i, output in enumerate(outputs):
        np.testing.assert_allclose(output, expected[f"outputs/{i}"], atol=PARITY_LOSS)


@parametrize_runs(PIPELINES, PIPELINES, lambda run: [one_process(run)])
def test_each_stage_has_some_of_the_weights(run, rank_results):
    (expected,), ranks = rank_results(one_process(run)), rank_results(run)
    assert sum(rank["num_weights"] for rank in ranks) == expected["num_weights"]
    assert min(rank["num_weights"] for rank in ranks) > 0
