"""Training on a mesh matches training on one device, for all options."""

import unittest.mock
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtransformer
from dtransformer import TransformerRecomputeConfig, layers
from dtransformer.models import CausalLM
from dtransformer.trainers import Trainer
from dtransformer.trainers.engines import mesh
from harness.tolerances import PARITY_LOSS
from tests.on_mesh import (
    HIDDEN,
    ROWS,
    SOURCE_LENGTH,
    VOCAB_SIZE,
    batch,
    losses,
    losses_without_mesh,
    make_trainer,
    network,
    on_mesh,
    raises,
    sent_collectives,
    start,
    stop,
)


@on_mesh
def test_dropout_losses_on_a_mesh_match_one_process():
    expected = losses(make_trainer(network(dropout_rate=0.3)), steps=2)
    assert abs(expected[0] / losses_without_mesh()[0] - 1) > 1e-3
    start(data_parallel=2, sequence_parallel=True, micro_batch_num=2)
    actual = losses(make_trainer(network(dropout_rate=0.3)), steps=2)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


@on_mesh
def test_deep_networks_warn_about_pipeline_chunks_before_compilation():
    start()
    model = network()
    with unittest.mock.patch.object(mesh, "MANY_BLOCKS", 2):  # One block of each stack.
        trainer = make_trainer(model)
        with pytest.warns(UserWarning, match="2 blocks are compiled.*pipeline_chunks=1") as caught:
            losses(trainer, steps=2)
        assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses(make_trainer(network()), steps=1)


def two_losses(trainer, inputs, labels):
    return [trainer.train_on_batch(inputs, labels) for _ in range(2)]


def losses_of_long_sequences():
    """Return two losses of a network whose masks and head are too large to become constants."""
    vocab_size = 2048
    length = 300
    keras.utils.set_random_seed(0)
    options = {"num_heads": 2, "num_layers": 1, "max_length": length, "dropout_rate": 0.0}
    trainer = Trainer(CausalLM(vocab_size, hidden_size=64, **options))
    trainer.compile(keras.optimizers.SGD(0.1), layers.CrossEntropyLoss(chunk_tokens=256))
    ids = np.random.default_rng(0).integers(1, vocab_size, (2, length), "int32")
    return two_losses(trainer, ids, ids)


@on_mesh
def test_long_sequences_and_large_heads_match_one_process():
    """TensorFlow folds operations on up to 65,536 elements to constants before DTensor sees them."""
    expected = losses_of_long_sequences()
    start()
    np.testing.assert_allclose(losses_of_long_sequences(), expected, rtol=PARITY_LOSS)


class ImplicitIndices(keras.layers.Layer):
    """Layer that adds a mask, with indices that leave out dimensions."""

    def call(self, x):
        positions = tf.range(x.shape[1])
        visible = tf.cast(positions[:, None] >= positions, x.dtype)
        return x + tf.reduce_mean(visible[None] + visible[None, ...], axis=-1)[..., None]


class ScalarConditions(keras.layers.Layer):
    def call(self, x):
        return keras.ops.where(tf.reduce_sum(x) > 0, x, -x) + tf.where(True, x, 2 * x)


class NegativeSteps(keras.layers.Layer):
    def call(self, x):
        order = tf.cast(tf.argmax(x, axis=-1)[::-1, ::-1], x.dtype)
        return x + x[::-1, :, ::-1] + order[..., None]


class LeadingIndices(keras.layers.Layer):
    def call(self, x):
        doubled = tf.stack([x, 2 * x])[-1]
        with_dimensions = tf.stack([x, x])[None, 0, ..., None]
        return doubled * with_dimensions[0, ..., 0]


