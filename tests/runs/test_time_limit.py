"""Promise: a training ends when its time is over, and ranks ask each other rarely whether it is."""

import time

import keras

from dtransformer.runs.callbacks import TimeLimit
from dtransformer.trainers.checkpoint import callback
from tests.trainers.small import Record, dense_trainer, points


def test_it_ends_and_asks_rarely(monkeypatch):
    asked, record = [], Record()
    monkeypatch.setattr(callback, "from_chief", lambda make, name: asked.append(name) or make())
    pause = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: time.sleep(0.01)
    )
    limit = TimeLimit(minutes=0.5 / 60)
    dense_trainer().fit(*points(200), 2, epochs=9, verbose=0, callbacks=[pause, limit, record])
    assert 1 <= len(record.logs) < 100 and len(asked) < max(len(record.logs), 2)
