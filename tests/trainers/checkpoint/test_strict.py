"""Promise: what does not fit is told, all of it, and nothing changes."""

import keras
import numpy as np
import pytest

from dtransformer.errors import InputError
from dtransformer.trainers import Trainer
from tests.trainers.checkpoint.small import assert_same_state, new_trainer, state


class TestStrict:
    def test_all_that_does_not_fit_is_listed(self, two):
        cases = {
            "it lacks 6: network/block_1/bias": new_trainer(layers=2),
            "block_0/kernel (4, 9), in the file (4, 8)": new_trainer(width=9),
            "optimizer/velocities/block_0/bias": new_trainer(
                keras.optimizers.SGD(0.1, momentum=0.9)
            ),
        }
        for text, trainer in cases.items():
            before = state(trainer)
            with pytest.raises(InputError) as error:
                trainer.restore(two)
            assert text in str(error.value), error.value
            assert_same_state(before, state(trainer))

    def test_what_fits_is_restored_if_asked_for(self, trained, two):
        trainer = new_trainer(layers=2)
        restored = trainer.restore(two, strict=False)
        assert "network/block_1/kernel" in restored.missing
        own, theirs = trainer.network, trained.network
        np.testing.assert_array_equal(own.head.kernel.numpy(), theirs.head.kernel.numpy())

    def test_weights_alone(self, trained, two):
        trainer = new_trainer(keras.optimizers.SGD(0.1))
        trainer.restore(two, weights_only=True)
        own, theirs = trainer.network.get_weights(), trained.network.get_weights()
        for one, other in zip(own, theirs, strict=True):
            np.testing.assert_array_equal(one, other)
        assert int(trainer.optimizer.iterations) == 0

    def test_layers_of_one_name_are_an_error(self, tmp_path):
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
