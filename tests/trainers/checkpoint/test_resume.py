"""A resumed run equals the uninterrupted run."""

import itertools
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.errors import InputError
from dtransformer.trainers import ModelCheckpoint, Trainer
from dtransformer.trainers.checkpoint import Checkpoint
from tests.trainers.checkpoint.small import (
    DATA_FILE,
    StepRecorder,
    StopAfterSteps,
    assert_same_state,
    dataset,
    flip_bit,
    get_state,
    new_trainer,
    run_uninterrupted,
    saved_steps,
)

ENDS_OF_EPOCHS = [pytest.param(step, marks=pytest.mark.long) for step in (5, 10)]


class TestResume:
    @pytest.mark.parametrize(
        ["stop_at", "known_length"], [(6, True), (8, True), (4, False), (6, False)]
    )
    def test_resumed_run_equals_the_uninterrupted_run(self, stop_at, known_length, tmp_path):
        def data():
            return dataset() if known_length else dataset().filter(lambda x, y: True)

        metrics = {"metrics": True}
        trained, losses, history = run_uninterrupted(**metrics)
        for epochs, last_step in ((3, stop_at), (3, 100), (4, 100)):
            trainer, recorder = new_trainer(**metrics), StepRecorder()
            actual = trainer.fit(
                data(),
                epochs=epochs,
                verbose=0,
                callbacks=[
                    recorder,
                    ModelCheckpoint(tmp_path, every_steps=5),
                    StopAfterSteps(last_step),
                ],
                resume=True,
            ).history
            if last_step == 100 and epochs == 3:
                assert recorder.losses == losses[stop_at:]
                assert recorder.batches == [step % 6 for step in range(stop_at, 18)]
                assert_same_state(get_state(trained), get_state(trainer))
                for name in ("loss", "mean_absolute_error"):
                    assert actual[name] == history[name][stop_at // 6 :]
        assert recorder.batches == list(range(6)), "One more epoch must start at its first batch."

    @pytest.mark.long
    def test_resume_with_several_steps_per_execution(self, tmp_path):
        """The last call of an epoch has fewer steps than the others."""

        def fit(last_step, **options):
            trainer, recorder = new_trainer(steps_per_execution=4), StepRecorder()
            checkpointing = ModelCheckpoint(
                tmp_path / str(last_step == 100 and not options), every_steps=1
            )
            data = [recorder, checkpointing, StopAfterSteps(last_step)]
            trainer.fit(dataset(), epochs=3, verbose=0, callbacks=data, **options)
            return trainer, recorder

        trained, expected = fit(100)
        for stop_at in (4, 6, 10):
            shutil.rmtree(tmp_path / "False", ignore_errors=True)
            fit(stop_at)
            trainer, recorder = fit(100, resume=True)
            assert recorder.losses == expected.losses[-len(recorder.losses) :]
            assert_same_state(get_state(trained), get_state(trainer))

    def test_resume_within_an_epoch_with_validation(self, tmp_path):
        _, _, history = run_uninterrupted()
        actual = {}
        for stop_at in (4, 100):
            callbacks = [ModelCheckpoint(tmp_path), StopAfterSteps(stop_at)]
            actual = new_trainer().fit(
                dataset(),
                epochs=3,
                verbose=0,
                validation_data=dataset(2),
                callbacks=callbacks,
                resume=True,
            )
        assert actual.history["loss"] == history["loss"], "Validation changed the epoch's sums."
        assert "val_loss" in Checkpoint(tmp_path / "step-00000018").manifest["metrics"]

    @pytest.mark.parametrize("stop_at", [7, *ENDS_OF_EPOCHS])
    @pytest.mark.parametrize("endless", [True, False])
    def test_resume_with_steps_per_epoch(self, stop_at, endless, tmp_path):
        def fit(last_step, **options):
            trainer, recorder = new_trainer(), StepRecorder()
            trainer.fit(
                dataset(7).repeat() if endless else dataset(5),
                epochs=3,
                steps_per_epoch=5,
                verbose=0,
                callbacks=[recorder, StopAfterSteps(last_step), *options.pop("callbacks", ())],
                **options,
            )
            return trainer, recorder

        trained, expected = fit(100)
        checkpointing = [ModelCheckpoint(tmp_path)]
        fit(stop_at, callbacks=checkpointing)
        trainer, recorder = fit(100, callbacks=checkpointing, resume=True)
        assert recorder.losses == expected.losses[stop_at:]
        assert_same_state(get_state(trained), get_state(trainer))

    def test_resume_with_class_weights(self, tmp_path):
        def fit(last_step, **options):
            network = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
            trainer, recorder = Trainer(network), StepRecorder()
            trainer.compile("sgd", "sparse_categorical_crossentropy")
            network.set_weights([np.ones_like(x) for x in network.get_weights()])
            data = dataset().map(lambda x, y: (x, tf.cast(y[:, 0] > 0, tf.int32)))
            callbacks = [
                recorder,
                ModelCheckpoint(tmp_path, every_steps=1),
                StopAfterSteps(last_step),
            ]
            options |= {"epochs": 3, "class_weight": {0: 1.0, 1: 3.0}}
            trainer.fit(data, verbose=0, callbacks=callbacks, **options)
            return recorder

        expected = fit(100)
        shutil.rmtree(tmp_path)
        fit(3)
        resumed = fit(100, resume=True)
        assert resumed.batches == [step % 6 for step in range(3, 18)]
        assert resumed.losses == expected.losses[3:]

    def test_resume_restores_the_mean_losses_of_outputs(self, tmp_path):
        def fit(last_step, **options):
            inputs = keras.Input((4,))
            outputs = {name: keras.layers.Dense(2, name=name)(inputs) for name in "ab"}
            trainer = Trainer(keras.Model(inputs, outputs))
            trainer.compile("sgd", dict.fromkeys("ab", "mse"))
            trainer.network.set_weights([np.ones_like(x) for x in trainer.network.get_weights()])
            data = dataset().map(lambda x, y: (x, {"a": y, "b": 2 * y}))
            callbacks = [ModelCheckpoint(tmp_path, every_steps=1), StopAfterSteps(last_step)]
            return trainer.fit(data, verbose=0, callbacks=callbacks, **options).history

        expected = fit(100)
        shutil.rmtree(tmp_path)
        fit(4)
        actual = fit(100, resume=True)
        assert expected["a_loss"] != expected["b_loss"]
        assert actual["a_loss"] == expected["a_loss"] and actual["b_loss"] == expected["b_loss"]

    def test_generator_batches_are_skipped_once(self, tmp_path):
        drawn = []

        def rows():
            for index in itertools.count():
                drawn.append(index)
                yield np.full((4, 4), index / 100, "float32"), np.zeros((4, 2), "float32")

        def fit(last_step, epochs=4, **options):
            signature = (tf.TensorSpec((4, 4)), tf.TensorSpec((4, 2)))
            data = tf.data.Dataset.from_generator(rows, output_signature=signature)
            recorder, checkpointing = StepRecorder(), ModelCheckpoint(tmp_path, every_steps=1)
            callbacks = [recorder, checkpointing, StopAfterSteps(last_step)]
            options |= {"epochs": epochs, "steps_per_epoch": 5, "verbose": 0}
            new_trainer().fit(data, callbacks=callbacks, **options)
            return recorder.losses

        expected = fit(100)
        shutil.rmtree(tmp_path)
        fit(7)
        drawn.clear()
        assert fit(100, resume=True) == expected[7:]
        assert len(drawn) < 10 + 20 + 10, "Two passes and some prefetched batches."

    def test_resume_from_a_path_without_saving(self, two_checkpoints):
        trainer, recorder = new_trainer(), StepRecorder()
        trainer.fit(dataset(), epochs=2, verbose=0, callbacks=[recorder], resume=two_checkpoints)
        _, losses, _ = run_uninterrupted(2)
        assert recorder.losses == losses[6:]

    def test_damaged_checkpoint_is_set_aside(self, tmp_path):
        checkpointing = ModelCheckpoint(tmp_path, every_steps=2, keep=None)
        trainer = new_trainer()
        trainer.fit(dataset(), epochs=3, verbose=0, callbacks=[checkpointing, StopAfterSteps(9)])
        flip_bit(tmp_path / "step-00000009" / DATA_FILE)
        trainer, recorder = new_trainer(), StepRecorder()
        trainer.fit(
            dataset(), epochs=3, verbose=0, callbacks=[checkpointing, recorder], resume=True
        )
        trained, losses, _ = run_uninterrupted()
        assert recorder.losses == losses[8:]
        assert (tmp_path / "step-00000009.damaged").exists() and 9 not in saved_steps(tmp_path)
        assert_same_state(get_state(trained), get_state(trainer))

    def test_checkpoint_without_manifest_is_set_aside(self, tmp_path, capsys):
        checkpointing = ModelCheckpoint(tmp_path, every_steps=2, keep=None)
        new_trainer().fit(dataset(), verbose=0, callbacks=[checkpointing])
        (tmp_path / "step-00000006" / "checkpoint.json").unlink()
        trainer = new_trainer()
        trainer.fit(dataset(), verbose=0, callbacks=[checkpointing], resume=True)
        assert "step-00000006 is damaged and was set aside" in capsys.readouterr().out
        assert saved_steps(tmp_path) == [2, 4, 6]

    def test_saving_after_restore_keeps_the_data_position(self, two_checkpoints):
        trainer = new_trainer()
        trainer.restore(two_checkpoints)
        trainer.save(two_checkpoints / "again")
        assert Checkpoint(two_checkpoints / "again").manifest["position"] == {
            "epoch": 1,
            "batch": 0,
        }

    def test_invalid_resume_raises_an_error(self, two_checkpoints, tmp_path):
        with pytest.raises(InputError, match="needs exactly one ModelCheckpoint"):
            new_trainer().fit(dataset(), resume=True, verbose=0)
        checkpointing = ModelCheckpoint(tmp_path / "other", every_steps=4)
        x, y = np.zeros((24, 4), "float32"), np.zeros((24, 2), "float32")
        new_trainer().fit(dataset(), verbose=0, callbacks=[checkpointing, StopAfterSteps(4)])
        with pytest.raises(
            InputError, match="batch 4 of epoch 1, and a ndarray cannot start there"
        ):
            new_trainer().fit(x, y, batch_size=4, verbose=0, resume=tmp_path / "other")
        with pytest.raises(InputError, match="saved at batch 4, but an epoch of the data has 3"):
            new_trainer().fit(dataset(3), verbose=0, resume=tmp_path / "other")
        trainer = new_trainer()
        trainer.train_on_batch(*next(iter(dataset())))
        trainer.save(tmp_path / "alone")
        trainer = new_trainer()
        before = get_state(trainer)
        with pytest.raises(InputError, match="has no data position"):
            trainer.fit(dataset(), verbose=0, resume=tmp_path / "alone")
        assert_same_state(before, get_state(trainer))
