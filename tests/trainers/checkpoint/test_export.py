"""Promise: weights go out to other formats, and come back."""

import keras
import numpy as np
import pytest

from dtransformer.errors import InputError
from dtransformer.trainers.checkpoint import export
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

    def test_states_of_the_optimizer(self, trained, two):
        number = export(two, two / "all.safetensors", with_optimizer=True)
        assert number > len(trained.network.variables)
        new_trainer().load_weights(two / "all.safetensors")

    def test_what_does_not_fit(self, two):
        export(two, two / "model.safetensors")
        for trainer, message in (
            (new_trainer(layers=2), "it lacks block_1/bias; it lacks block_1/kernel"),
            (new_trainer(layers=0), "it also has block_0/bias"),
            (new_trainer(width=9), r"block_0/kernel is \(4, 8\), not \(4, 9\)"),
        ):
            with pytest.raises(InputError, match=message):
                trainer.load_weights(two / "model.safetensors")
        with pytest.raises(InputError, match="does not fit the network: it lacks block_1"):
            export(two, two / "model.weights.h5", network=Net(layers=2))
        with pytest.raises(InputError, match="give a file that ends with"):
            export(two, two / "model.npz")
        with pytest.raises(InputError, match="cannot be written"):
            export(two, two / "nowhere" / "model.safetensors")
        flip(two / "model.safetensors", 0.01)
        with pytest.raises(InputError, match="damaged"):
            new_trainer().load_weights(two / "model.safetensors")
        flip(newest(two) / DATA)
        with pytest.raises(InputError, match="is damaged"):
            export(two, two / "again.safetensors")
