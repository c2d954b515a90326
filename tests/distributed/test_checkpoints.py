"""Promise: a checkpoint fits every layout, and a run that goes on from it loses nothing."""

import itertools
import shutil

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.errors import InputError
from dtransformer.trainers.checkpoint import Checkpoint
from harness.layouts import layout_of
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
    checkpoint_of,
    replicated,
)
from tests.shared_runs import each, needs_horovod


def run(task, layout):
    return f"tests.distributed.tasks.checkpoints:{task}/{layout}"


def saving(name):
    """Return the run of a layout that saves."""
    return run("save_and_restore", name)


SAVED = [saving(name) for name in CHAIN]
pytestmark = [needs_horovod, pytest.mark.runs(*map(saving, QUICK))]


def of_layout(name):
    """Return the marks of what reads a layout's checkpoint."""
    return [] if name in QUICK else [pytest.mark.long, pytest.mark.runs(*SAVED)]


def pair(saved, restored):
    """One layout restores what another one has saved: of 100 pairs, 5 are in the quick suite."""
    is_near = saved in RESTORED[restored]
    is_quick = is_near and {saved, restored} <= set(QUICK)
    marks = [] if is_quick else [pytest.mark.long, pytest.mark.runs(*SAVED)]
    if not is_near and restored != ALONE:
        marks.append(pytest.mark.runs(run("restore_the_others", restored)))
    return pytest.param(saved, restored, marks=marks)


each_pair = pytest.mark.parametrize(
    ["saved", "restored"], [pair(*names) for names in itertools.product(CHAIN, CHAIN)]
)
each_layout = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=of_layout(name)) for name in CHAIN]
)


@pytest.fixture(scope="module")
def folder(ranks_of):
    """The folder of all checkpoints."""
    for name in SAVED:
        if name in ranks_of:
            ranks_of(name)
    return ranks_of.folder


@pytest.fixture(scope="module")
def losses_of(folder, ranks_of):
    """A function of two layouts: the losses of one that goes on from the other's checkpoint."""
    found = {}

    def losses(saved, restored):
        if restored != ALONE:
            task = "save_and_restore" if saved in RESTORED[restored] else "restore_the_others"
            return ranks_of(run(task, restored))[0]["restored"][saved]
        if saved not in found:
            trainer = checkpoints.new_trainer(seed=OTHER_SEED)
            is_quick = saved in RESTORED[ALONE]
            for name in CHAIN:
                if (name in RESTORED[ALONE]) == is_quick:
                    found[name] = checkpoints.restore(trainer, folder, name, ALONE)
        return found[saved]

    return losses


def tensors_of(path):
    reader = tf.train.load_checkpoint(str(path))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def state_of(path):
    """All tensors that do not count the epoch's losses."""
    return {name: x for name, x in tensors_of(path).items() if not name.startswith("metrics/")}


@each_pair
def test_a_restored_state_is_the_saved_one_to_the_last_bit(saved, restored, folder, losses_of):
    losses_of(saved, restored)  # it has been saved again
    expected = state_of(checkpoint_of(folder, saved))
    found = state_of(checkpoint_of(folder, saved, restored))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@each_pair
def test_losses_after_it_are_those_of_the_uninterrupted_run(saved, restored, ranks_of, losses_of):
    expected = ranks_of(run("save_and_restore", saved))[0]["after"]
    np.testing.assert_allclose(losses_of(saved, restored), expected, rtol=PARITY_LOSS)


SUMS = [run("sums_over_rows", name) for name in (ALONE, "dp2@2x1+whole1", "dp2mp2@2x2+rows+whole1")]


@each(SUMS[1:], SUMS[1:], lambda job: SUMS[:1])
def test_sums_over_rows_are_those_of_one_process(run, ranks_of):
    (alone,), (job, *_) = ranks_of(SUMS[0]), ranks_of(run)
    path = ranks_of.folder / f"adafactor-{Run.of(run).layout.name}"
    in_one_process = checkpoints.continued(checkpoints.new_trainer("adafactor"), path)
    for found in (job["after"], job["restored"], in_one_process):
        np.testing.assert_allclose(found, alone["after"], rtol=PARITY_LOSS)
    expected = state_of(ranks_of.folder / f"adafactor-{ALONE}")
    assert {n: x.shape for n, x in state_of(path).items()} == {
        n: x.shape for n, x in expected.items()
    }


@each_layout
def test_names_and_shapes_do_not_depend_on_the_layout(name, folder):
    expected = state_of(checkpoint_of(folder, ALONE))
    found = state_of(checkpoint_of(folder, name))
    assert {n: x.shape for n, x in found.items()} == {n: x.shape for n, x in expected.items()}
    assert found["network/source_embedding/table"].shape == (61, 32), "without padding"
    assert "optimizer/velocities/source_embedding/table" in found


@each_layout
def test_each_byte_is_written_once(name, folder):
    path = checkpoint_of(folder, name)
    written = sum(file.stat().st_size for file in path.glob("state.data-*"))
    assert written == sum(value.nbytes for value in tensors_of(path).values())
    sizes = [file.stat().st_size for file in path.glob("state.data-*")]
    assert len(sizes) == layout_of(name).ranks
    if layout_of(name).stages == 1:
        assert max(sizes) <= 1.1 * written / len(sizes), "ranks write about as much"


@pytest.mark.parametrize("name", [pytest.param(name, marks=of_layout(name)) for name in REPLICATED])
def test_a_lost_file_is_replaced_by_its_replica(name, folder, capsys):
    path = replicated(folder, name)
    expected = tensors_of(path)
    copies = sorted(path.glob("replicas/state.data-*"))
    assert len(copies) == 2, "what both ranks hold"
    for number, copy in enumerate(copies):
        file, manifest = path / copy.name, Checkpoint(path).manifest["files"]
        assert manifest[copy.name]["crc32"] == manifest[f"replicas/{copy.name}"]["crc32"]
        ranks = [manifest[name]["rank"] for name in (copy.name, f"replicas/{copy.name}")]
        assert sorted(ranks) == [0, 1], "written by two ranks"
        file.unlink() if number else file.write_bytes(b"damaged")
    checkpoints.new_trainer(seed=OTHER_SEED).restore(path)
    assert capsys.readouterr().out.count("replaced by its replica") == 2
    found = tensors_of(path)
    for tensor, value in expected.items():
        np.testing.assert_array_equal(found[tensor], value, err_msg=tensor)


def test_what_one_rank_alone_holds_cannot_be_replaced(folder, tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(replicated(folder, "dp2@2x1+shard1"), path)
    files = sorted(path.glob("state.data-*"))
    assert len(files) == 4
    alone = [file for file in files if not (path / "replicas" / file.name).exists()]
    alone[0].unlink()
    with pytest.raises(InputError, match=f"{alone[0].name} is missing"):
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
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(name, ranks_of):
    results = ranks_of(run("resume", name))[0]
    uninterrupted, resumed = results["uninterrupted"], results["resumed"]
    assert len(uninterrupted["losses"]) == 10 and len(resumed["losses"]) == 7
    assert resumed["losses"] == uninterrupted["losses"][3:]
    assert resumed["history"] == uninterrupted["history"], (
        "the first epoch's means count all its steps"
    )
