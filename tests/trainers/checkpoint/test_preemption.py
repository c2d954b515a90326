"""A stop signal makes a run save and exit with code 75. The resumed run is identical."""

import os
import signal

import keras
import pytest

import dtransformer
from dtransformer.trainers import ModelCheckpoint
from tests.trainers.checkpoint.small import (
    StepRecorder,
    assert_same_state,
    dataset,
    get_state,
    new_trainer,
    run_uninterrupted,
    saved_steps,
)


class SendSignal(keras.callbacks.Callback):
    """Sends a signal to this process after a step."""

    def __init__(self, signal_number, step):
        super().__init__()
        self.signal_number, self.step = signal_number, step

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self.step:
            os.kill(os.getpid(), self.signal_number)


@pytest.fixture(autouse=True)
def handlers():
    """Restore the signal handlers and the state of the job."""
    previous_handlers = {
        index: signal.getsignal(index) for index in (signal.SIGTERM, signal.SIGUSR1)
    }
    yield previous_handlers
    for signal_number, handler in previous_handlers.items():
        signal.signal(signal_number, handler)
    dtransformer.shutdown()


def fit(folder, *callbacks):
    trainer = new_trainer()
    checkpointing = ModelCheckpoint(folder, every_epochs=None)
    callbacks = [checkpointing, *callbacks]
    trainer.fit(dataset(), epochs=3, verbose=0, callbacks=callbacks, resume=True)
    return trainer


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("step", [8, 12])  # Within an epoch, and at its end.
def test_interrupted_run_resumes_identically(signal_number, step, tmp_path):
    expected, losses, _ = run_uninterrupted()
    with pytest.raises(SystemExit) as raised:
        fit(tmp_path, SendSignal(signal_number, step))
    assert raised.value.code == 75
    assert saved_steps(tmp_path) == [step]
    dtransformer.shutdown()  # A new process starts with this state.
    recorder = StepRecorder()
    trainer = fit(tmp_path, recorder)
    assert recorder.losses == losses[step:]
    assert_same_state(get_state(expected), get_state(trainer))


def test_signal_in_the_last_step_saves_the_complete_run(tmp_path):
    with pytest.raises(SystemExit):
        fit(tmp_path, SendSignal(signal.SIGTERM, 18))
    assert saved_steps(tmp_path) == [18]


def test_signal_handlers_are_restored_after_fit(tmp_path, handlers):
    fit(tmp_path)
    assert {index: signal.getsignal(index) for index in handlers} == handlers


def test_run_without_checkpoints_keeps_the_signal_handlers(handlers):
    class CheckHandler(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            assert signal.getsignal(signal.SIGTERM) == handlers[signal.SIGTERM]

    new_trainer().fit(dataset(), verbose=0, callbacks=[CheckHandler()])
