"""Promise: a checkpoint fits every layout, and a run that goes on from it loses nothing."""

import itertools
import shutil

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.errors import InputError
from dtransformer.trainers.checkpoint import Checkpoint
from tests.distributed import checkpoints
from tests.distributed.checkpoints import (
    GRID,
    OTHER_SEED,
    REPLICATED,
    RESUMED,
    checkpoint_of,
    read,
    replicated,
)
from tests.distributed.launch import launch, needs_horovod
from tests.distributed.layouts import ALONE
from tests.tolerances import PARITY_LOSS

pytestmark = needs_horovod
each_pair = pytest.mark.parametrize(["saved", "restored"], list(itertools.product(GRID, GRID)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where all checkpoints and results are, one process' and two ranks'."""
    folder = tmp_path_factory.mktemp("checkpoints")
    checkpoints.save(folder, ALONE.name)
    for work in ("save", "restore"):
        code, output = launch(2, ["-m", "tests.distributed.checkpoints", work, folder], timeout=400)
        assert code == 0, output[-8000:]
    checkpoints.restore_all(folder, ALONE.name)
    checkpoints.resume(folder, RESUMED[0])
    return folder


def tensors_of(path):
    reader = tf.train.load_checkpoint(str(path))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def state_of(path):
    """All tensors that do not count the epoch's losses."""
    return {name: x for name, x in tensors_of(path).items() if not name.startswith("metrics/")}


@each_pair
def test_a_restored_state_is_the_saved_one_to_the_last_bit(saved, restored, folder):
    expected = state_of(checkpoint_of(folder, saved))
    found = state_of(checkpoint_of(folder, saved, restored))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@each_pair
def test_losses_after_it_are_those_of_the_uninterrupted_run(saved, restored, folder):
    found = read(folder, f"{restored}-restored")[saved]
    np.testing.assert_allclose(found, read(folder, f"{saved}-after"), rtol=PARITY_LOSS)


@pytest.mark.parametrize("name", GRID)
def test_names_and_shapes_do_not_depend_on_the_layout(name, folder):
    expected = state_of(checkpoint_of(folder, ALONE.name))
    found = state_of(checkpoint_of(folder, name))
    assert {n: x.shape for n, x in found.items()} == {n: x.shape for n, x in expected.items()}
    assert found["network/source_embedding/table"].shape == (61, 32), "without padding"
    assert "optimizer/velocities/source_embedding/table" in found


@pytest.mark.parametrize("name", GRID)
def test_each_byte_is_written_once(name, folder):
    path = checkpoint_of(folder, name)
    written = sum(file.stat().st_size for file in path.glob("state.data-*"))
    assert written == sum(value.nbytes for value in tensors_of(path).values())
    sizes = [file.stat().st_size for file in path.glob("state.data-*")]
    assert len(sizes) == GRID[name].ranks
    if GRID[name].stages == 1:
        assert max(sizes) <= 1.1 * written / len(sizes), "ranks write about as much"


@pytest.mark.parametrize("name", REPLICATED)
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


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(name, folder):
    results = read(folder / f"resumed-{name}", "results")
    uninterrupted, resumed = results["uninterrupted"], results["resumed"]
    assert len(uninterrupted["losses"]) == 10 and len(resumed["losses"]) == 7
    assert resumed["losses"] == uninterrupted["losses"][3:]
    assert resumed["history"] == uninterrupted["history"], (
        "the first epoch's means count all its steps"
    )
