"""A loss that compares all rows of a batch has the same value and gradients with micro-batches."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer import TransformerOpParallelConfig, parallel_config
from dtransformer.layers import Dropout
from dtransformer.parallel.runtime import job
from dtransformer.parallel.runtime.seeds import derived_seed
from dtransformer.parallel.tracing.trace import training_forward
from dtransformer.runs.tasks.embedding import InBatchLoss
from dtransformer.trainers import Trainer
from dtransformer.trainers.compile_checks import check_compile_options
from dtransformer.trainers.objective import Objective
from dtransformer.trainers.step_runner import StepCompiler
from harness.tolerances import PARITY_LOSS
from tests.on_mesh import on_mesh, start
from tests.peak_memory import peak_of_a_second_step
from tests.runs.test_embedding import TEMPERATURE, WEIGHT, WITH_NEGATIVES, inputs
from tests.shared_runs import on_ranks

DIMENSIONS = (4, 16)
NUM_STEPS = 2


def make_network(dropout_rate=0.0, **sizes):
    from dtransformer.layers.heads import PoolingHead
    from dtransformer.models import MaskedLM
    from dtransformer.models.one_stack import with_task_head
    from dtransformer.models.pairs import GroupModel

    keras.utils.set_random_seed(0)
    sizes = {"hidden_size": 16, "num_heads": 2, "num_layers": 1, **sizes}
    core = MaskedLM(30, dropout_rate=dropout_rate, **sizes)
    core.build()
    return GroupModel(with_task_head(core, PoolingHead("mean")))


def train(micro_batches, num_steps=NUM_STEPS, dropout_rate=0.0, **options):
    """Return the losses, gradient norms and final weights of a few steps."""
    with parallel_config(micro_batch_num=micro_batches):
        trainer = Trainer(make_network(dropout_rate))
        loss = InBatchLoss(TEMPERATURE, DIMENSIONS)
        trainer.compile(keras.optimizers.SGD(1e-3), loss, **options)
        logs = []
        for _ in range(num_steps):
            batch = inputs(WITH_NEGATIVES), WITH_NEGATIVES, WEIGHT
            step_logs = trainer.train_on_batch(*batch, return_dict=True)
            logs.append([float(step_logs[name]) for name in ("step_loss", "gradient_norm")])
    return np.array(logs), [np.asarray(x) for x in trainer.network.get_weights()]


def check_equal(result, expected):
    np.testing.assert_allclose(result[0], expected[0], rtol=PARITY_LOSS)
    for value, expected_value in zip(result[1], expected[1], strict=True):
        np.testing.assert_allclose(value, expected_value, rtol=PARITY_LOSS, atol=1e-6)


def mean_output(labels, outputs):
    return tf.reduce_mean(outputs, axis=[1, 2])


@pytest.mark.parametrize(
    "micro_batches, options",
    [
        (3, {}),
        pytest.param(8, {"metrics": [mean_output]}, marks=pytest.mark.long),
        pytest.param(2, {"run_eagerly": True}, marks=pytest.mark.long),
        pytest.param(2, {"jit_compile": True}, marks=pytest.mark.long),
    ],
)
def test_loss_and_gradients_match_the_full_batch(micro_batches, options):
    check_equal(train(micro_batches, **options), train(1))


@on_mesh
def test_micro_batches_on_a_mesh_match_the_full_batch():
    expected = train(1)
    start(model_parallel=2)
    check_equal(train(2), expected)


@on_ranks("dp2@2x1")
def test_texts_on_other_ranks_and_in_other_micro_batches_are_negatives():
    check_equal(train(2), train(1))


@on_ranks("dp2@2x1+shard3")
def test_micro_batches_with_sharded_weights_match_the_full_batch():
    check_equal(train(2), train(1))


def test_both_passes_have_the_same_dropout_masks():
    """The reference computes all rows together."""
    network = make_network(dropout_rate=0.3)
    weights = network.trainable_variables
    before = [w.numpy() for w in weights]
    num_micro_batches = 4
    seed = tf.constant([derived_seed("dropout"), 0, 0], "int64")
    tokens = inputs(WITH_NEGATIVES)
    with tf.GradientTape() as tape:
        with training_forward(seed, tokens):
            outputs = network(tokens, training=True)
        loss_object = InBatchLoss(TEMPERATURE, DIMENSIONS)
        losses = loss_object.call(tf.constant(WITH_NEGATIVES), outputs)
        loss = tf.reduce_sum(losses * WEIGHT) / WEIGHT.sum()
    gradients = tape.gradient(loss, [w.value for w in weights])
    with parallel_config(micro_batch_num=num_micro_batches):
        trainer = Trainer(network)
        loss_object = InBatchLoss(TEMPERATURE, DIMENSIONS)
        trainer.compile(keras.optimizers.SGD(1.0), loss_object)
        logs = trainer.train_on_batch(tokens, WITH_NEGATIVES, WEIGHT, return_dict=True)
    assert float(logs["step_loss"]) == pytest.approx(float(loss), rel=PARITY_LOSS)
    for weight, old, gradient in zip(weights, before, gradients, strict=True):
        change = 0.0 if gradient is None else tf.convert_to_tensor(gradient)
        np.testing.assert_allclose(old - weight.numpy(), change, rtol=1e-4, atol=1e-5)


class ProductLoss(keras.losses.Loss):
    """Product of each row's output with the mean output of all rows."""

    compares_rows = True

    def call(self, y_true, y_pred):
        return y_pred[:, 0] * tf.reduce_mean(y_pred)


