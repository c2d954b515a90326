"""Weights are exported to other formats and loaded again, without losing existing files."""

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
from tests.trainers.checkpoint.small import DATA_FILE, Net, flip_bit, new_trainer, newest_checkpoint


class TestExport:
    @pytest.mark.parametrize("ending", [".weights.h5", ".safetensors"])
    def test_exported_weights_can_be_loaded(self, ending, trained, two_checkpoints):
        path = two_checkpoints / f"model{ending}"
        keras.saving.register_keras_serializable("tests")(Net)
        export(two_checkpoints, path, network=Net() if ending == ".weights.h5" else None)
        trainer = new_trainer()
        trainer.load_weights(path)
        actual, expected = trainer.network.get_weights(), trained.network.get_weights()
        for actual_value, expected_value in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(actual_value, expected_value)

    def test_what_does_not_fit(self, two_checkpoints):
        export(two_checkpoints, two_checkpoints / "model.safetensors")
        for trainer, message in (
            (new_trainer(layers=2), "it lacks 2: block_1/bias, block_1/kernel"),
            (new_trainer(layers=0), "it also has 2: block_0/bias"),
            (new_trainer(width=9), r"block_0/kernel \(4, 9\), in the file \(4, 8\)"),
        ):
            with pytest.raises(InputError, match=message):
                trainer.load_weights(two_checkpoints / "model.safetensors")
        with pytest.raises(InputError, match="does not fit the network: it lacks 2: block_1"):
            export(two_checkpoints, two_checkpoints / "model.weights.h5", network=Net(layers=2))
        with pytest.raises(InputError, match="must end with"):
            export(two_checkpoints, two_checkpoints / "model.npz")
        with pytest.raises(InputError, match="cannot be written"):
            export(two_checkpoints, two_checkpoints / "nowhere" / "model.safetensors")
        flip_bit(two_checkpoints / "model.safetensors", 0.01)
        with pytest.raises(InputError, match="damaged"):
            new_trainer().load_weights(two_checkpoints / "model.safetensors")
        flip_bit(newest_checkpoint(two_checkpoints) / DATA_FILE)
        with pytest.raises(InputError, match="is damaged"):
            export(two_checkpoints, two_checkpoints / "again.safetensors")


def save(trainer, two_checkpoints, path, overwrite):
    if path.name.startswith("saved"):
        trainer.save_weights(path, overwrite=overwrite)
    else:
        export(two_checkpoints, path, network=Net(), overwrite=overwrite)


@pytest.mark.parametrize(
    "name", ["model.weights.h5", "model.safetensors", "saved.weights.h5", "link.weights.h5"]
)
class TestFiles:
    def test_existing_file_is_replaced_only_with_overwrite(self, name, trained, two_checkpoints):
        path = two_checkpoints / name
        path.write_text("precious")
        expectation = pytest.raises(InputError, match="exists. Pass another path")
        if name.startswith("saved"):  # Trained weights must not be lost.
            expectation = pytest.warns(
                UserWarning, match="already exists .* saved to .*saved-2.weights"
            )
        with expectation:
            save(trained, two_checkpoints, path, overwrite=False)
        assert path.read_text() == "precious"
        if name.startswith("saved"):
            new_trainer().load_weights(two_checkpoints / "saved-2.weights.h5")
        save(trained, two_checkpoints, path, overwrite=True)
        new_trainer().load_weights(path)

    def test_full_disk_leaves_the_file_unchanged(self, name, trained, two_checkpoints, small_files):
        path, before = two_checkpoints / name, set(os.listdir(two_checkpoints))
        path.write_text("precious")
        with small_files(5000), pytest.raises(InputError, match=f"{name}: cannot be written"):
            save(trained, two_checkpoints, path, overwrite=True)
        assert path.read_text() == "precious" and set(os.listdir(two_checkpoints)) == {
            *before,
            name,
        }

    def test_links_to_devices_and_folders_are_not_overwritten(self, name, trained, two_checkpoints):
        if name.startswith("link"):
            (two_checkpoints / name).symlink_to("/dev/full")
        else:
            (two_checkpoints / name).mkdir()
        if name.startswith("saved"):
            with pytest.warns(UserWarning, match="already exists .* saved to .*saved-2.weights"):
                save(trained, two_checkpoints, two_checkpoints / name, overwrite=True)
            return
        with pytest.raises(InputError, match="not a regular file"):
            save(trained, two_checkpoints, two_checkpoints / name, overwrite=True)


def test_nonfinite_weights_are_not_exported(two_checkpoints):
    trainer = new_trainer()
    trainer.training_state()
    trainer.network.head.bias.assign([1.0, float("nan")])
    trainer.save(two_checkpoints / "step-00000099")
    for name in ("model.weights.h5", "model.safetensors"):
        with pytest.raises(InputError, match="head/bias has values that are not finite"):
            export(two_checkpoints / "step-00000099", two_checkpoints / name, network=Net())
        assert not (two_checkpoints / name).exists()


def test_config_with_more_layers_than_tensors_raises_an_error(tmp_path):
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


def test_checksum_seal_detects_every_change(tmp_path):
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
        for changed in (sealed[:position], flip_bit_at(sealed, position), sealed + b"x"):
            path.write_bytes(changed)
            with pytest.raises(InputError):
                check_seal(path, run)


def flip_bit_at(content, position):
    return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
