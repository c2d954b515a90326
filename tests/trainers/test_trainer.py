"""Trainers respect frozen weights and seeds, and reject unsupported networks and options."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtransformer
from dtransformer import parallel_config
from dtransformer.layers import Dropout
from dtransformer.parallel.runtime import job
from dtransformer.trainers import Trainer
from dtransformer.trainers.compile_checks import check_network
from dtransformer.trainers.data import peek
from dtransformer.trainers.engines.local import LocalEngine
from dtransformer.trainers.forward_step import ForwardStep
from dtransformer.trainers.optimizer.checks import check_constraints
from dtransformer.trainers.row_sharding import RowSharding
from harness.quick import calls_of_traces
from tests.tolerances import TRAINING
from tests.trainers.small import (
    Record,
    dataset,
    dense_network,
    dense_trainer,
    get_weights_by_path,
    points,
    small_model,
    translation_trainer,
)


def test_frozen_layers_do_not_change():
    x, y = points()
    network = dense_network()
    trainer = dense_trainer(network=network)
    trainer.fit(x, y, verbose=0)
    network.layers[0].trainable = False
    trainer.compile(keras.optimizers.Adam(0.05), "mse")
    before = [layer.get_weights() for layer in network.layers]
    history = trainer.fit(x, y, epochs=4, verbose=0).history
    after = [layer.get_weights() for layer in network.layers]
    for old, new in zip(before[0], after[0], strict=True):
        np.testing.assert_array_equal(new, old)
    assert all((new != old).any() for old, new in zip(before[1], after[1], strict=True))
    assert history["loss"][-1] < history["loss"][0]


def test_frozen_embedding_does_not_change():
    network = small_model()
    network.build()
    network.source_embedding.trainable = False
    before = get_weights_by_path(network)
    translation_trainer(network=network).fit(dataset(), verbose=0)
    for path, value in get_weights_by_path(network).items():
        is_frozen = "source_embedding" in path
        # The key's bias has no gradient, because it shifts all scores of a query equally.
        if "key_bias" not in path:
            assert np.array_equal(value, before[path]) == is_frozen, path


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_unused_weights_cause_a_warning_and_do_not_change(run_eagerly):
    class UnusedLayer(keras.Model):
        def __init__(self):
            super().__init__()
            self.used = keras.layers.Dense(1, name="used")
            self.forgotten = keras.layers.Dense(1, name="forgotten")

        def build(self, input_shape):
            self.used.build(input_shape)
            self.forgotten.build(input_shape)
            self.built = True

        def call(self, x):
            return self.used(x)

    network = UnusedLayer()
    network.build((None, 3))
    before = get_weights_by_path(network)
    trainer = dense_trainer(network=network, run_eagerly=run_eagerly)
    with pytest.warns(UserWarning, match="weights [^ ]*forgotten/kernel, [^ ]*forgotten/bias[.]"):
        trainer.fit(*points(), verbose=0)
    for path, value in get_weights_by_path(network).items():
        assert np.array_equal(value, before[path]) == ("forgotten" in path), path


@pytest.mark.parametrize(
    "loss, message",
    [
        (lambda: keras.losses.MeanSquaredError(reduction=None), "reduction=None.*mean"),
        (lambda: "squared_error_or_so", "squared_error_or_so"),
    ],
    ids=["none", "unknown"],
)
def test_unsupported_losses_raise_errors(loss, message):
    with pytest.raises(ValueError, match=message):
        dense_trainer(loss=loss())


def test_warns_if_network_overrides_fit():
    custom_class = type("Custom", (keras.Sequential,), {"fit": lambda self: None})
    with pytest.warns(UserWarning, match="^Custom overrides fit, which the trainer does not call"):
        Trainer(custom_class([keras.layers.Dense(1)]))


def test_peek_keeps_the_order_of_a_data_loader():
    torch = pytest.importorskip("torch")
    rows = torch.utils.data.TensorDataset(torch.arange(12).reshape(6, 2), torch.arange(6))
    loader = torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True)
    torch.manual_seed(1)
    expected = [labels.tolist() for _, labels in loader]
    torch.manual_seed(1)
    (inputs, labels), batches = peek(loader)
    assert inputs.shape == (2, 2) and labels.shape == (2,)
    assert [labels.tolist() for _, labels in batches] == expected


@pytest.mark.parametrize("method", ["train_step", "test_step", "compute_loss", "compute_metrics"])
def test_networks_with_custom_steps_raise_an_error(method):
    custom_class = type("Custom", (keras.Model,), {method: lambda self, *args, **kwargs: None})
    with pytest.raises(ValueError, match=f"Custom overrides `{method}`"):
        Trainer(custom_class())


def test_fit_and_evaluate_before_compile_raise_an_error():
    trainer = Trainer(dense_network())
    for call in (trainer.fit, trainer.evaluate):
        with pytest.raises(ValueError, match="compile"):
            call(*points(), verbose=0)


def test_config_that_init_did_not_apply_raises_an_error():
    with parallel_config(expert_parallel=2):
        with pytest.raises(RuntimeError, match="expert_parallel=2"):
            Trainer(dense_network())


def test_seed_determines_the_dropout_masks():
    def losses(seed):
        dtransformer.set_seed(seed)
        network = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(8, kernel_initializer=keras.initializers.GlorotUniform(1)),
                Dropout(0.5, name="the_dropout"),
                keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(2)),
            ],
            name="dropping",
        )
        record = Record()
        trainer = dense_trainer(keras.optimizers.SGD(0.0), network=network)
        data = tf.data.Dataset.from_tensors(points(8))
        trainer.fit(data, epochs=4, verbose=0, callbacks=[record])
        return record["step_loss"]

    losses_0, losses_0_again, losses_1 = losses(0), losses(0), losses(1)
    assert losses_0 == losses_0_again
    assert all(a != b for a, b in zip(losses_0, losses_1))
    assert len(set(losses_0)) == 4, "Each step must have other masks."


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict", "train_on_batch"])
def test_config_change_after_creating_the_trainer_raises_an_error(call):
    trainer = dense_trainer()
    arguments = points(4)[:1] if call == "predict" else points(4)
    with parallel_config(recompute=True):
        with pytest.raises(
            RuntimeError, match="recompute=False.*current value is True.*Create a new Trainer"
        ):
            getattr(trainer, call)(*arguments)
    trainer.fit(*points(4), verbose=0)


def test_micro_batches_do_not_change_mse_losses():
    def losses(**fields):
        with parallel_config(**fields):
            network = dense_network()
            trainer = dense_trainer(keras.optimizers.SGD(0.1), "mse", network=network)
            record = Record()
            trainer.fit(*points(8), batch_size=8, epochs=3, verbose=0, callbacks=[record])
        return record["step_loss"]

    np.testing.assert_allclose(losses(micro_batch_num=4), losses(), rtol=TRAINING)


def test_missing_init_under_horovodrun_raises_an_error(monkeypatch):
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"2 ranks.*dtransformer\.init\(\)"):
        Trainer(dense_network())


def test_batch_normalization_on_several_data_shards_raises_an_error(monkeypatch):
    network = keras.Sequential(
        [keras.Input((3,)), keras.layers.BatchNormalization(name="the_norm")]
    )
    monkeypatch.setattr(job, "data_shard", lambda: (0, 2))
    with pytest.raises(ValueError, match="the_norm.*synchronized=True.*LayerNormalization"):
        check_network(network)
    network.layers[-1].synchronized = True
    check_network(network)
    monkeypatch.setattr(job, "mesh", lambda: "a mesh")
    with pytest.raises(ValueError, match="2 replicas of a mesh.*optimizer_shard=3"):
        check_network(network)
    network.layers[-1].trainable = False
    check_network(network)


def test_xla_with_batch_normalization_on_data_ranks_raises_an_error(monkeypatch):
    layers = [keras.Input((3,)), keras.layers.BatchNormalization(synchronized=True)]
    engine = LocalEngine(ForwardStep(keras.Sequential(layers)), jit_compile=True)
    engine.build(None)
    monkeypatch.setattr(job, "data_shard", lambda: (0, 2))
    with pytest.raises(ValueError, match="synchronized BatchNormalization.*jit_compile='auto'"):
        engine.build(None)


def test_constraints_on_a_mesh_raise_an_error(monkeypatch):
    weight = keras.Variable([1.0], name="the_weight")
    weight.constraint = keras.constraints.NonNeg()
    check_constraints([weight])
    monkeypatch.setattr(job, "mesh", lambda: "a mesh")
    with pytest.raises(ValueError, match="the_weight.*optimizer_shard_partition='whole'"):
        check_constraints([weight])


def test_datasets_of_unknown_length_count_no_empty_batch():
    """The last, empty batch of a generator does not count."""
    x, y = points(num_classes=4)
    batches = [(x[i : i + 5], y[i : i + 5]) for i in range(0, 15, 5)]
    signature = tf.TensorSpec([5, *x.shape[1:]], "float32"), tf.TensorSpec([5], "int32")
    endless = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
    trainer = Trainer(dense_network(4))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainer.compile("sgd", loss, metrics=["accuracy"])
    actual = trainer.evaluate(endless, verbose=0)
    np.testing.assert_allclose(
        actual, trainer.evaluate(x[:15], y[:15], batch_size=5, verbose=0), 1e-6
    )


def test_error_in_a_step_names_the_source_line(monkeypatch):
    # The quick suite removes these functions from traces.
    for module, name in calls_of_traces():
        monkeypatch.setattr(module, name, inspect.unwrap(getattr(module, name)))

    class Fails(keras.layers.Layer):
        def call(self, x):
            return tf.reshape(x, [tf.size(x) + 1])

    trainer = Trainer(keras.Sequential([dense_network(4), Fails()]))
    trainer.compile("sgd", "mse")
    with pytest.raises(tf.errors.InvalidArgumentError, match="test_trainer.py"):
        trainer.fit(*points(), verbose=0)


def test_training_and_validation_data_may_have_different_sharding(monkeypatch):
    """Each sharding has a compiled step, and training reuses its step after validation."""
    x, y = points()
    monkeypatch.setattr(
        RowSharding,
        "from_data",
        lambda data, shard=None: RowSharding(is_global=isinstance(data, np.ndarray)),
    )
    monkeypatch.setattr(RowSharding, "local_rows", lambda self, batch, num_parts=1: batch)
    trainer = Trainer(dense_network())
    trainer.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(5)
    history = trainer.fit(x, y, batch_size=5, epochs=3, validation_data=data, verbose=0).history
    assert len(history["val_loss"]) == len(history["loss"]) == 3


def test_train_on_batch_eagerly():
    x, y = points()
    trainer = Trainer(dense_network())
    trainer.compile("sgd", "mse", run_eagerly=True)
    assert np.isfinite(trainer.train_on_batch(x, y))


class ToDense(keras.Model):
    """Network that converts sparse and ragged inputs to dense ones."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        kinds = tf.SparseTensor | tf.RaggedTensor
        dense = tf.sparse.to_dense(x) if isinstance(x, tf.SparseTensor) else x
        dense = dense.to_tensor(shape=[None, 4]) if isinstance(x, tf.RaggedTensor) else dense
        return self.dense(tf.ensure_shape(dense, [None, 4]) if isinstance(x, kinds) else dense)


