"""Training stops when its time is over, and ranks compare their clocks rarely."""

import types

import keras

from dtransformer.runs.callbacks import limit_callbacks
from dtransformer.trainers.checkpoint import callback
from tests.trainers.small import Record, dense_trainer, points


class Clock(keras.callbacks.Callback):
    """Clock that advances by 0.01 s per step, and by 0.9 s for the first step, which compiles."""

    seconds = 0.0

    def monotonic(self):
        return self.seconds

    def on_train_batch_begin(self, batch, logs=None):
        self.seconds += 0.01 if self.seconds else 0.9


def test_time_limit_stops_training_with_few_clock_reads(monkeypatch):
    clock, requested, record = Clock(), [], Record()
    monkeypatch.setattr(callback, "from_chief", lambda make, name: requested.append(name) or make())
    monkeypatch.setattr(callback, "time", types.SimpleNamespace(monotonic=clock.monotonic))
    trainer = dense_trainer()
    callbacks = [clock, *limit_callbacks(trainer, 2 / 60, None), record]
    trainer.fit(*points(200), 2, epochs=9, verbose=0, callbacks=callbacks)
    # The time suffices for 110 steps. Ranks ask after one and two steps, then after half of the rest.
    assert 110 <= len(record.logs) <= 112 and len(requested) <= 14
