"""Callbacks of Keras and of this library work in a trainer's `fit`."""

import re

import keras
import numpy as np
import pytest

import dtransformer
from dtransformer.errors import InputError
from dtransformer.trainers import ModelCheckpoint
from tests.tolerances import TRAINING
from tests.trainers.small import (
    Record,
    dense_trainer,
    points,
)


class Interrupt(keras.callbacks.Callback):
    """Interrupts training when an epoch begins, as a killed process would."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise KeyboardInterrupt


class TestCallbacks:
    def fit(self, *callbacks, trainer=None, epochs=6, rate=0.05, resume=False):
        trainer, record = trainer or dense_trainer(keras.optimizers.Adam(rate)), Record()
        options = dict(batch_size=8, shuffle=False, verbose=0, callbacks=[record, *callbacks])
        options.update(epochs=epochs, resume=resume)
        history = trainer.fit(*points(), validation_data=points(seed=1), **options)
        return trainer, record, history

    def test_interrupted_fit_resumes_with_the_optimizer_state(self, tmp_path):
        """The optimizer's moments and the step of its schedule are restored."""

        def trainer():
            rate = keras.optimizers.schedules.PolynomialDecay(0.1, 12)
            return dense_trainer(keras.optimizers.Adam(rate))

        _, uninterrupted, _ = self.fit(trainer=trainer())
        checkpointing = ModelCheckpoint(tmp_path)
        with pytest.raises(KeyboardInterrupt):
            self.fit(checkpointing, Interrupt(epoch=3), trainer=trainer())
        dtransformer.set_seed(1)  # A new process has other initial weights.
        resumed, record, history = self.fit(checkpointing, trainer=trainer(), resume=True)
        assert history.epoch == [3, 4, 5]
        for name in ("step_loss", "learning_rate", "gradient_norm"):
            np.testing.assert_allclose(
                record[name], uninterrupted[name][6:], TRAINING, err_msg=name
            )
        assert int(resumed.optimizer.iterations) == 12

    @pytest.mark.parametrize("is_first", [False, True])
    def test_states_of_keras_callbacks_are_restored(self, is_first, tmp_path):
        """The position of the checkpoint callback in the list does not matter."""

        def callbacks(*checkpointing):
            early_stopping = keras.callbacks.EarlyStopping(
                "val_loss", min_delta=1e9, patience=4, restore_best_weights=True
            )
            reduce_rate = keras.callbacks.ReduceLROnPlateau("val_loss", min_delta=1e9, patience=3)
            return (
                [*checkpointing, early_stopping, reduce_rate]
                if is_first
                else [early_stopping, reduce_rate, *checkpointing]
            )

        uninterrupted, expected_record, history = self.fit(*callbacks(), epochs=9)
        assert history.epoch == [0, 1, 2, 3, 4]
        checkpointing = ModelCheckpoint(tmp_path)
        with pytest.raises(KeyboardInterrupt):
            self.fit(*callbacks(checkpointing), Interrupt(epoch=3), epochs=9)
        trainer, record, history = self.fit(*callbacks(checkpointing), epochs=9, resume=True)
        assert history.epoch == [3, 4]
        np.testing.assert_allclose(
            record["learning_rate"], expected_record["learning_rate"][6:], TRAINING
        )
        for weight, expected in zip(trainer.get_weights(), uninterrupted.get_weights()):
            np.testing.assert_allclose(weight, expected, TRAINING)

    def test_keras_backup_and_restore_raises_an_error(self, tmp_path):
        """It would resume without the optimizer's state."""
        with pytest.raises(InputError, match=r"ModelCheckpoint\(folder\) and fit\(resume=True\)"):
            self.fit(keras.callbacks.BackupAndRestore(tmp_path / "backup"))

    def test_early_stopping_stops_and_restores_weights(self):
        early_stopping = keras.callbacks.EarlyStopping("val_loss", min_delta=1e9, patience=2)
        _, _, history = self.fit(early_stopping)
        assert history.epoch == [0, 1, 2]
        early_stopping = keras.callbacks.EarlyStopping(
            "val_loss", patience=1, restore_best_weights=True, start_from_epoch=0
        )
        trainer, _, history = self.fit(
            early_stopping, rate=1.0, epochs=30
        )  # This rate is too high, so the loss rises.
        lowest = min(history.history["val_loss"])
        assert len(history.epoch) < 30 and history.history["val_loss"][-1] > lowest
        loss = trainer.evaluate(*points(seed=1), verbose=0, return_dict=True)["loss"]
        assert loss == pytest.approx(lowest, TRAINING)

    def test_model_checkpoint_saves_every_and_the_best_epoch(self, tmp_path):
        every_epoch = keras.callbacks.ModelCheckpoint(
            tmp_path / "{epoch}.weights.h5", save_weights_only=True
        )
        best_checkpoint = keras.callbacks.ModelCheckpoint(
            tmp_path / "best.weights.h5",
            monitor="val_loss",
            save_best_only=True,
            save_weights_only=True,
        )
        _, _, history = self.fit(every_epoch, best_checkpoint)
        losses = history.history["val_loss"]
        files = {str(epoch): losses[epoch - 1] for epoch in (1, 3, 6)}
        for name, expected in {**files, "best": min(losses)}.items():
            trainer = dense_trainer()
            trainer.load_weights(tmp_path / f"{name}.weights.h5")
            scores = trainer.evaluate(*points(seed=1), verbose=0, return_dict=True)
            assert scores["loss"] == pytest.approx(expected, TRAINING)

    def test_logged_learning_rate_is_the_rate_of_the_step(self):
        """Schedules and `LearningRateScheduler` set the rate."""
        schedule = keras.optimizers.schedules.PolynomialDecay(0.1, 12)
        _, record, _ = self.fit(trainer=dense_trainer(keras.optimizers.SGD(schedule)))
        expected = [float(schedule(step)) for step in range(12)]
        assert record["learning_rate"] == pytest.approx(expected)
        rates = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
        _, record, _ = self.fit(rates, epochs=3)
        assert record["learning_rate"] == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.1 / 3, 0.1 / 3])

    def test_tensorboard_writes_event_files(self, tmp_path):
        pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
        self.fit(keras.callbacks.TensorBoard(tmp_path, update_freq="batch"), epochs=2)
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        events = b"".join(path.read_bytes() for path in files)
        assert b"epoch_loss" in events and b"epoch_gradient_norm" in events

    def test_progress_is_printed(self, capsys):
        dense_trainer().fit(*points(), epochs=2, verbose=2)
        text = capsys.readouterr().out
        assert "Epoch 2/2" in text and re.search(r"loss: \d", text)
        assert "gradient_norm" in text and "tokens_per_second" in text
