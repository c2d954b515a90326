"""Promise: a checkpoint is complete or not there, damage is named, misfits are told."""

import json
import os
import pathlib
import resource
import shutil
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.errors import InputError
from dtransformer.trainers import ModelCheckpoint, Trainer
from dtransformer.trainers.checkpoint import Checkpoint, export, folders, writer
from harness.tolerances import PARITY_LOSS

NUM_BATCHES = 6
FORMAT_1 = pathlib.Path(__file__).parent / "format_1"


class Net(keras.Model):
    """A small network with a state of its own besides its weights."""

    def __init__(self, width=8, layers=1):
        super().__init__(name="net")
        self.blocks = [keras.layers.Dense(width, name=f"block_{i}") for i in range(layers)]
        self.norm = keras.layers.BatchNormalization(name="norm")
        self.head = keras.layers.Dense(2, name="head")

    def build(self, input_shape=None):
        size = 4
        with keras.name_scope(self.name, caller=self):
            for layer in (*self.blocks, self.norm, self.head):
                layer.build((None, size))
                size = getattr(layer, "units", size)
        self.built = True

    def call(self, x, training=False):
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x, training=training))

    def get_config(self):
        return {"width": self.blocks[0].units, "layers": len(self.blocks)}


def new_trainer(optimizer=None, jit="auto", metrics=False, steps_per_execution=1, **options):
    keras.utils.set_random_seed(0)
    trainer = Trainer(Net(**options))
    loss = keras.losses.MeanSquaredError()
    trainer.compile(
        optimizer or keras.optimizers.Adam(0.01),
        loss,
        metrics=[keras.metrics.MeanAbsoluteError()] if metrics else None,
        jit_compile=jit,
        steps_per_execution=steps_per_execution,
    )
    return trainer


def dataset(num_batches=NUM_BATCHES):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4 * num_batches, 4)), rng.normal(size=(4 * num_batches, 2))
    data = tf.data.Dataset.from_tensor_slices((x.astype("float32"), y.astype("float32")))
    return data.batch(4)


def state(trainer):
    """All weights and states of the optimizer."""
    trainer.training_state()  # builds what there is to compare
    weights = {variable.path: variable.numpy() for variable in trainer.network.variables}
    return weights | {
        f"optimizer/{number}": variable.numpy()
        for number, variable in enumerate(trainer.optimizer.variables)
    }


