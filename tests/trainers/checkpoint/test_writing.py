"""A failure during a save never leaves an incomplete checkpoint."""

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
    get_state,
    new_trainer,
)


class TestWriting:
    @pytest.mark.parametrize("function_name", ["write_shards", "merge_shards", "commit", "rename"])
    def test_failed_save_keeps_the_previous_checkpoint(
        self, function_name, trained, tmp_path, monkeypatch
    ):
        path = tmp_path / "step-00000006"
        trained.save(path)
        before = path.joinpath("checkpoint.json").read_text()

        def fail(*args):
            raise OSError("no luck")

        module = {"commit": folders, "rename": folders.os}.get(function_name, writer)
        with monkeypatch.context() as patch:
            patch.setattr(module, function_name, fail)
            with pytest.raises(InputError, match="could not be written: OSError: no luck"):
                trained.save(path)
        assert Checkpoint(path).manifest == json.loads(before)["checkpoint"]
        assert not Checkpoint(path).problems()
        trained.save(path)
        assert [file.name for file in tmp_path.iterdir()] == [path.name]

    def test_interrupted_replacement_keeps_the_previous_checkpoint(
        self, trained, tmp_path, monkeypatch
    ):
        """Between two renames, no checkpoint has the path's name."""
        path = tmp_path / "step-00000006"
        trained.save(path)
        os.rename(path, folders.replaced_path(path))
        assert folders.saved_steps(tmp_path) == [(6, path)]
        new_trainer().restore(tmp_path)
        trained.save(path)
        assert [file.name for file in tmp_path.iterdir()] == [path.name]

    def test_insufficient_disk_space_raises_an_error(self, trained, tmp_path, monkeypatch):
        usage = shutil.disk_usage(tmp_path)._replace(free=100)
        monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: usage)
        before = get_state(trained)
        with pytest.raises(InputError, match="the disk has 0 MiB left, but a checkpoint needs"):
            trained.save(tmp_path / "one")
        assert list(tmp_path.iterdir()) == []
        assert_same_state(before, get_state(trained))

    def test_disk_that_fills_up_during_a_save_raises_an_error(self, trained, tmp_path):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        try:
            with pytest.raises(InputError, match="could not be written: .*File too large"):
                trained.save(tmp_path / "one")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert list(tmp_path.iterdir()) == []

    def test_file_instead_of_a_folder_raises_an_error(self, trained, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(InputError, match="file: cannot be written"):
            trained.save(tmp_path / "file" / "one")

    def test_existing_paths_are_not_overwritten(self, trained, tmp_path):
        (tmp_path / "file").write_text("precious")
        trained.save(tmp_path / "one")
        for name in ("file", "one"):
            with pytest.warns(UserWarning, match=f"{name} already exists .* saved to .*{name}-2"):
                trained.save(tmp_path / name, overwrite=name == "file")
            restored_trainer = new_trainer()
            restored_trainer.restore(tmp_path / f"{name}-2")
            assert_same_state(get_state(trained), get_state(restored_trainer))
        assert (tmp_path / "file").read_text() == "precious"

    @pytest.mark.parametrize("jit_compile", [False, True])
    def test_training_continues_during_a_save(self, jit_compile, tmp_path, monkeypatch):
        trainer, may_write = new_trainer(jit=jit_compile), threading.Event()
        trainer.fit(dataset(), verbose=0)
        before, write = get_state(trainer), writer.write_shards
        monkeypatch.setattr(writer, "write_shards", lambda save: may_write.wait(60) and write(save))
        trainer.save(tmp_path / "one", wait=False)
        for batch in dataset():
            trainer.train_on_batch(*batch)
        after = get_state(trainer)
        assert not (tmp_path / "one").exists()
        may_write.set()
        trainer.wait_until_saved()
        restored_trainer = new_trainer()
        restored_trainer.restore(tmp_path / "one")
        assert_same_state(before, get_state(restored_trainer))
        assert any((after[name] != before[name]).any() for name in after)
