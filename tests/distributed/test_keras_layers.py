"""Networks of Keras' and KerasHub's layers train on meshes with the losses of Keras' `fit`.

The weights of the Transformers are sharded: at two model shards each device has about half.
"""

import importlib.util

import numpy as np
import pytest

from harness.keras_networks import HUB_NETWORKS, KERAS_NETWORKS
from harness.runs import Run
from harness.tolerances import PARITY_LOSS
from tests.distributed.tasks.keras_layers import QUICK_STEPS, STEPS
from tests.shared_runs import parametrize_runs

TASKS = "tests.distributed.tasks.keras_layers:"
LAYOUTS = """
    mp2@1x2  mp4@1x4  dp2mp2@1x4  dp2mp2@1x4+shard3  mp2@1x2+rows
    mp2@2x1  dp2mp2@2x2+shard1  mp2pp2m2-1f1b@2x2
""".split()
IN_PIPELINES = ("gpt", "vit")
QUICK_RUNS = [f"{TASKS}gpt_quick/{layout}" for layout in ("mp2@1x2", "dp2mp2@1x4+shard3")]


def list_runs(networks):
    """Return the runs of networks under all layouts that they support."""
    return [
        f"{TASKS}{network}/{layout}"
        for network in networks
        for layout in LAYOUTS
        if ("pp2" not in layout or network in IN_PIPELINES)
        # Data shards would compute different means in the ResNet's BatchNormalization.
        and not (network == "resnet" and "dp2" in layout)
        # DTensor cannot group the heads of 4 shards into Gemma's 2 key and value heads.
        and not (network == "gemma" and "mp4" in layout)
    ]


KERAS_RUNS = list_runs(KERAS_NETWORKS)
HUB_RUNS = list_runs(HUB_NETWORKS)
needs_keras_hub = pytest.mark.skipif(
    importlib.util.find_spec("keras_hub") is None,
    reason="KerasHub is not installed: pip install keras-hub",
)


def one_process(run):
    return f"{run.split('/')[0]}/alone@1x1"


def check_run(run, rank_results, steps):
    (expected,) = rank_results(one_process(run))
    assert len(set(expected["losses"])) == steps
    for rank in rank_results(run):
        np.testing.assert_allclose(rank["losses"], expected["losses"], rtol=PARITY_LOSS)
        np.testing.assert_allclose(rank["accuracies"], expected["accuracies"], rtol=PARITY_LOSS)
        np.testing.assert_allclose(rank["evaluation"], expected["evaluation"], rtol=PARITY_LOSS)
        np.testing.assert_allclose(rank["outputs"], expected["outputs"], atol=PARITY_LOSS)
        layout = Run.from_name(run).layout
        if layout.model == 2 and layout.stages == 1 and "resnet" not in run:
            # BERT's tables of positions and token types are replicated.
            max_share = 0.57 if ":bert/" in run else 0.55
            assert rank["bytes_per_device"] <= max_share * expected["bytes"]


@parametrize_runs(QUICK_RUNS, reads=lambda run: [one_process(run)])
def test_five_steps_match_keras(run, rank_results):
    check_run(run, rank_results, QUICK_STEPS)


@parametrize_runs(KERAS_RUNS, KERAS_RUNS, lambda run: [one_process(run)])
def test_twenty_steps_match_keras(run, rank_results):
    check_run(run, rank_results, STEPS)


@needs_keras_hub
@parametrize_runs(HUB_RUNS, HUB_RUNS, lambda run: [one_process(run)])
def test_twenty_steps_of_keras_hub_match_keras(run, rank_results):
    check_run(run, rank_results, STEPS)