def assert_same_state(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(other[name], value, err_msg=name)


@pytest.fixture(scope="module")
def trained():
    """A trainer after an epoch. Tests do not change it."""
    trainer = new_trainer()
    trainer.fit(dataset(), verbose=0)
    return trainer


@pytest.fixture
def two(trained, tmp_path):
    """A folder with two checkpoints, and the state of both."""
    for step in (6, 7):
        trained.save(tmp_path / f"step-{step:08d}")
    return tmp_path


def newest(folder):
    return folder / "step-00000007"


class TestFormat:
    def test_it_is_tensorflows_own_with_full_tensors(self, trained, two):
        reader = tf.train.load_checkpoint(str(newest(two)))
        network = trained.network
        kernel = reader.get_tensor("network/block_0/kernel")
        np.testing.assert_array_equal(kernel, network.blocks[0].kernel.numpy())
        mean = reader.get_tensor("network/norm/moving_mean")
        np.testing.assert_array_equal(mean, network.norm.moving_mean.numpy())
        assert reader.get_tensor("optimizer/iterations") == NUM_BATCHES
        momentum = trained.optimizer._momentums[0].numpy()
        found = reader.get_tensor("optimizer/momentums/block_0/kernel")
        np.testing.assert_array_equal(found, momentum)

    def test_a_new_trainer_has_the_state(self, trained, two):
        trainer = new_trainer()
        restored = trainer.restore(two)
        assert_same_state(state(trained), state(trainer))
        assert restored.step == NUM_BATCHES
        assert restored.position == {"epoch": 1, "batch": 0}
        assert restored.path == str(newest(two))

    def test_the_manifest_tells_what_it_is(self, two):
        manifest = Checkpoint(newest(two)).manifest
        assert manifest["optimizer"]["class_name"] == "Adam"
        assert manifest["parallel"]["model_parallel"] == 1
        assert manifest["network"]["config"]["width"] == 8
        assert manifest["seed"] == 0

    def test_a_checkpoint_of_format_1_is_read_and_written(self, tmp_path):
        """`format_1` was saved after one epoch of `new_trainer(metrics=True)`."""
        trained, losses, _ = uninterrupted(epochs=2, metrics=True)
        trainer, seen = new_trainer(metrics=True), Seen()
        trainer.fit(dataset(), epochs=2, verbose=0, callbacks=[seen], resume=FORMAT_1)
        np.testing.assert_allclose(seen.losses, losses[NUM_BATCHES:], rtol=PARITY_LOSS)
        trained.save(tmp_path / "one")
        old, new = Checkpoint(FORMAT_1).manifest, Checkpoint(tmp_path / "one").manifest
        assert new.keys() == old.keys()
        assert new["tensors"] == old["tensors"]
        assert new["files"].keys() == old["files"].keys()

    @pytest.mark.parametrize(
        "optimizer",
        [
            "SGD",
            "RMSprop",
            "Nadam",
            "Adafactor",
            "Lamb",
            "Ftrl",
            "Adadelta",
            "Adamax",
            "Lion",
            "Muon",
        ],
    )
    def test_every_optimizers_state_travels(self, optimizer, tmp_path):
        kind = getattr(keras.optimizers, optimizer)
        options = {"momentum": 0.9} if optimizer == "SGD" else {}
        trainer = new_trainer(kind(0.01, **options))
        trainer.fit(dataset(), verbose=0)
        trainer.save(tmp_path / "one")
        other = new_trainer(kind(0.01, **options))
        other.restore(tmp_path / "one")
        assert_same_state(state(trainer), state(other))
        for one in (trainer, other):
            one.fit(dataset(), verbose=0)
        assert_same_state(state(trainer), state(other))

    def test_averages_and_the_scale_of_the_loss_travel(self, tmp_path):
        def optimizer():
            inner = keras.optimizers.SGD(0.01, use_ema=True)
            return keras.optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=4)

        trainer = new_trainer(optimizer())
        trainer.fit(dataset(), verbose=0)
        trainer.save(tmp_path / "one")
        other = new_trainer(optimizer())
        other.restore(tmp_path / "one")
        assert_same_state(state(trainer), state(other))
        assert float(other.optimizer.dynamic_scale) == 2.0**16

    def test_assets_are_part_of_it(self, trained, tmp_path):
        class Words:
            def save(self, path):
                path.mkdir()
                (path / "words.txt").write_text("a b c")

        trained.save(tmp_path / "one", assets={"tokenizer": Words()})
        words = tmp_path / "one" / "tokenizer" / "words.txt"
        assert words.read_text() == "a b c"
        words.write_text("a b d")
        with pytest.raises(InputError, match="words.txt is damaged"):
            new_trainer().restore(tmp_path / "one")


def flip(path, position=0.5):
    content = bytearray(path.read_bytes())
    content[int(len(content) * position)] ^= 1
    path.write_bytes(content)


