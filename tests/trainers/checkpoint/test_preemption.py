"""Promise: a run that is told to stop saves, leaves with code 75, and goes on as if nothing was."""

import os
import signal

import keras
import pytest

import dtransformer
from dtransformer.trainers import ModelCheckpoint
from tests.trainers.checkpoint.small import (
    Seen,
    assert_same_state,
    dataset,
    new_trainer,
    state,
    steps_of,
    uninterrupted,
)


class Send(keras.callbacks.Callback):
    """Sends a signal to this process after a step."""

    def __init__(self, number, step):
        super().__init__()
        self.number, self.step = number, step

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self.step:
            os.kill(os.getpid(), self.number)


@pytest.fixture(autouse=True)
def handlers():
    """Restore what signals do, and forget that the job was to stop."""
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)
    dtransformer.shutdown()


def fit(folder, *callbacks):
    trainer = new_trainer()
    saving = ModelCheckpoint(folder, every_epochs=None)
    callbacks = [saving, *callbacks]
    trainer.fit(dataset(), epochs=3, verbose=0, callbacks=callbacks, resume=True)
    return trainer


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("step", [8, 12])  # in an epoch, and as its last step
def test_a_run_that_is_told_to_stop_goes_on(number, step, tmp_path):
    expected, losses, _ = uninterrupted()
    with pytest.raises(SystemExit) as raised:
        fit(tmp_path, Send(number, step))
    assert raised.value.code == 75
    assert steps_of(tmp_path) == [step]
    dtransformer.shutdown()  # as if it were another process
    seen = Seen()
    trainer = fit(tmp_path, seen)
    assert seen.losses == losses[step:]
    assert_same_state(state(expected), state(trainer))


def test_told_in_the_last_step_the_run_is_complete(tmp_path):
    with pytest.raises(SystemExit):
        fit(tmp_path, Send(signal.SIGTERM, 18))
    assert steps_of(tmp_path) == [18]


def test_after_fit_signals_do_what_they_did(tmp_path, handlers):
    fit(tmp_path)
    assert {one: signal.getsignal(one) for one in handlers} == handlers


def test_a_run_that_saves_nothing_ends_as_ever(handlers):
    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            assert signal.getsignal(signal.SIGTERM) == handlers[signal.SIGTERM]

    new_trainer().fit(dataset(), verbose=0, callbacks=[Look()])