class Scatters(keras.layers.Layer):
    """Layer whose results and gradients are computed by `tf.scatter_nd`."""

    def call(self, x):
        largest = tf.math.top_k(x, 2).values
        chosen = tf.gather_nd(x, [[3, 0], [2, 1], [1, 2], [0, 0]])
        swapped = tf.scatter_nd([[1], [0]], x[:2], x.shape)
        return x + swapped + chosen[:, None] + tf.reduce_mean(largest, axis=-1, keepdims=True)


def losses_with(layer, length):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((length, 8), batch_size=4)
    outputs = layer()(keras.layers.Dense(8)(inputs))
    trainer = Trainer(keras.Model(inputs, outputs))
    trainer.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.random.default_rng(0).normal(size=(4, length, 8)).astype("float32")
    return two_losses(trainer, x, x)


@on_mesh
def test_operations_with_faults_in_dtensor_match_one_process():
    """DTensor would end the process or compute other numbers, see `_compat.dtensor_operations`."""
    cases = {
        ImplicitIndices: 300,
        ScalarConditions: 3,
        NegativeSteps: 3,
        LeadingIndices: 3,
        Scatters: 3,
    }
    expected = {layer: losses_with(layer, length) for layer, length in cases.items()}
    start(data_parallel=2)
    for layer, length in cases.items():
        losses = losses_with(layer, length)
        np.testing.assert_allclose(losses, expected[layer], PARITY_LOSS, err_msg=layer.__name__)


class PadRows(keras.layers.Layer):
    def call(self, x):
        return tf.pad(x, [[1, 0], [0, 0], [0, 0]])[1:]


@on_mesh
def test_rows_that_the_mesh_cannot_split_raise_an_error():
    start(data_parallel=2)
    with pytest.raises(ValueError, match="size 5, which DTensor cannot split into 2 shards"):
        losses_with(PadRows, length=3)


@on_mesh
def test_mixed_precision_on_a_mesh():
    expected = losses(make_trainer(network(dtype="mixed_bfloat16")), steps=2)
    start()
    model = network(dtype="mixed_bfloat16")
    np.testing.assert_allclose(losses(make_trainer(model), steps=2), expected, rtol=1e-2)
    assert {weight.dtype for weight in model.variables} == {"float32"}


@on_mesh
def test_calling_a_trainer_matches_predict():
    start()
    keras.config.set_dtype_policy("mixed_bfloat16")  # Keras also casts around the trainer.
    try:
        model, (inputs, _) = network(), batch()
        for first, second in ((0, 1), (1, 0)):
            trainer = make_trainer(model)
            calls = trainer, trainer.predict_on_batch
            outputs = [np.asarray(calls[i](inputs), "float32") for i in (first, second)]
            np.testing.assert_array_equal(*outputs)
    finally:
        keras.config.set_dtype_policy("float32")


@on_mesh
def test_overflow_skips_the_step_on_every_device():
    start()
    model = network(dtype="mixed_float16")
    trainer = make_trainer(model)
    losses(trainer, steps=1)
    trainer.optimizer.dynamic_scale.assign(2.0**60)
    before = [weight.numpy() for weight in model.variables]
    losses(trainer, steps=1)
    for weight, old in zip(model.variables, before):
        np.testing.assert_array_equal(weight.numpy(), old, weight.path)
    assert float(trainer.optimizer.dynamic_scale) == 2.0**59


@on_mesh
def test_optimizers_clip_by_the_norms_of_unsharded_gradients():
    for options in ({"global_clipnorm": 0.1}, {"clipnorm": 0.05}, {"clipvalue": 0.01}):
        optimizer = lambda: keras.optimizers.SGD(0.5, momentum=0.9, **options)
        expected = losses(make_trainer(network(), optimizer()))
        start(vocab_emb_dp=False)
        np.testing.assert_allclose(
            losses(make_trainer(network(), optimizer())),
            expected,
            rtol=PARITY_LOSS,
            err_msg=options,
        )
        stop()


