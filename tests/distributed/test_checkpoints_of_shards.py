"""A checkpoint of experts or sharded sequences restores on other numbers of shards."""

import numpy as np
import pytest

from harness.tolerances import PARITY_LOSS
from tests.distributed.tasks import other_shards
from tests.distributed.tasks.checkpoints import ALONE, checkpoint_path
from tests.distributed.tasks.other_shards import RESTORING, SAVING
from tests.distributed.test_checkpoints import load_state
from tests.shared_runs import needs_horovod

pytestmark = [needs_horovod, pytest.mark.long]


def run(task, layout):
    return f"tests.distributed.tasks.other_shards:{task}/{layout}"


def case(network, restoring):
    runs = [run("save", name) for name in SAVING[network]]
    runs += [run("restore_all", restoring)] * (restoring != ALONE)
    return pytest.param(network, restoring, marks=pytest.mark.runs(*runs))


@pytest.mark.parametrize(
    ["network", "restoring"],
    [case(network, name) for network in SAVING for name in (*RESTORING[network], ALONE)],
)
def test_states_and_losses_after_restoring_match_the_saving_run(network, restoring, rank_results):
    after = {saved: rank_results(run("save", saved))[0]["after"] for saved in SAVING[network]}
    if restoring == ALONE:
        losses = other_shards.restored(rank_results.folder, ALONE, network)
    else:
        losses = rank_results(run("restore_all", restoring))[0]["restored"]
    assert set(losses) == set(SAVING[network])
    for saved, expected in after.items():
        np.testing.assert_allclose(losses[saved], expected, rtol=PARITY_LOSS, err_msg=saved)
        states = load_state(checkpoint_path(rank_results.folder, saved))
        restored_states = load_state(checkpoint_path(rank_results.folder, saved, restoring))
        assert restored_states.keys() == states.keys()
        assert any(name.startswith("optimizer/velocities/") for name in states)
        for name, value in states.items():
            np.testing.assert_array_equal(restored_states[name], value, err_msg=name)
