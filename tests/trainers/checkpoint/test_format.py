"""A checkpoint contains the full state of a run, in the format of TensorFlow."""

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.errors import InputError
from dtransformer.trainers.checkpoint import Checkpoint
from harness.tolerances import PARITY_LOSS
from tests.trainers.checkpoint.small import (
    NUM_BATCHES,
    StepRecorder,
    assert_same_state,
    dataset,
    get_state,
    new_trainer,
    newest_checkpoint,
    run_uninterrupted,
)

FORMAT_1 = pathlib.Path(__file__).parent / "format_1"


class TestFormat:
    def test_tensorflow_reads_full_tensors(self, trained, two_checkpoints):
        reader = tf.train.load_checkpoint(str(newest_checkpoint(two_checkpoints)))
        network = trained.network
        kernel = reader.get_tensor("network/block_0/kernel")
        np.testing.assert_array_equal(kernel, network.blocks[0].kernel.numpy())
        mean = reader.get_tensor("network/norm/moving_mean")
        np.testing.assert_array_equal(mean, network.norm.moving_mean.numpy())
        assert reader.get_tensor("optimizer/iterations") == NUM_BATCHES
        momentum = trained.optimizer._momentums[0].numpy()
        actual = reader.get_tensor("optimizer/momentums/block_0/kernel")
        np.testing.assert_array_equal(actual, momentum)

    def test_new_trainer_restores_the_state(self, trained, two_checkpoints):
        trainer = new_trainer()
        restored = trainer.restore(two_checkpoints)
        assert_same_state(get_state(trained), get_state(trainer))
        assert restored.step == NUM_BATCHES
        assert restored.position == {"epoch": 1, "batch": 0}
        assert restored.path == str(newest_checkpoint(two_checkpoints))

    def test_manifest_describes_the_run(self, two_checkpoints):
        manifest = Checkpoint(newest_checkpoint(two_checkpoints)).manifest
        assert manifest["optimizer"]["class_name"] == "Adam"
        assert manifest["parallel"]["model_parallel"] == 1
        assert manifest["network"]["config"]["width"] == 8
        assert manifest["seed"] == 0

    def test_format_1_is_read_and_written(self, tmp_path):
        """`format_1` was saved after one epoch of `new_trainer(metrics=True)`."""
        trained, losses, _ = run_uninterrupted(epochs=2, metrics=True)
        trainer, recorder = new_trainer(metrics=True), StepRecorder()
        trainer.fit(dataset(), epochs=2, verbose=0, callbacks=[recorder], resume=FORMAT_1)
        np.testing.assert_allclose(recorder.losses, losses[NUM_BATCHES:], rtol=PARITY_LOSS)
        trained.save(tmp_path / "one")
        old_manifest, new_manifest = (
            Checkpoint(FORMAT_1).manifest,
            Checkpoint(tmp_path / "one").manifest,
        )
        assert new_manifest.keys() == old_manifest.keys()
        assert new_manifest["tensors"] == old_manifest["tensors"]
        assert new_manifest["files"].keys() == old_manifest["files"].keys()

    @pytest.mark.parametrize(
        "optimizer",
        [
            "SGD",
            "RMSprop",
            "Nadam",
            "Adafactor",
            "Lamb",
            "Ftrl",
            "Adadelta",
            "Adamax",
            "Lion",
            "Muon",
        ],
    )
    def test_optimizer_state_is_restored(self, optimizer, tmp_path):
        optimizer_class = getattr(keras.optimizers, optimizer)
        options = {"momentum": 0.9} if optimizer == "SGD" else {}
        trainer = new_trainer(optimizer_class(0.01, **options))
        trainer.fit(dataset(), verbose=0)
        trainer.save(tmp_path / "one")
        restored_trainer = new_trainer(optimizer_class(0.01, **options))
        restored_trainer.restore(tmp_path / "one")
        assert_same_state(get_state(trainer), get_state(restored_trainer))
        for each_trainer in (trainer, restored_trainer):
            each_trainer.fit(dataset(), verbose=0)
        assert_same_state(get_state(trainer), get_state(restored_trainer))

    def test_weight_averages_and_loss_scale_are_restored(self, tmp_path):
        def optimizer():
            inner = keras.optimizers.SGD(0.01, use_ema=True)
            return keras.optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=4)

        trainer = new_trainer(optimizer())
        trainer.fit(dataset(), verbose=0)
        trainer.save(tmp_path / "one")
        restored_trainer = new_trainer(optimizer())
        restored_trainer.restore(tmp_path / "one")
        assert_same_state(get_state(trainer), get_state(restored_trainer))
        assert float(restored_trainer.optimizer.dynamic_scale) == 2.0**16

    def test_assets_are_saved_and_verified(self, trained, tmp_path):
        class Words:
            def save(self, path):
                path.mkdir()
                (path / "words.txt").write_text("a b c")

        trained.save(tmp_path / "one", assets={"tokenizer": Words()})
        words = tmp_path / "one" / "tokenizer" / "words.txt"
        assert words.read_text() == "a b c"
        words.write_text("a b d")
        with pytest.raises(InputError, match="words.txt is damaged"):
            new_trainer().restore(tmp_path / "one")
