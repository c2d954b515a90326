"""A checkpoint restores on every layout, and a resumed run continues exactly."""

import itertools
import shutil

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.errors import InputError
from dtransformer.trainers.checkpoint import Checkpoint
from harness.layouts import parse_layout
from harness.runs import Run
from harness.tolerances import PARITY_LOSS
from tests.distributed.tasks import checkpoints
from tests.distributed.tasks.checkpoints import (
    ALONE,
    CHAIN,
    OTHER_SEED,
    QUICK,
    REPLICATED,
    RESTORED,
    RESUMED,
    checkpoint_path,
    replicated,
)
from tests.shared_runs import needs_horovod, parametrize_runs


def run(task, layout):
    return f"tests.distributed.tasks.checkpoints:{task}/{layout}"


def saving_run(name):
    """Return the name of the run that saves a checkpoint on a layout."""
    return run("save_and_restore", name)


SAVED = [saving_run(name) for name in CHAIN]
pytestmark = [needs_horovod, pytest.mark.runs(*map(saving_run, QUICK))]


def marks_for_layout(name):
    """Return the pytest marks of a test that reads the checkpoint of a layout."""
    return [] if name in QUICK else [pytest.mark.long, pytest.mark.runs(*SAVED)]


def saved_restored_param(saved, restored):
    """One layout restores what another one has saved: of 121 pairs, 5 are in the quick suite."""
    is_near = saved in RESTORED[restored]
    is_quick = is_near and {saved, restored} <= set(QUICK)
    marks = [] if is_quick else [pytest.mark.long, pytest.mark.runs(*SAVED)]
    if not is_near and restored != ALONE:
        marks.append(pytest.mark.runs(run("restore_remaining", restored)))
    return pytest.param(saved, restored, marks=marks)


each_pair = pytest.mark.parametrize(
    ["saved", "restored"],
    [saved_restored_param(*names) for names in itertools.product(CHAIN, CHAIN)],
)
each_layout = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks_for_layout(name)) for name in CHAIN]
)


@pytest.fixture(scope="module")
def folder(rank_results):
    """Return the folder with the checkpoints of all layouts."""
    for name in SAVED:
        if name in rank_results:
            rank_results(name)
    return rank_results.folder


@pytest.fixture(scope="module")
def restored_losses(folder, rank_results):
    """Return a function of two layouts.

    It restores the first layout's checkpoint on the second layout, and returns the losses of the
    next steps.
    """
    losses_by_layout = {}

    def losses(saved, restored):
        if restored != ALONE:
            task = "save_and_restore" if saved in RESTORED[restored] else "restore_remaining"
            return rank_results(run(task, restored))[0]["restored"][saved]
        if saved not in losses_by_layout:
            trainer = checkpoints.new_trainer(seed=OTHER_SEED)
            is_quick = saved in RESTORED[ALONE]
            for name in CHAIN:
                if (name in RESTORED[ALONE]) == is_quick:
                    losses_by_layout[name] = checkpoints.restore(trainer, folder, name, ALONE)
        return losses_by_layout[saved]

    return losses


def load_tensors(path):
    reader = tf.train.load_checkpoint(str(path))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def load_state(path):
    """Return all tensors of a checkpoint except for the metrics of the epoch."""
    return {name: x for name, x in load_tensors(path).items() if not name.startswith("metrics/")}


@each_pair
def test_restored_state_equals_the_saved_state_bit_for_bit(
    saved, restored, folder, restored_losses
):
    restored_losses(saved, restored)  # This saves the restored state again.
    expected = load_state(checkpoint_path(folder, saved))
    actual = load_state(checkpoint_path(folder, saved, restored))
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


@each_pair
def test_losses_after_restoring_match_the_uninterrupted_run(
    saved, restored, rank_results, restored_losses
):
    expected = rank_results(run("save_and_restore", saved))[0]["after"]
    np.testing.assert_allclose(restored_losses(saved, restored), expected, rtol=PARITY_LOSS)


SUMS = [run("sums_over_rows", name) for name in (ALONE, "dp2@2x1+whole1", "dp2mp2@2x2+rows+whole1")]


