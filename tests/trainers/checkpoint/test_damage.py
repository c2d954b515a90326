"""Damaged checkpoints are named, and the previous one is restored."""

import os
import shutil

import pytest

from dtransformer.errors import InputError
from dtransformer.trainers import ModelCheckpoint
from dtransformer.trainers.checkpoint import folders
from dtransformer.trainers.checkpoint.callback import remove_old
from tests.trainers.checkpoint.small import (
    DATA_FILE,
    assert_same_state,
    dataset,
    flip_bit,
    get_state,
    new_trainer,
    newest_checkpoint,
)

INDEX = "state.index"
DAMAGES = {
    "a flipped byte": (DATA_FILE, lambda path: flip_bit(path), "is damaged"),
    "a truncated file": (DATA_FILE, lambda path: os.truncate(path, 100), "has 100 bytes"),
    "a missing file": (DATA_FILE, lambda path: path.unlink(), "is missing"),
    "a missing index": (INDEX, lambda path: path.unlink(), "is missing"),
    "a flipped byte of the index": (INDEX, lambda path: flip_bit(path), "is damaged"),
    "a flipped byte of the manifest": (
        "checkpoint.json",
        lambda path: flip_bit(path),
        "is damaged",
    ),
    "half a manifest": ("checkpoint.json", lambda path: os.truncate(path, 99), "is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
class TestDamage:
    def test_previous_checkpoint_is_restored(self, damage, trained, two_checkpoints, capsys):
        name, inflict, message = DAMAGES[damage]
        inflict(newest_checkpoint(two_checkpoints) / name)
        trainer = new_trainer()
        restored = trainer.restore(two_checkpoints)
        assert_same_state(get_state(trained), get_state(trainer))
        output = capsys.readouterr().out
        assert f"{newest_checkpoint(two_checkpoints) / name}" in output and message in output
        assert f"Using {two_checkpoints / 'step-00000006'} instead" in output
        assert restored.damaged == [str(newest_checkpoint(two_checkpoints))]

    def test_damaged_file_is_named_and_nothing_changes(self, damage, two_checkpoints):
        name, inflict, message = DAMAGES[damage]
        inflict(newest_checkpoint(two_checkpoints) / name)
        trainer = new_trainer()
        before = get_state(trainer)
        with pytest.raises(InputError) as error:
            trainer.restore(newest_checkpoint(two_checkpoints))
        assert f"{newest_checkpoint(two_checkpoints) / name}" in str(
            error.value
        ) and message in str(error.value)
        assert_same_state(before, get_state(trainer))


def test_folder_without_manifest_is_no_checkpoint(two_checkpoints):
    (newest_checkpoint(two_checkpoints) / "checkpoint.json").unlink()
    assert [step for step, _ in folders.saved_steps(two_checkpoints)] == [6]
    with pytest.raises(InputError, match="contains no checkpoint"):
        new_trainer().restore(newest_checkpoint(two_checkpoints))


def test_missing_checkpoint_raises_an_error(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        new_trainer().restore(tmp_path / "nothing")
    with pytest.raises(InputError, match="contains no checkpoint"):
        new_trainer().restore(tmp_path)


def make_unreadable(path):
    (path / "checkpoint.json").unlink()
    (path / "checkpoint.json").symlink_to("checkpoint.json")  # A link to itself.


UNREADABLE_FOLDERS = {
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "an empty folder": lambda path: path.mkdir(),
    "a folder without manifest": lambda path: (
        shutil.copytree(newest_checkpoint(path.parent), path), (path / "checkpoint.json").unlink()),
    "an unreadable manifest": lambda path: (
        shutil.copytree(newest_checkpoint(path.parent), path), make_unreadable(path)),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNREADABLE_FOLDERS)
def test_unreadable_folder_is_skipped_and_set_aside(kind, two_checkpoints, capsys):
    path = two_checkpoints / "step-00000009"
    UNREADABLE_FOLDERS[kind](path)
    restored = new_trainer().restore(two_checkpoints)
    assert restored.path == str(newest_checkpoint(two_checkpoints)) and restored.damaged == [
        str(path)
    ]
    assert str(path) in capsys.readouterr().out
    remove_old(two_checkpoints, keep=1)
    new_trainer().fit(
        dataset(), verbose=0, callbacks=[ModelCheckpoint(two_checkpoints)], resume=True
    )
    assert os.path.lexists(f"{path}.damaged")


def test_removing_a_link_keeps_its_target(two_checkpoints, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "one"
    shutil.copytree(newest_checkpoint(two_checkpoints), elsewhere)
    (two_checkpoints / "step-00000001").symlink_to(elsewhere)
    remove_old(two_checkpoints, keep=1)
    assert (
        os.listdir(two_checkpoints) == [newest_checkpoint(two_checkpoints).name]
        and (elsewhere / "checkpoint.json").exists()
    )


def test_renamed_folder_keeps_its_step(trained, tmp_path):
    trained.save(tmp_path / "step-00000006")
    later_trainer = new_trainer()
    later_trainer.fit(dataset(), epochs=2, verbose=0)
    later_trainer.save(tmp_path / "step-00000012")
    os.rename(tmp_path / "step-00000006", tmp_path / "step-00000099")
    assert new_trainer().restore(tmp_path).step == 12
    assert [step for step, _ in folders.saved_steps(tmp_path)] == [6, 12]


def test_set_aside_folders_are_not_overwritten(two_checkpoints):
    for content in ("a", "b"):
        (two_checkpoints / "step-00000008").mkdir()
        (two_checkpoints / "step-00000008" / content).touch()
        folders.set_aside(two_checkpoints / "step-00000008")
    assert (two_checkpoints / "step-00000008.damaged" / "a").exists()
    assert (two_checkpoints / "step-00000008.damaged-1" / "b").exists()