DATA, INDEX = "state.data-00000-of-00001", "state.index"
DAMAGES = {
    "a flipped byte": (DATA, lambda path: flip(path), "is damaged"),
    "a truncated file": (DATA, lambda path: os.truncate(path, 100), "has 100 bytes"),
    "a missing file": (DATA, lambda path: path.unlink(), "is missing"),
    "a missing index": (INDEX, lambda path: path.unlink(), "is missing"),
    "a flipped byte of the index": (INDEX, lambda path: flip(path), "is damaged"),
    "a flipped byte of the manifest": ("checkpoint.json", lambda path: flip(path), "is damaged"),
    "half a manifest": ("checkpoint.json", lambda path: os.truncate(path, 99), "is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
class TestDamage:
    def test_the_one_before_is_taken(self, damage, trained, two, capsys):
        name, harm, message = DAMAGES[damage]
        harm(newest(two) / name)
        trainer = new_trainer()
        restored = trainer.restore(two)
        assert_same_state(state(trained), state(trainer))
        told = capsys.readouterr().out
        assert f"{newest(two) / name}" in told and message in told
        assert f"Taken instead: {two / 'step-00000006'}" in told
        assert restored.damaged == [str(newest(two))]

    def test_it_is_named_and_nothing_changes(self, damage, two):
        name, harm, message = DAMAGES[damage]
        harm(newest(two) / name)
        trainer = new_trainer()
        before = state(trainer)
        with pytest.raises(InputError) as error:
            trainer.restore(newest(two))
        assert f"{newest(two) / name}" in str(error.value) and message in str(error.value)
        assert_same_state(before, state(trainer))


def test_a_checkpoint_without_its_manifest_is_none(two):
    (newest(two) / "checkpoint.json").unlink()
    assert [step for step, _ in folders.saved_steps(two)] == [6]
    with pytest.raises(InputError, match="there is no checkpoint here"):
        new_trainer().restore(newest(two))


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        new_trainer().restore(tmp_path / "nothing")
    with pytest.raises(InputError, match="no checkpoint here"):
        new_trainer().restore(tmp_path)


class TestStrict:
    def test_all_that_does_not_fit_is_listed(self, two):
        cases = {
            "the checkpoint lacks 6: network/block_1/bias": new_trainer(layers=2),
            "block_0/kernel (4, 9), there (4, 8)": new_trainer(width=9),
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
            ValueError, match="two variables of .* have the name network/same/kernel"
        ):
            trainer.save(tmp_path / "one")


class TestWriting:
    @pytest.mark.parametrize("place", ["write_shards", "merge_shards", "commit", "rename"])
    def test_a_failure_anywhere_leaves_the_last_one(self, place, trained, tmp_path, monkeypatch):
        path = tmp_path / "step-00000006"
        trained.save(path)
        before = path.joinpath("checkpoint.json").read_text()

        def fail(*args):
            raise OSError("no luck")

        module = {"commit": folders, "rename": folders.os}.get(place, writer)
        with monkeypatch.context() as patch:
            patch.setattr(module, place, fail)
            with pytest.raises(InputError, match="could not be written: OSError: no luck"):
                trained.save(path)
        assert Checkpoint(path).manifest == json.loads(before)["checkpoint"]
        assert not Checkpoint(path).problems()
        trained.save(path)
        assert [file.name for file in tmp_path.iterdir()] == [path.name], "nothing is left over"

    def test_a_kill_while_one_is_replaced(self, trained, tmp_path, monkeypatch):
        """The only moment at which there is none of the path's name."""
        path = tmp_path / "step-00000006"
        trained.save(path)
        os.rename(path, folders.replaced(path))
        assert folders.saved_steps(tmp_path) == [(6, path)]
        new_trainer().restore(tmp_path)
        trained.save(path)
        assert [file.name for file in tmp_path.iterdir()] == [path.name]

    def test_a_full_disk(self, trained, tmp_path, monkeypatch):
        usage = shutil.disk_usage(tmp_path)._replace(free=100)
        monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: usage)
        before = state(trained)
        with pytest.raises(InputError, match="the disk has 0 MiB left, and a checkpoint takes"):
            trained.save(tmp_path / "one")
        assert list(tmp_path.iterdir()) == []
        assert_same_state(before, state(trained))

    def test_a_disk_that_gets_full_meanwhile(self, trained, tmp_path):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        try:
            with pytest.raises(InputError, match="could not be written: .*File too large"):
                trained.save(tmp_path / "one")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert list(tmp_path.iterdir()) == []

    def test_what_is_no_folder(self, trained, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(InputError, match="cannot be written here"):
            trained.save(tmp_path / "file" / "one")
        with pytest.raises(InputError, match="something that is no checkpoint"):
            trained.save(tmp_path / "file")
        trained.save(tmp_path / "one")
        with pytest.raises(InputError, match="there is a checkpoint already"):
            trained.save(tmp_path / "one", overwrite=False)

    @pytest.mark.parametrize("jit_compile", [False, True])
    def test_training_goes_on_meanwhile(self, jit_compile, tmp_path, monkeypatch):
        trainer, may_write = new_trainer(jit=jit_compile), threading.Event()
        trainer.fit(dataset(), verbose=0)
        before, write = state(trainer), writer.write_shards
        monkeypatch.setattr(writer, "write_shards", lambda save: may_write.wait(60) and write(save))
        trainer.save(tmp_path / "one", wait=False)
        for batch in dataset():
            trainer.train_on_batch(*batch)
        after = state(trainer)
        assert not (tmp_path / "one").exists()
        may_write.set()
        trainer.wait_until_saved()
        other = new_trainer()
        other.restore(tmp_path / "one")
        assert_same_state(before, state(other))
        assert any((after[name] != before[name]).any() for name in after)


class Stop(keras.callbacks.Callback):
    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = int(self.model.optimizer.iterations) >= self.steps


class Seen(keras.callbacks.Callback):
    """Keeps what callbacks are told of every step."""

    def __init__(self):
        super().__init__()
        self.batches, self.losses = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(batch)
        self.losses.append(logs["step_loss"])


def steps_of(folder):
    return [step for step, _ in folders.saved_steps(folder)]


class TestCallback:
    def test_every_few_steps_and_the_last_ones_are_kept(self, tmp_path):
        saving = ModelCheckpoint(tmp_path, every_steps=2, every_epochs=None, keep=2)
        new_trainer().fit(dataset(7), epochs=1, verbose=0, callbacks=[saving])
        assert steps_of(tmp_path) == [6, 7], "the last step is saved, too"

    def test_every_few_minutes(self, tmp_path):
        saving = ModelCheckpoint(tmp_path, every_minutes=1e-9, every_epochs=None, keep=None)
        new_trainer().fit(dataset(), verbose=0, callbacks=[saving])
        assert len(steps_of(tmp_path)) > 2
        other = tmp_path / "other"
        saving = ModelCheckpoint(other, every_minutes=60, every_epochs=None, keep=None)
        new_trainer().fit(dataset(), verbose=0, callbacks=[saving])
        assert steps_of(other) == [6]

    def test_the_best_is_kept_besides(self, tmp_path):
        class Score(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                logs["val_bleu"] = [3.0, 9.0, 5.0, float("nan"), 4.0][epoch]

        saving = ModelCheckpoint(tmp_path, keep=1, monitor="val_bleu")
        new_trainer().fit(dataset(2), epochs=5, verbose=0, callbacks=[Score(), saving])
        assert steps_of(tmp_path) == [4, 10]
        assert Checkpoint(tmp_path / "step-00000004").manifest["metrics"]["val_bleu"] == 9.0

    def test_wrong_arguments(self, tmp_path):
        for options, message in (
            ({"every_steps": 0}, "every_steps must be an integer"),
            ({"every_minutes": 0}, "every_minutes must be greater than 0"),
            ({"mode": "best"}, "mode must be"),
        ):
            with pytest.raises(InputError, match=message):
                ModelCheckpoint(tmp_path, **options)
        saving = ModelCheckpoint(tmp_path, monitor="val_los")
        with pytest.warns(UserWarning, match="'val_los' is not in the logs"):
            new_trainer().fit(dataset(), verbose=0, callbacks=[saving])

    def test_a_new_run_does_not_mix_with_an_old_one(self, two):
        with pytest.raises(InputError, match=r"step 7, and training is at step 0: .*resume=True"):
            new_trainer().fit(dataset(), verbose=0, callbacks=[ModelCheckpoint(two)])


def uninterrupted(epochs=3, **options):
    trainer, seen = new_trainer(**options), Seen()
    history = trainer.fit(dataset(), epochs=epochs, verbose=0, callbacks=[seen])
    return trainer, seen.losses, history.history


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

    @pytest.mark.parametrize("stop_at", [5, 7, 10])
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
        assert "step-00000006 is damaged, and set aside" in capsys.readouterr().out
        assert steps_of(tmp_path) == [2, 4, 6]

    def test_a_checkpoint_that_is_saved_again_can_be_resumed(self, two):
        trainer = new_trainer()
        trainer.restore(two)
        trainer.save(two / "again")
        assert Checkpoint(two / "again").manifest["position"] == {"epoch": 1, "batch": 0}

    def test_what_cannot_be_resumed(self, two, tmp_path):
        with pytest.raises(InputError, match="resume=True needs one ModelCheckpoint"):
            new_trainer().fit(dataset(), resume=True, verbose=0)
        saving = ModelCheckpoint(tmp_path / "other", every_steps=4)
        x, y = np.zeros((24, 4), "float32"), np.zeros((24, 2), "float32")
        new_trainer().fit(dataset(), verbose=0, callbacks=[saving, Stop(4)])
        with pytest.raises(
            InputError, match="batch 4 of epoch 1, and a ndarray cannot begin there"
        ):
            new_trainer().fit(x, y, batch_size=4, verbose=0, resume=tmp_path / "other")
        with pytest.raises(InputError, match="stood at batch 4, and an epoch of the data has 3"):
            new_trainer().fit(dataset(3), verbose=0, resume=tmp_path / "other")
        trainer = new_trainer()
        trainer.train_on_batch(*next(iter(dataset())))
        trainer.save(tmp_path / "alone")
        trainer = new_trainer()
        before = state(trainer)
        with pytest.raises(InputError, match="does not tell where its data stood"):
            trainer.fit(dataset(), verbose=0, resume=tmp_path / "alone")
        assert_same_state(before, state(trainer))


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
        with pytest.raises(InputError, match="is not a safetensors file"):
            new_trainer().load_weights(two / "model.safetensors")
        flip(newest(two) / DATA)
        with pytest.raises(InputError, match="is damaged"):
            export(two, two / "again.safetensors")