@parametrize_runs(SUMS[1:], SUMS[1:], lambda job: SUMS[:1])
def test_adafactor_row_sums_match_one_process(run, rank_results):
    (alone,), (job, *_) = rank_results(SUMS[0]), rank_results(run)
    path = rank_results.folder / f"adafactor-{Run.from_name(run).layout.name}"
    one_process_losses = checkpoints.continued(checkpoints.new_trainer("adafactor"), path)
    for losses in (job["after"], job["restored"], one_process_losses):
        np.testing.assert_allclose(losses, alone["after"], rtol=PARITY_LOSS)
    expected = load_state(rank_results.folder / f"adafactor-{ALONE}")
    assert {n: x.shape for n, x in load_state(path).items()} == {
        n: x.shape for n, x in expected.items()
    }


@each_layout
def test_tensor_names_and_shapes_do_not_depend_on_the_layout(name, folder):
    expected = load_state(checkpoint_path(folder, ALONE))
    actual = load_state(checkpoint_path(folder, name))
    assert {n: x.shape for n, x in actual.items()} == {n: x.shape for n, x in expected.items()}
    assert actual["network/source_embedding/table"].shape == (61, 32), "without padding"
    assert "optimizer/velocities/source_embedding/table" in actual


@each_layout
def test_each_byte_is_written_once(name, folder):
    path = checkpoint_path(folder, name)
    written = sum(file.stat().st_size for file in path.glob("state.data-*"))
    assert written == sum(value.nbytes for value in load_tensors(path).values())
    sizes = [file.stat().st_size for file in path.glob("state.data-*")]
    assert len(sizes) == parse_layout(name).ranks
    if parse_layout(name).stages == 1:
        assert max(sizes) <= 1.1 * written / len(sizes), "ranks write about as much"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks_for_layout(name)) for name in REPLICATED]
)
def test_missing_or_damaged_file_is_replaced_by_its_replica(name, folder, capsys):
    path = replicated(folder, name)
    expected = load_tensors(path)
    copies = sorted(path.glob("replicas/state.data-*"))
    assert len(copies) == 2, "what both ranks hold"
    for i, copy in enumerate(copies):
        file, manifest = path / copy.name, Checkpoint(path).manifest["files"]
        assert manifest[copy.name]["crc32"] == manifest[f"replicas/{copy.name}"]["crc32"]
        ranks = [manifest[name]["rank"] for name in (copy.name, f"replicas/{copy.name}")]
        assert sorted(ranks) == [0, 1], "written by two ranks"
        file.unlink() if i else file.write_bytes(b"damaged")
    checkpoints.new_trainer(seed=OTHER_SEED).restore(path)
    assert capsys.readouterr().out.count("Replaced a damaged file by its replica") == 2
    actual = load_tensors(path)
    for tensor, value in expected.items():
        np.testing.assert_array_equal(actual[tensor], value, err_msg=tensor)


def test_missing_file_without_a_replica_raises_an_error(folder, tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(replicated(folder, "dp2@2x1+shard1"), path)
    files = sorted(path.glob("state.data-*"))
    assert len(files) == 4
    without_replica = [file for file in files if not (path / "replicas" / file.name).exists()]
    without_replica[0].unlink()
    with pytest.raises(InputError, match=f"{without_replica[0].name} is missing"):
        checkpoints.new_trainer().restore(path)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[
                pytest.mark.runs(run("resume", name)),
                pytest.mark.long,
            ],
        )
        for name in RESUMED
    ],
)
def test_resumed_losses_equal_uninterrupted_losses_bit_for_bit(name, rank_results):
    results = rank_results(run("resume", name))[0]
    uninterrupted, resumed = results["uninterrupted"], results["resumed"]
    assert len(uninterrupted["losses"]) == 10 and len(resumed["losses"]) == 7
    assert resumed["losses"] == uninterrupted["losses"][3:]
    assert resumed["history"] == uninterrupted["history"], (
        "the first epoch's means count all its steps"
    )