@pytest.mark.parametrize("kind", ["sparse", "ragged"])
def test_sparse_and_ragged_generator_batches_match_keras(kind):
    x = np.eye(8, 4, dtype="float32")
    x = tf.sparse.from_dense(x) if kind == "sparse" else tf.RaggedTensor.from_tensor(x)
    y = np.ones((8, 1), "float32")
    losses = []
    for wrap in (lambda network: network, Trainer):
        keras.utils.set_random_seed(0)
        network = ToDense()
        network(np.eye(8, 4, dtype="float32"))
        network.dense.kernel.assign(np.ones((4, 1)))
        model = wrap(network)
        model.compile("sgd", "mse")
        history = model.fit(((x, y) for _ in range(3)), verbose=0).history
        losses.append(history["loss"][0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_partial_batch_is_evaluated_in_micro_batches():
    x, y = points()
    x, y = x[:9], y[:9]
    expected = dense_trainer().evaluate(x, y, batch_size=4, verbose=0, return_dict=True)
    with parallel_config(micro_batch_num=2):
        actual = dense_trainer().evaluate(x, y, batch_size=4, verbose=0, return_dict=True)
    np.testing.assert_allclose(actual["loss"], expected["loss"], rtol=TRAINING)


def test_unknown_save_options_raise_an_error(tmp_path):
    trainer = dense_trainer()
    trainer.train_on_batch(*points())
    with pytest.raises(TypeError, match="no options asset, include_optimizer"):
        trainer.save(tmp_path / "x", asset={}, include_optimizer=False)
    with pytest.raises(ValueError, match="replicas"):
        trainer.save(tmp_path / "x.keras", replicas=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("error:You are saving a model")
def test_keras_file_of_a_trained_trainer_is_saved_without_warnings(tmp_path):
    trainer = dense_trainer()
    trainer.fit(*points(), verbose=0)
    trainer.save(tmp_path / "x.keras")
    loaded = keras.saving.load_model(tmp_path / "x.keras")
    inputs = points()[0]
    np.testing.assert_array_equal(
        loaded.predict(inputs, verbose=0), trainer.predict(inputs, verbose=0)
    )


def test_averaged_weights_before_the_first_step():
    trainer = dense_trainer()
    with trainer.averaged_weights():
        assert trainer.predict(points()[0], verbose=0).shape[0] == len(points()[0])


def test_loss_shapes_are_inferred_on_few_positions():
    shapes = []

    def custom_loss(y_true, y_pred):
        shapes.append(y_pred.shape)
        return tf.reduce_mean(tf.square(y_pred - tf.cast(y_true, y_pred.dtype)))

    network = keras.Sequential([keras.Input((64, 3)), keras.layers.Dense(5)])
    with parallel_config(micro_batch_num=2):
        trainer = Trainer(network)
        trainer.compile("sgd", custom_loss)
        trainer.train_on_batch(np.ones((4, 64, 3), "float32"), np.ones((4, 64, 5), "float32"))
    assert {shape[1] for shape in shapes} == {16, 64}