@pytest.mark.parametrize("make_dropout", [Dropout, keras.layers.Dropout])
def test_random_layers_repeat_their_masks(make_dropout):
    """The loss is quadratic in the scale, so scale · gradient = 2 · loss with equal masks."""

    class Scale(keras.Model):
        """Network with one weight, whose outputs depend on a mask."""

        def __init__(self):
            super().__init__()
            self.scale = self.add_weight(shape=(), initializer="ones")
            self.dropout = make_dropout(0.5)

        def call(self, inputs, training=False):
            outputs = self.dropout(tf.ones_like(inputs), training=training) * self.scale
            return tf.reduce_sum(outputs, axis=1, keepdims=True)

    with parallel_config(micro_batch_num=4):
        trainer = Trainer(Scale())
        trainer.compile(keras.optimizers.SGD(1e-3), ProductLoss())
        x = np.zeros((8, 64), "float32")
        losses = []
        for _ in range(2):
            before = float(trainer.network.scale.numpy())
            logs = trainer.train_on_batch(x, x[:, :1], return_dict=True)
            gradient = (before - float(trainer.network.scale.numpy())) / 1e-3
            losses.append(float(logs["step_loss"]))
            assert before * gradient == pytest.approx(2 * losses[-1], rel=1e-3)
    assert losses[0] / before**2 != pytest.approx(losses[1] / before**2, rel=1e-4)


def peak_of_a_step(micro_batches):
    """Return a step's peak memory in bytes above the persistent memory."""
    with parallel_config(micro_batch_num=micro_batches):
        trainer = Trainer(make_network(hidden_size=64, num_layers=3))
        trainer.compile(keras.optimizers.SGD(), InBatchLoss())
        ids = np.arange(1, 65, dtype="float32").reshape(32, 2)
        tokens = np.full((32, 2, 64), 5, "int32")
        batch = {"tokens": tokens, "attention_mask": np.ones_like(tokens)}, ids

        def step():
            trainer.train_on_batch(*batch)

        return peak_of_a_second_step(step)


@pytest.mark.long
def test_micro_batches_reduce_peak_memory():
    assert peak_of_a_step(8) < 0.25 * peak_of_a_step(1)


def test_pipelines_with_micro_batches_raise_an_error(monkeypatch):
    placement = TransformerOpParallelConfig(pipeline_stage=2).placement
    monkeypatch.setattr(job, "placement", lambda: placement)
    with parallel_config(micro_batch_num=2):
        with pytest.raises(ValueError, match="a separate loss for each micro-batch"):
            check_compile_options(Objective(InBatchLoss()), keras.optimizers.SGD(), StepCompiler())


def test_masks_of_outputs_raise_an_error():
    layers = [keras.Input((4,)), keras.layers.Masking(), keras.layers.Dense(1)]
    with parallel_config(micro_batch_num=2):
        trainer = Trainer(keras.Sequential([keras.Input((3, 4)), *layers[1:]]))
        trainer.compile(keras.optimizers.SGD(), ProductLoss())
        with pytest.raises(ValueError, match="Pass sample weights instead of the mask"):
            trainer.train_on_batch(np.ones((4, 3, 4), "float32"), np.ones((4, 3, 1), "float32"))
