"""A checkpoint that does not fit raises an error with all differences and changes nothing."""

import keras
import numpy as np
import pytest

from dtransformer.errors import InputError
from dtransformer.trainers import Trainer
from tests.trainers.checkpoint.small import assert_same_state, get_state, new_trainer


class TestStrict:
    def test_all_mismatched_tensors_are_listed(self, two_checkpoints):
        cases = {
            "it lacks 6: network/block_1/bias": new_trainer(layers=2),
            "block_0/kernel (4, 9), in the file (4, 8)": new_trainer(width=9),
            "optimizer/velocities/block_0/bias": new_trainer(
                keras.optimizers.SGD(0.1, momentum=0.9)
            ),
        }
        for text, trainer in cases.items():
            before = get_state(trainer)
            with pytest.raises(InputError) as error:
                trainer.restore(two_checkpoints)
            assert text in str(error.value), error.value
            assert_same_state(before, get_state(trainer))

    def test_matching_tensors_are_restored_without_strict(self, trained, two_checkpoints):
        trainer = new_trainer(layers=2)
        restored = trainer.restore(two_checkpoints, strict=False)
        assert "network/block_1/kernel" in restored.missing
        actual, expected = trainer.network, trained.network
        np.testing.assert_array_equal(actual.head.kernel.numpy(), expected.head.kernel.numpy())

    def test_weights_only_ignores_the_optimizer(self, trained, two_checkpoints):
        trainer = new_trainer(keras.optimizers.SGD(0.1))
        trainer.restore(two_checkpoints, weights_only=True)
        actual, expected = trainer.network.get_weights(), trained.network.get_weights()
        for actual_value, expected_value in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(actual_value, expected_value)
        assert int(trainer.optimizer.iterations) == 0

    def test_duplicate_layer_names_raise_an_error(self, tmp_path):
        network = keras.Sequential(
            [keras.Sequential([keras.layers.Dense(4, name="same")], name="a"),
             keras.Sequential([keras.layers.Dense(4, name="same")], name="b")]
        )  # fmt: skip
        network.build((None, 4))
        for layer in network._flatten_layers():
            for variable in layer.variables:
                variable._path = f"same/{variable.name}"
        trainer = Trainer(network)
        trainer.compile("sgd", keras.losses.MeanSquaredError())
        with pytest.raises(
            ValueError, match="Two variables of .* have the name network/same/kernel"
        ):
            trainer.save(tmp_path / "one")
