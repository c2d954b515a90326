"""Promise: damage is named, and the checkpoint before is taken."""

import os
import shutil

import pytest

from dtransformer.errors import InputError
from dtransformer.trainers import ModelCheckpoint
from dtransformer.trainers.checkpoint import folders
from dtransformer.trainers.checkpoint.callback import remove_old
from tests.trainers.checkpoint.small import (
    DATA,
    assert_same_state,
    dataset,
    flip,
    new_trainer,
    newest,
    state,
)

INDEX = "state.index"
DAMAGES = {
    "a flipped byte": (DATA, lambda path: flip(path), "is damaged"),
    "a truncated file": (DATA, lambda path: os.truncate(path, 100), "has 100 bytes"),
    "a missing file": (DATA, lambda path: path.unlink(), "is missing"),
    "a missing index": (INDEX, lambda path: path.unlink(), "is missing"),
    "a flipped byte of the index": (INDEX, lambda path: flip(path), "is damaged"),
    "a flipped byte of the manifest": ("checkpoint.json", lambda path: flip(path), "is damaged"),
    "half a manifest": ("checkpoint.json", lambda path: os.truncate(path, 99), "is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
class TestDamage:
    def test_the_one_before_is_taken(self, damage, trained, two, capsys):
        name, harm, message = DAMAGES[damage]
        harm(newest(two) / name)
        trainer = new_trainer()
        restored = trainer.restore(two)
        assert_same_state(state(trained), state(trainer))
        told = capsys.readouterr().out
        assert f"{newest(two) / name}" in told and message in told
        assert f"Using {two / 'step-00000006'} instead" in told
        assert restored.damaged == [str(newest(two))]

    def test_it_is_named_and_nothing_changes(self, damage, two):
        name, harm, message = DAMAGES[damage]
        harm(newest(two) / name)
        trainer = new_trainer()
        before = state(trainer)
        with pytest.raises(InputError) as error:
            trainer.restore(newest(two))
        assert f"{newest(two) / name}" in str(error.value) and message in str(error.value)
        assert_same_state(before, state(trainer))


def test_a_checkpoint_without_its_manifest_is_none(two):
    (newest(two) / "checkpoint.json").unlink()
    assert [step for step, _ in folders.saved_steps(two)] == [6]
    with pytest.raises(InputError, match="contains no checkpoint"):
        new_trainer().restore(newest(two))


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        new_trainer().restore(tmp_path / "nothing")
    with pytest.raises(InputError, match="contains no checkpoint"):
        new_trainer().restore(tmp_path)


def unreadable(path):
    (path / "checkpoint.json").unlink()
    (path / "checkpoint.json").symlink_to("checkpoint.json")  # to itself


ODD_ONES = {
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "an empty folder": lambda path: path.mkdir(),
    "one that lost its manifest": lambda path: (
        shutil.copytree(newest(path.parent), path), (path / "checkpoint.json").unlink()),
    "one that cannot be read": lambda path: (
        shutil.copytree(newest(path.parent), path), unreadable(path)),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD_ONES)
def test_one_odd_folder_does_not_end_it_for_the_others(odd, two, capsys):
    path = two / "step-00000009"
    ODD_ONES[odd](path)
    restored = new_trainer().restore(two)
    assert restored.path == str(newest(two)) and restored.damaged == [str(path)]
    assert str(path) in capsys.readouterr().out, "it is named"
    remove_old(two, keep=1)
    new_trainer().fit(dataset(), verbose=0, callbacks=[ModelCheckpoint(two)], resume=True)
    assert os.path.lexists(f"{path}.damaged"), "it is set aside, not removed"


def test_a_link_is_removed_and_not_what_it_points_to(two, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "one"
    shutil.copytree(newest(two), elsewhere)
    (two / "step-00000001").symlink_to(elsewhere)
    remove_old(two, keep=1)
    assert os.listdir(two) == [newest(two).name] and (elsewhere / "checkpoint.json").exists()


def test_a_renamed_folder_does_not_pass_for_a_newer_one(trained, tmp_path):
    trained.save(tmp_path / "step-00000006")
    later = new_trainer()
    later.fit(dataset(), epochs=2, verbose=0)
    later.save(tmp_path / "step-00000012")
    os.rename(tmp_path / "step-00000006", tmp_path / "step-00000099")
    assert new_trainer().restore(tmp_path).step == 12
    assert [step for step, _ in folders.saved_steps(tmp_path)] == [6, 12]


def test_what_was_set_aside_stays(two):
    for content in ("a", "b"):
        (two / "step-00000008").mkdir()
        (two / "step-00000008" / content).touch()
        folders.set_aside(two / "step-00000008")
    assert (two / "step-00000008.damaged" / "a").exists()
    assert (two / "step-00000008.damaged-1" / "b").exists()
