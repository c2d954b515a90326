"""Promise: a resumed run is the uninterrupted one."""

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
    DATA,
    Seen,
    Stop,
    assert_same_state,
    dataset,
    flip,
    new_trainer,
    state,
    steps_of,
    uninterrupted,
)

ENDS_OF_EPOCHS = [pytest.param(step, marks=pytest.mark.long) for step in (5, 10)]


class TestResume:
    @pytest.mark.parametrize(
        ["stop_at", "known_length"], [(6, True), (8, True), (4, False), (6, False)]
    )
    def test_it_is_the_uninterrupted_run(self, stop_at, known_length, tmp_path):
        def data():
            return dataset() if known_length else dataset().filter(lambda x, y: True)

        metrics = {"metrics": True}
        trained, losses, history = uninterrupted(**metrics)
        for epochs, last_step in ((3, stop_at), (3, 100), (4, 100)):
            trainer, seen = new_trainer(**metrics), Seen()
            found = trainer.fit(
                data(),
                epochs=epochs,
                verbose=0,
                callbacks=[seen, ModelCheckpoint(tmp_path, every_steps=5), Stop(last_step)],
                resume=True,
            ).history
            if last_step == 100 and epochs == 3:
                assert seen.losses == losses[stop_at:]
                assert seen.batches == [step % 6 for step in range(stop_at, 18)]
                assert_same_state(state(trained), state(trainer))
                for name in ("loss", "mean_absolute_error"):
                    assert found[name] == history[name][stop_at // 6 :]
        assert seen.batches == list(range(6)), "one more epoch"

    @pytest.mark.long
    def test_several_steps_at_a_time(self, tmp_path):
        """The last call of an epoch counts beyond its end."""

        def fit(last_step, **options):
            trainer, seen = new_trainer(steps_per_execution=4), Seen()
            saving = ModelCheckpoint(
                tmp_path / str(last_step == 100 and not options), every_steps=1
            )
            data = [seen, saving, Stop(last_step)]
            trainer.fit(dataset(), epochs=3, verbose=0, callbacks=data, **options)
            return trainer, seen

        trained, expected = fit(100)
        for stop_at in (4, 6, 10):
            shutil.rmtree(tmp_path / "False", ignore_errors=True)
            fit(stop_at)
            trainer, seen = fit(100, resume=True)
            assert seen.losses == expected.losses[-len(seen.losses) :]
            assert_same_state(state(trained), state(trainer))

    def test_an_epoch_that_is_stopped_and_validated(self, tmp_path):
        _, _, history = uninterrupted()
        found = {}
        for stop_at in (4, 100):
            callbacks = [ModelCheckpoint(tmp_path), Stop(stop_at)]
            found = new_trainer().fit(
                dataset(),
                epochs=3,
                verbose=0,
                validation_data=dataset(2),
                callbacks=callbacks,
                resume=True,
            )
        assert found.history["loss"] == history["loss"], "the validation's sums are not the epoch's"
        assert "val_loss" in Checkpoint(tmp_path / "step-00000018").manifest["metrics"]

    @pytest.mark.parametrize("stop_at", [7, *ENDS_OF_EPOCHS])
    @pytest.mark.parametrize("endless", [True, False])
    def test_steps_per_epoch(self, stop_at, endless, tmp_path):
        def fit(last_step, **options):
            trainer, seen = new_trainer(), Seen()
            trainer.fit(
                dataset(7).repeat() if endless else dataset(5),
                epochs=3,
                steps_per_epoch=5,
                verbose=0,
                callbacks=[seen, Stop(last_step), *options.pop("callbacks", ())],
                **options,
            )
            return trainer, seen

        trained, expected = fit(100)
        saving = [ModelCheckpoint(tmp_path)]
        fit(stop_at, callbacks=saving)
        trainer, seen = fit(100, callbacks=saving, resume=True)
        assert seen.losses == expected.losses[stop_at:]
        assert_same_state(state(trained), state(trainer))

    def test_class_weights(self, tmp_path):
        def fit(last_step, **options):
            network = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
            trainer, seen = Trainer(network), Seen()
            trainer.compile("sgd", "sparse_categorical_crossentropy")
            network.set_weights([np.ones_like(x) for x in network.get_weights()])
            data = dataset().map(lambda x, y: (x, tf.cast(y[:, 0] > 0, tf.int32)))
            callbacks = [seen, ModelCheckpoint(tmp_path, every_steps=1), Stop(last_step)]
            options |= {"epochs": 3, "class_weight": {0: 1.0, 1: 3.0}}
            trainer.fit(data, verbose=0, callbacks=callbacks, **options)
            return seen

        expected = fit(100)
        shutil.rmtree(tmp_path)
        fit(3)
        resumed = fit(100, resume=True)
        assert resumed.batches == [step % 6 for step in range(3, 18)]
        assert resumed.losses == expected.losses[3:]

    def test_means_of_outputs(self, tmp_path):
        def fit(last_step, **options):
            inputs = keras.Input((4,))
            outputs = {name: keras.layers.Dense(2, name=name)(inputs) for name in "ab"}
            trainer = Trainer(keras.Model(inputs, outputs))
            trainer.compile("sgd", dict.fromkeys("ab", "mse"))
            trainer.network.set_weights([np.ones_like(x) for x in trainer.network.get_weights()])
            data = dataset().map(lambda x, y: (x, {"a": y, "b": 2 * y}))
            callbacks = [ModelCheckpoint(tmp_path, every_steps=1), Stop(last_step)]
            return trainer.fit(data, verbose=0, callbacks=callbacks, **options).history

        expected = fit(100)
        shutil.rmtree(tmp_path)
        fit(4)
        found = fit(100, resume=True)
        assert expected["a_loss"] != expected["b_loss"]
        assert found["a_loss"] == expected["a_loss"] and found["b_loss"] == expected["b_loss"]

    def test_batches_of_a_generator_are_skipped_once(self, tmp_path):
        drawn = []

        def rows():
            for number in itertools.count():
                drawn.append(number)
                yield np.full((4, 4), number / 100, "float32"), np.zeros((4, 2), "float32")

        def fit(last_step, epochs=4, **options):
            like = (tf.TensorSpec((4, 4)), tf.TensorSpec((4, 2)))
            data = tf.data.Dataset.from_generator(rows, output_signature=like)
            seen, saving = Seen(), ModelCheckpoint(tmp_path, every_steps=1)
            callbacks = [seen, saving, Stop(last_step)]
            options |= {"epochs": epochs, "steps_per_epoch": 5, "verbose": 0}
            new_trainer().fit(data, callbacks=callbacks, **options)
            return seen.losses

        expected = fit(100)
        shutil.rmtree(tmp_path)
        fit(7)
        drawn.clear()
        assert fit(100, resume=True) == expected[7:]
        assert len(drawn) < 10 + 20 + 10, "from the beginning twice; some are drawn ahead"

    def test_from_a_path_without_saving(self, two):
        trainer, seen = new_trainer(), Seen()
        trainer.fit(dataset(), epochs=2, verbose=0, callbacks=[seen], resume=two)
        _, losses, _ = uninterrupted(2)
        assert seen.losses == losses[6:]

    def test_a_damaged_one_is_set_aside(self, tmp_path):
        saving = ModelCheckpoint(tmp_path, every_steps=2, keep=None)
        trainer = new_trainer()
        trainer.fit(dataset(), epochs=3, verbose=0, callbacks=[saving, Stop(9)])
        flip(tmp_path / "step-00000009" / DATA)
        trainer, seen = new_trainer(), Seen()
        trainer.fit(dataset(), epochs=3, verbose=0, callbacks=[saving, seen], resume=True)
        trained, losses, _ = uninterrupted()
        assert seen.losses == losses[8:]
        assert (tmp_path / "step-00000009.damaged").exists() and 9 not in steps_of(tmp_path)
        assert_same_state(state(trained), state(trainer))

    def test_one_without_its_manifest_is_set_aside(self, tmp_path, capsys):
        saving = ModelCheckpoint(tmp_path, every_steps=2, keep=None)
        new_trainer().fit(dataset(), verbose=0, callbacks=[saving])
        (tmp_path / "step-00000006" / "checkpoint.json").unlink()
        trainer = new_trainer()
        trainer.fit(dataset(), verbose=0, callbacks=[saving], resume=True)
        assert "step-00000006 is damaged and was set aside" in capsys.readouterr().out
        assert steps_of(tmp_path) == [2, 4, 6]

    def test_a_checkpoint_that_is_saved_again_can_be_resumed(self, two):
        trainer = new_trainer()
        trainer.restore(two)
        trainer.save(two / "again")
        assert Checkpoint(two / "again").manifest["position"] == {"epoch": 1, "batch": 0}

    def test_what_cannot_be_resumed(self, two, tmp_path):
        with pytest.raises(InputError, match="needs exactly one ModelCheckpoint"):
            new_trainer().fit(dataset(), resume=True, verbose=0)
        saving = ModelCheckpoint(tmp_path / "other", every_steps=4)
        x, y = np.zeros((24, 4), "float32"), np.zeros((24, 2), "float32")
        new_trainer().fit(dataset(), verbose=0, callbacks=[saving, Stop(4)])
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
        before = state(trainer)
        with pytest.raises(InputError, match="has no data position"):
            trainer.fit(dataset(), verbose=0, resume=tmp_path / "alone")
        assert_same_state(before, state(trainer))
