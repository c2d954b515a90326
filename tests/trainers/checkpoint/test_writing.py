"""Promise: a checkpoint is complete or not there, whatever fails while it is written."""

import json
import os
import resource
import shutil
import threading

import pytest

from dtransformer.errors import InputError
from dtransformer.trainers.checkpoint import Checkpoint, folders, writer
from tests.trainers.checkpoint.small import (
    assert_same_state,
    dataset,
    new_trainer,
    state,
)


class TestWriting:
    @pytest.mark.parametrize("place", ["write_shards", "merge_shards", "commit", "rename"])
    def test_a_failure_anywhere_leaves_the_last_one(self, place, trained, tmp_path, monkeypatch):
        path = tmp_path / "step-00000006"
        trained.save(path)
        before = path.joinpath("checkpoint.json").read_text()

        def fail(*args):
            raise OSError("no luck")

        module = {"commit": folders, "rename": folders.os}.get(place, writer)
        with monkeypatch.context() as patch:
            patch.setattr(module, place, fail)
            with pytest.raises(InputError, match="could not be written: OSError: no luck"):
                trained.save(path)
        assert Checkpoint(path).manifest == json.loads(before)["checkpoint"]
        assert not Checkpoint(path).problems()
        trained.save(path)
        assert [file.name for file in tmp_path.iterdir()] == [path.name], "nothing is left over"

    def test_a_kill_while_one_is_replaced(self, trained, tmp_path, monkeypatch):
        """The only moment at which there is none of the path's name."""
        path = tmp_path / "step-00000006"
        trained.save(path)
        os.rename(path, folders.replaced_path(path))
        assert folders.saved_steps(tmp_path) == [(6, path)]
        new_trainer().restore(tmp_path)
        trained.save(path)
        assert [file.name for file in tmp_path.iterdir()] == [path.name]

    def test_a_full_disk(self, trained, tmp_path, monkeypatch):
        usage = shutil.disk_usage(tmp_path)._replace(free=100)
        monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: usage)
        before = state(trained)
        with pytest.raises(InputError, match="the disk has 0 MiB left, but a checkpoint needs"):
            trained.save(tmp_path / "one")
        assert list(tmp_path.iterdir()) == []
        assert_same_state(before, state(trained))

    def test_a_disk_that_gets_full_meanwhile(self, trained, tmp_path):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        try:
            with pytest.raises(InputError, match="could not be written: .*File too large"):
                trained.save(tmp_path / "one")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert list(tmp_path.iterdir()) == []

    def test_what_is_no_folder(self, trained, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(InputError, match="file: cannot be written"):
            trained.save(tmp_path / "file" / "one")

    def test_a_name_that_is_taken_loses_nothing(self, trained, tmp_path):
        (tmp_path / "file").write_text("precious")
        trained.save(tmp_path / "one")
        for name in ("file", "one"):
            with pytest.warns(UserWarning, match=f"{name} already exists .* saved to .*{name}-2"):
                trained.save(tmp_path / name, overwrite=name == "file")
            other = new_trainer()
            other.restore(tmp_path / f"{name}-2")
            assert_same_state(state(trained), state(other))
        assert (tmp_path / "file").read_text() == "precious"

    @pytest.mark.parametrize("jit_compile", [False, True])
    def test_training_goes_on_meanwhile(self, jit_compile, tmp_path, monkeypatch):
        trainer, may_write = new_trainer(jit=jit_compile), threading.Event()
        trainer.fit(dataset(), verbose=0)
        before, write = state(trainer), writer.write_shards
        monkeypatch.setattr(writer, "write_shards", lambda save: may_write.wait(60) and write(save))
        trainer.save(tmp_path / "one", wait=False)
        for batch in dataset():
            trainer.train_on_batch(*batch)
        after = state(trainer)
        assert not (tmp_path / "one").exists()
        may_write.set()
        trainer.wait_until_saved()
        other = new_trainer()
        other.restore(tmp_path / "one")
        assert_same_state(before, state(other))
        assert any((after[name] != before[name]).any() for name in after)
