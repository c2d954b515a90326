"""Adapters train, save, load, merge and generate with the same results on every layout."""

import numpy as np
from safetensors.numpy import load_file

from harness.runs import Run
from harness.tolerances import PARITY_LOGITS, PARITY_LOSS, PARITY_WEIGHTS
from tests.distributed.tasks.adapters import adapters_path
from tests.shared_runs import needs_horovod, parametrize_runs

TASK = "tests.distributed.tasks.adapters:train_and_use"
ALONE = f"{TASK}/alone@1x1"
LONG = [
    f"{TASK}/{name}"
    for name in (
        "dp2@2x1+shard3",
        "mp2pp2m2-1f1b@2x2+rows",
        "dp2mp2@2x2+rows",
        "mp2@2x1+sp",
        "dp2@2x1+shard1",
        "pp2m4-zb_h1@2x1",
    )
]
pytestmark = needs_horovod
each_run = parametrize_runs(LONG, LONG, lambda run: [ALONE])


def load_adapter_file(folder, run):
    return load_file(adapters_path(folder, Run.from_name(run).layout) / "adapter_model.safetensors")


@each_run
def test_training_and_prediction_match_one_process(run, rank_results):
    (expected,) = rank_results(ALONE)
    for rank in rank_results(run):
        np.testing.assert_allclose(rank["losses"], expected["losses"], rtol=PARITY_LOSS)
        np.testing.assert_allclose(rank["logits"], expected["logits"], rtol=0, atol=PARITY_LOGITS)
        np.testing.assert_array_equal(rank["generated"], expected["generated"])


@each_run
def test_layouts_resume_from_the_checkpoint_of_one_process(run, rank_results):
    (expected,) = rank_results(ALONE)
    for rank in rank_results(run):
        np.testing.assert_allclose(rank["restored"], expected["after"], rtol=PARITY_LOSS)


@parametrize_runs([ALONE, *LONG], [ALONE, *LONG], lambda run: [ALONE])
def test_resumed_run_equals_the_uninterrupted_run_bit_for_bit(run, rank_results):
    for rank in rank_results(run):
        assert rank["resumed"] == rank["after"]


@each_run
def test_adapter_files_do_not_depend_on_the_layout(run, rank_results):
    rank_results(run)
    actual, expected = (
        load_adapter_file(rank_results.folder, run),
        load_adapter_file(rank_results.folder, ALONE),
    )
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=0, atol=10 * PARITY_WEIGHTS)


@parametrize_runs([ALONE, *LONG], [ALONE, *LONG], lambda run: [ALONE])
def test_merged_kernels_give_the_outputs_of_adapters(run, rank_results):
    (expected,) = rank_results(ALONE)
    for rank in rank_results(run):
        np.testing.assert_array_equal(rank["generated_loaded"], expected["generated"])
        np.testing.assert_array_equal(rank["generated_merged"], expected["generated"])
        np.testing.assert_allclose(
            rank["logits_merged"], expected["logits"], rtol=0, atol=PARITY_LOGITS
        )
        assert not any("lora" in path for path in rank["paths_merged"])
        # All pipeline stages also write a single file.
        np.testing.assert_allclose(
            rank["published"], expected["published"], rtol=0, atol=PARITY_WEIGHTS
        )
