"""The logs contain the fraction of time that steps wait for their batch."""

import time

import keras
import numpy as np
import pytest

from dtransformer.trainers import Trainer


class Batches(keras.utils.PyDataset):
    """Batches that need `seconds` each to build."""

    def __init__(self, seconds):
        super().__init__()
        self._seconds = seconds

    def __len__(self):
        return 6

    def __getitem__(self, index):
        time.sleep(self._seconds)
        return np.ones((4, 3), "float32"), np.ones((4, 1), "float32")


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_input_wait_shows_slow_data(seconds):
    trainer = Trainer(keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)]))
    trainer.compile("sgd", "mse")
    history = trainer.fit(Batches(seconds), verbose=0)
    (input_wait,) = history.history["input_wait"]
    assert 0.5 < input_wait <= 1 if seconds else 0 <= input_wait <= 1
