"""Promise: damage is named, and the checkpoint before is taken."""

import os

import pytest

from dtransformer.errors import InputError
from dtransformer.trainers.checkpoint import folders
from tests.trainers.checkpoint.small import (
    DATA,
    assert_same_state,
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
        assert f"Taken instead: {two / 'step-00000006'}" in told
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
    with pytest.raises(InputError, match="there is no checkpoint here"):
        new_trainer().restore(newest(two))


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        new_trainer().restore(tmp_path / "nothing")
    with pytest.raises(InputError, match="no checkpoint here"):
        new_trainer().restore(tmp_path)
