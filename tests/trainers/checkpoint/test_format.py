"""Promise: a checkpoint holds all that a run needs, in TensorFlow's own format."""

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
    Seen,
    assert_same_state,
    dataset,
    new_trainer,
    newest,
    state,
    uninterrupted,
)

FORMAT_1 = pathlib.Path(__file__).parent / "format_1"


class TestFormat:
    def test_it_is_tensorflows_own_with_full_tensors(self, trained, two):
        reader = tf.train.load_checkpoint(str(newest(two)))
        network = trained.network
        kernel = reader.get_tensor("network/block_0/kernel")
        np.testing.assert_array_equal(kernel, network.blocks[0].kernel.numpy())
        mean = reader.get_tensor("network/norm/moving_mean")
        np.testing.assert_array_equal(mean, network.norm.moving_mean.numpy())
        assert reader.get_tensor("optimizer/iterations") == NUM_BATCHES
        momentum = trained.optimizer._momentums[0].numpy()
        found = reader.get_tensor("optimizer/momentums/block_0/kernel")
        np.testing.assert_array_equal(found, momentum)

    def test_a_new_trainer_has_the_state(self, trained, two):
        trainer = new_trainer()
        restored = trainer.restore(two)
        assert_same_state(state(trained), state(trainer))
        assert restored.step == NUM_BATCHES
        assert restored.position == {"epoch": 1, "batch": 0}
        assert restored.path == str(newest(two))

    def test_the_manifest_tells_what_it_is(self, two):
        manifest = Checkpoint(newest(two)).manifest
        assert manifest["optimizer"]["class_name"] == "Adam"
        assert manifest["parallel"]["model_parallel"] == 1
        assert manifest["network"]["config"]["width"] == 8
        assert manifest["seed"] == 0

    def test_a_checkpoint_of_format_1_is_read_and_written(self, tmp_path):
        """`format_1` was saved after one epoch of `new_trainer(metrics=True)`."""
        trained, losses, _ = uninterrupted(epochs=2, metrics=True)
        trainer, seen = new_trainer(metrics=True), Seen()
        trainer.fit(dataset(), epochs=2, verbose=0, callbacks=[seen], resume=FORMAT_1)
        np.testing.assert_allclose(seen.losses, losses[NUM_BATCHES:], rtol=PARITY_LOSS)
        trained.save(tmp_path / "one")
        old, new = Checkpoint(FORMAT_1).manifest, Checkpoint(tmp_path / "one").manifest
        assert new.keys() == old.keys()
        assert new["tensors"] == old["tensors"]
        assert new["files"].keys() == old["files"].keys()

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
    def test_every_optimizers_state_travels(self, optimizer, tmp_path):
        kind = getattr(keras.optimizers, optimizer)
        options = {"momentum": 0.9} if optimizer == "SGD" else {}
        trainer = new_trainer(kind(0.01, **options))
        trainer.fit(dataset(), verbose=0)
        trainer.save(tmp_path / "one")
        other = new_trainer(kind(0.01, **options))
        other.restore(tmp_path / "one")
        assert_same_state(state(trainer), state(other))
        for one in (trainer, other):
            one.fit(dataset(), verbose=0)
        assert_same_state(state(trainer), state(other))

    def test_averages_and_the_scale_of_the_loss_travel(self, tmp_path):
        def optimizer():
            inner = keras.optimizers.SGD(0.01, use_ema=True)
            return keras.optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=4)

        trainer = new_trainer(optimizer())
        trainer.fit(dataset(), verbose=0)
        trainer.save(tmp_path / "one")
        other = new_trainer(optimizer())
        other.restore(tmp_path / "one")
        assert_same_state(state(trainer), state(other))
        assert float(other.optimizer.dynamic_scale) == 2.0**16

    def test_assets_are_part_of_it(self, trained, tmp_path):
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