@on_mesh
def test_micro_batches_on_a_mesh():
    expected = losses_without_mesh()
    start(micro_batch_num=2)
    trainer = make_trainer(network())
    np.testing.assert_allclose(losses(trainer), expected, rtol=PARITY_LOSS)
    report = trainer.communication_report()
    # Two micro-batches have two forward and two backward reductions each.
    assert len(sent_collectives(report, "encoder/block_0")) == 8
    assert report.formula["encoder/block_0"] == 4 * ROWS * SOURCE_LENGTH * HIDDEN
    stop()


@on_mesh
def test_weights_are_excluded_from_decay_by_name_or_variable():
    def losses_with_exclusion(make_exclusion):
        model = network(decoder_layers=1)
        optimizer = keras.optimizers.SGD(0.5, weight_decay=0.9)
        optimizer.exclude_from_weight_decay(**make_exclusion(model))
        return losses(make_trainer(model, optimizer), steps=2)

    by_name = lambda model: {"var_names": ["bias"]}
    by_variable = lambda model: {
        "var_list": [weight for weight in model.variables if weight.name.endswith("bias")]
    }
    expected = losses_with_exclusion(by_variable)
    start()
    np.testing.assert_allclose(losses_with_exclusion(by_variable), expected, rtol=PARITY_LOSS)
    np.testing.assert_allclose(losses_with_exclusion(by_name), expected, rtol=PARITY_LOSS)


@pytest.mark.long
@on_mesh
def test_recompute_on_a_mesh_matches_its_communication_formula():
    options = {"dropout_rate": 0.1}
    start()
    expected = losses(make_trainer(network(**options)))
    stop()
    for config, sums in (
        (TransformerRecomputeConfig(recompute=True), 5),
        (TransformerRecomputeConfig(recompute=True, mp_comm_recompute=False), 4),
        (TransformerRecomputeConfig(recompute=True, recompute_slice_activation=True), 5.5),
        (TransformerRecomputeConfig(select=("attention", "feed_forward", "norm")), 4),
    ):
        start(recompute=config)
        trainer = make_trainer(network(**options))
        np.testing.assert_allclose(losses(trainer), expected, rtol=PARITY_LOSS)
        report = trainer.communication_report()
        assert report.formula["encoder/block_0"] == sums * ROWS * SOURCE_LENGTH * HIDDEN
        assert report.summed_elements("encoder/block_0") == sums * ROWS * SOURCE_LENGTH * HIDDEN
        stop()


@pytest.mark.long
@on_mesh
def test_compiled_updates_of_large_networks_on_a_mesh():
    decay = keras.optimizers.schedules.ExponentialDecay(1e-2, 2, 0.5)
    for optimizer in (
        lambda: keras.optimizers.AdamW(decay, weight_decay=0.1),
        lambda: keras.optimizers.SGD(0.5, momentum=0.9),
        lambda: keras.optimizers.Nadam(1e-2),  # It has a scalar state that all weights share.
    ):
        expected = losses(make_trainer(network(), optimizer()))
        start()
        with unittest.mock.patch("dtransformer.trainers.step_runner._LARGE_NETWORK", 0):
            trainer = make_trainer(network(), optimizer())
            np.testing.assert_allclose(losses(trainer), expected, rtol=PARITY_LOSS)
        assert int(trainer.optimizer.iterations.numpy()) == 3
        stop()


@on_mesh
def test_optimizers_that_need_unsharded_weights_raise_an_error():
    start()
    model = network()
    raises(ValueError, ["Lamb", "AdamW"], lambda: make_trainer(model, keras.optimizers.Lamb()))
    raises(ValueError, ["run_eagerly"], lambda: make_trainer(model, run_eagerly=True))


@on_mesh
def test_trainer_without_init_raises_an_error():
    dtransformer.set_parallel_config(dtransformer.TransformerOpParallelConfig(model_parallel=4))
    raises(RuntimeError, ["dtransformer.init"], lambda: Trainer(network()))
    stop()


