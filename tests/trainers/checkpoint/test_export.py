"""Promise: weights go out to other formats, and come back; no file is lost on the way."""

import os

import keras
import numpy as np
import pytest

from dtransformer.errors import InputError
from dtransformer.models import CausalLM
from dtransformer.trainers import Trainer
from dtransformer.trainers.checkpoint import Checkpoint, export
from dtransformer.trainers.checkpoint.export import check_seal, seal
from dtransformer.trainers.checkpoint.manifest import write_manifest
from tests.trainers.checkpoint.small import DATA, Net, flip, new_trainer, newest


class TestExport:
    @pytest.mark.parametrize("ending", [".weights.h5", ".safetensors"])
    def test_out_and_back(self, ending, trained, two):
        path = two / f"model{ending}"
        keras.saving.register_keras_serializable("tests")(Net)
        export(two, path, network=Net() if ending == ".weights.h5" else None)
        trainer = new_trainer()
        trainer.load_weights(path)
        own, theirs = trainer.network.get_weights(), trained.network.get_weights()
        for one, other in zip(own, theirs, strict=True):
            np.testing.assert_array_equal(one, other)

    def test_what_does_not_fit(self, two):
        export(two, two / "model.safetensors")
        for trainer, message in (
            (new_trainer(layers=2), "it lacks 2: block_1/bias, block_1/kernel"),
            (new_trainer(layers=0), "it also has 2: block_0/bias"),
            (new_trainer(width=9), r"block_0/kernel \(4, 9\), in the file \(4, 8\)"),
        ):
            with pytest.raises(InputError, match=message):
                trainer.load_weights(two / "model.safetensors")
        with pytest.raises(InputError, match="does not fit the network: it lacks 2: block_1"):
            export(two, two / "model.weights.h5", network=Net(layers=2))
        with pytest.raises(InputError, match="must end with"):
            export(two, two / "model.npz")
        with pytest.raises(InputError, match="cannot be written"):
            export(two, two / "nowhere" / "model.safetensors")
        flip(two / "model.safetensors", 0.01)
        with pytest.raises(InputError, match="damaged"):
            new_trainer().load_weights(two / "model.safetensors")
        flip(newest(two) / DATA)
        with pytest.raises(InputError, match="is damaged"):
            export(two, two / "again.safetensors")


def save(trainer, two, path, overwrite):
    if path.name.startswith("saved"):
        trainer.save_weights(path, overwrite=overwrite)
    else:
        export(two, path, network=Net(), overwrite=overwrite)


@pytest.mark.parametrize(
    "name", ["model.weights.h5", "model.safetensors", "saved.weights.h5", "link.weights.h5"]
)
class TestFiles:
    def test_one_that_is_there_is_replaced_only_where_told(self, name, trained, two):
        path = two / name
        path.write_text("precious")
        refused = pytest.raises(InputError, match="exists. Pass another path")
        if name.startswith("saved"):  # what was trained is not lost
            refused = pytest.warns(
                UserWarning, match="already exists .* saved to .*saved-2.weights"
            )
        with refused:
            save(trained, two, path, overwrite=False)
        assert path.read_text() == "precious"
        if name.startswith("saved"):
            new_trainer().load_weights(two / "saved-2.weights.h5")
        save(trained, two, path, overwrite=True)
        new_trainer().load_weights(path)

    def test_a_full_disk_leaves_it_as_it_was(self, name, trained, two, small_files):
        path, before = two / name, set(os.listdir(two))
        path.write_text("precious")
        with small_files(5000), pytest.raises(InputError, match=f"{name}: cannot be written"):
            save(trained, two, path, overwrite=True)
        assert path.read_text() == "precious" and set(os.listdir(two)) == {*before, name}

    def test_what_is_no_file(self, name, trained, two):
        if name.startswith("link"):
            (two / name).symlink_to("/dev/full")
        else:
            (two / name).mkdir()
        if name.startswith("saved"):
            with pytest.warns(UserWarning, match="already exists .* saved to .*saved-2.weights"):
                save(trained, two, two / name, overwrite=True)
            return
        with pytest.raises(InputError, match="not a regular file"):
            save(trained, two, two / name, overwrite=True)


def test_weights_that_are_no_numbers_are_not_exported(two):
    trainer = new_trainer()
    trainer.training_state()
    trainer.network.head.bias.assign([1.0, float("nan")])
    trainer.save(two / "step-00000099")
    for name in ("model.weights.h5", "model.safetensors"):
        with pytest.raises(InputError, match="head/bias has values that are not finite"):
            export(two / "step-00000099", two / name, network=Net())
        assert not (two / name).exists()


def test_a_config_of_more_layers_than_tensors_is_refused_before_they_are_made(tmp_path):
    trainer = Trainer(CausalLM(12, hidden_size=8, num_heads=2, num_layers=1))
    trainer.compile("sgd")
    trainer.fit(np.ones((4, 6), "int32"), np.ones((4, 6), "int32"), verbose=0)
    trainer.save(tmp_path / "one")
    manifest = Checkpoint(tmp_path / "one").manifest
    assert export(tmp_path / "one", tmp_path / "one.weights.h5") > 0
    manifest["network"]["config"]["num_layers"] = 400
    write_manifest(tmp_path / "one", manifest)
    with pytest.raises(
        InputError, match=r"num_layers=400`, but the checkpoint has only \d+ tensors"
    ):
        export(tmp_path / "one", tmp_path / "other.weights.h5")


def test_seals(tmp_path):
    path, run = tmp_path / "model.weights.h5", "ab" * 32
    path.write_bytes(b"weights")
    with pytest.raises(InputError, match="do not end with their checksum"):
        check_seal(path, run)
    seal(path, run)
    check_seal(path, run)
    with pytest.raises(InputError, match="belong to another run"):
        check_seal(path, "cd" * 32)
    sealed = path.read_bytes()
    for position in range(len(sealed)):
        for harmed in (sealed[:position], flipped(sealed, position), sealed + b"x"):
            path.write_bytes(harmed)
            with pytest.raises(InputError):
                check_seal(path, run)


def flipped(content, position):
    return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
