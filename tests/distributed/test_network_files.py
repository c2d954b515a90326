"""Keras' save methods of a network write one complete file, as the trainer does."""

import pathlib

import keras
import numpy as np

from tests.distributed.tasks.network_files import make
from tests.shared_runs import parametrize_runs

TASK = "tests.distributed.tasks.network_files:saved"
LONG = [f"{TASK}/{layout}" for layout in ("pp2m2-1f1b@2x1", "mp2@2x1", "dp2@2x1")]
RUNS = [f"{TASK}/dp2@2x1+shard3", *LONG]


@parametrize_runs(RUNS, LONG)
def test_files_contain_all_weights(run, rank_results):
    first, *_ = rank_results(run)
    folder = pathlib.Path(first["folder"])
    expected, loaded = make(), make()
    expected.load_weights(folder / "trainer.weights.h5")
    loaded.load_weights(folder / "network.weights.h5")
    for network in (loaded, keras.models.load_model(folder / "network.keras")):
        for weight, expected_weight in zip(
            network.get_weights(), expected.get_weights(), strict=True
        ):
            np.testing.assert_array_equal(weight, expected_weight)
    assert (folder / "alone.weights.h5").exists() == run.endswith("dp2@2x1")


@parametrize_runs(RUNS, LONG)
def test_save_error_of_rank_0_is_raised_on_every_rank(run, rank_results):
    for rank in rank_results(run):
        assert "weights.h5" in rank["message"]