class Classifier(keras.Model):
    """Network of plain Keras layers, one with a state, and a sharded layer."""

    def __init__(self):
        super().__init__(name="classifier")
        self.embedding = keras.layers.Embedding(VOCAB_SIZE, HIDDEN)
        self.norm = keras.layers.BatchNormalization()
        self.sharded = layers.FeedForward(HIDDEN, 4 * HIDDEN, dropout_rate=0.0, name="sharded")
        self.dense = keras.layers.Dense(VOCAB_SIZE, kernel_regularizer="l2")
        self.dense.activity_regularizer = keras.regularizers.L2(1e-3)
        self.constants = [{"scale": tf.linspace(0.5, 1.0, HIDDEN)}]  # Tensors are replicated.

    def call(self, inputs, training=False):
        x = self.embedding(inputs["target"]) * self.constants[0]["scale"]
        x = self.norm(x, training=training)
        return self.dense(self.sharded(x, training=training))


@on_mesh
def test_plain_keras_layers_on_a_mesh():
    def run():
        keras.utils.set_random_seed(1)
        model = Classifier()
        trainer = Trainer(model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trainer.compile(keras.optimizers.SGD(0.1), loss, metrics=["sparse_categorical_accuracy"])
        inputs, labels = batch()
        data = tf.data.Dataset.from_tensors((inputs, labels)).repeat(3)
        history = trainer.fit(data, verbose=0, epochs=2).history
        moving = [weight.numpy() for weight in model.norm.non_trainable_variables]
        return history, moving, trainer.predict(inputs, verbose=0), trainer

    history, moving, outputs, _ = run()
    start(data_parallel=2, model_parallel=1)
    mesh_history, mesh_moving, mesh_outputs, trainer = run()
    for name in ("loss", "sparse_categorical_accuracy"):
        np.testing.assert_allclose(mesh_history[name], history[name], rtol=1e-4, err_msg=name)
    for mesh_value, value in zip(mesh_moving, moving):
        np.testing.assert_allclose(mesh_value, value, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(mesh_outputs, outputs, rtol=1e-3, atol=1e-4)
    message_parts = ["of 7 rows is filled up with zeros", "losses that layers add would include"]
    raises(ValueError, message_parts, lambda: trainer.train_on_batch(*batch(rows=7)))
    trainer.network.dense.activity_regularizer = None
    message_parts = ["of 5 rows", "the means of a BatchNormalization"]
    raises(ValueError, message_parts, lambda: trainer.train_on_batch(*batch(rows=5)))


@on_mesh
def test_batches_that_the_data_axis_does_not_divide():
    """Some micro-batches are empty."""
    trainer = make_trainer(network())
    expected = losses(trainer, rows=7) + losses(trainer, steps=1, rows=1)
    outputs = make_trainer(network()).predict(batch(rows=7)[0], verbose=0)
    start(data_parallel=2, micro_batch_num=2)
    trainer = make_trainer(network())
    actual = losses(trainer, rows=7) + losses(trainer, steps=1, rows=1)
    np.testing.assert_allclose(actual, expected, rtol=PARITY_LOSS)
    actual = make_trainer(network()).predict(batch(rows=7)[0], verbose=0)
    assert actual.shape == outputs.shape
    np.testing.assert_allclose(actual, outputs, atol=1e-4)


@on_mesh
def test_optimizer_built_for_unsharded_weights_raises_an_error():
    start()
    model = CausalLM(8, hidden_size=4, num_heads=2, num_layers=1)
    model.build()
    for optimizer in (keras.optimizers.Adam(), keras.optimizers.SGD()):
        optimizer.build(model.trainable_variables)
        trainer = Trainer(model)
        trainer.compile(optimizer)
        with pytest.raises(ValueError, match=f"{type(optimizer).__name__} was built before comp"):
            trainer.fit(np.ones((2, 4)), np.ones((2, 4)), verbose=0)
