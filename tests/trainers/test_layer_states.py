"""Promise: states and metrics of layers, and masks in metrics, are Keras' on every layout."""

import warnings

import keras
import pytest
import tensorflow as tf
from keras import ops
from keras.layers import Dense

import dtransformer
from dtransformer import parallel_config
from dtransformer.layers import CrossEntropyLoss, TransformerEncoderLayer
from dtransformer.trainers import Trainer
from harness import stateful
from harness.stateful import (
    Adds,
    Counts,
    Seen,
    Unmasked,
    assert_as_in_keras,
    masked_mean,
    network,
    norm_of_the_spectrum,
    numbers,
)
from tests.on_mesh import on_mesh, start, stop
from tests.tolerances import TRAINING

CHUNKS = {"pipeline_schedule": "interleaved", "pipeline_chunks": 2, "micro_batch_num": 2}


def everything():
    return network(lambda: [Seen(), Counts()])


def test_micro_batches():
    """A state is set once a step; metrics of layers are in the logs, those compiled see masks."""
    expected = numbers(everything(), **stateful.masked_metrics())
    assert {"seen", "val_seen", "rows", "val_rows"} < set(expected["history"])
    with parallel_config(micro_batch_num=2):
        found = numbers(Trainer(everything()), **stateful.masked_metrics())
    assert_as_in_keras(found, expected, TRAINING)


def test_cross_entropy_loss_applies_masks():
    options = {"loss": CrossEntropyLoss(), "metrics": ["accuracy"], "epochs": 1}
    options["batch_size"] = stateful.ROWS  # the mean of several batches is by their tokens
    expected = numbers(network(), **options)
    with parallel_config(micro_batch_num=2):
        assert_as_in_keras(numbers(Trainer(network()), **options), expected, TRAINING)


def test_spectral_normalization_in_micro_batches():
    make = lambda: network(norm_of_the_spectrum)
    expected = numbers(make(), epochs=1)
    with parallel_config(micro_batch_num=2):
        assert_as_in_keras(numbers(Trainer(make()), epochs=1), expected, TRAINING)


class Marks(keras.layers.Layer):
    """Keeps a count that float32 cannot, a flag, and what it sets in later steps alone."""

    def build(self, shape):
        begin = keras.initializers.Constant(2**25)
        self.count = self.add_weight((), begin, "int64", trainable=False)
        self.seen = self.add_weight((), "zeros", "bool", trainable=False)
        self.late = self.add_weight((), "zeros", trainable=False)  # set from the third step on

    def call(self, x):
        self.count.assign_add(1)
        self.seen.assign(True)
        is_late = self.count > 2**25 + 2
        self.late.assign(ops.where(is_late, 0.5 * self.late + 1, self.late))
        return x


def test_large_counts_and_flags_in_micro_batches():
    of_keras, marks = Marks(), Marks()
    numbers(network(lambda: [of_keras]), epochs=1)
    with parallel_config(micro_batch_num=2):
        numbers(Trainer(network(lambda: [marks])), epochs=1)
    assert 2**25 < int(marks.count) == int(of_keras.count) and bool(marks.seen.numpy())
    assert 0 < float(marks.late) == pytest.approx(float(of_keras.late), TRAINING)


@on_mesh
def test_masks_cross_chunks_with_an_unknown_batch_size():
    data = tf.data.Dataset.from_tensor_slices((stateful.IDS, stateful.TAGS)).batch(8)
    losses = []
    for make, fields in ((lambda x: x, {}), (Trainer, CHUNKS)):
        if fields:
            start(model_parallel=1, **fields)
        model = make(network())
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.5), loss)
        losses.append(model.fit(data, epochs=2, verbose=0).history["loss"])
    assert losses[1] == pytest.approx(losses[0], TRAINING)


class Recomputed(TransformerEncoderLayer):
    """A block that is computed again in the backward pass, with layers that set states."""

    def add_sublayers(self):
        super().add_sublayers()
        self.inner = [Seen(), Counts()]
        self.recompute(True)

    def _compute(self, *args, **kwargs):
        x = super()._compute(*args, **kwargs)
        for layer in self.inner:
            x = layer(x)
        return x


def test_states_in_a_recomputed_block_are_set_once():
    keras.backend.clear_session()
    block = Recomputed(6, 2, 8, hidden_dropout_rate=0.0, attention_dropout_rate=0.0)
    history = numbers(Trainer(network(lambda: [block])), epochs=1)["history"]
    assert history["rows"] == [stateful.ROWS] and history["seen"][0] > 0
    assert int(block.inner[1].steps) == stateful.ROWS // 8


def check_on_mesh(**fields):
    expected = numbers(everything(), **stateful.masked_metrics(), epochs=1)
    start(model_parallel=2, **fields)
    found = numbers(Trainer(everything()), **stateful.masked_metrics(), epochs=1)
    assert_as_in_keras(found, expected, TRAINING)
    stop()


@on_mesh
def test_model_chunks_on_a_mesh_pass_values_and_masks():
    check_on_mesh(**CHUNKS)


@pytest.mark.long
@on_mesh
def test_layer_states_on_a_mesh():
    check_on_mesh()


def mean(labels, outputs):
    return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, outputs, from_logits=True))


NAMED = {
    "a ratio": (lambda: [Unmasked()], masked_mean, "the loss masked_mean"),
    "a product of means": (lambda: [Adds(2, name="squares")], None, "squares"),
    "variances": (lambda: [keras.layers.BatchNormalization(name="norm")], None, "norm"),
    "a mean beside a mask": (lambda: [Adds(1, name="mean")], None, "mean"),
    "means": (lambda: [Unmasked(), Adds(1), Dense(6, activity_regularizer="l2")], mean, None),
}


@pytest.mark.parametrize("kind", NAMED)
def test_warns_once_about_values_that_micro_batches_change(kind):
    inner, loss, name = NAMED[kind]
    make = lambda: network(inner)
    with parallel_config(micro_batch_num=2), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = numbers(Trainer(make()), loss, epochs=1)
    told = [str(one.message) for one in told if "differ from Keras'" in str(one.message)]
    if name is None:
        assert not told
        assert_as_in_keras(found, numbers(make(), loss, epochs=1), TRAINING)
    else:
        assert told and all(f" {name} " in one for one in told)
        assert len(set(told)) == len(told)


def test_no_warning_without_micro_batches():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*differ from Keras'")
        numbers(Trainer(network(lambda: [Adds(2)])), epochs=1)


class Greatest(keras.metrics.Metric):
    """No sum over the rows."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, x):
        self.value.assign(ops.maximum(self.value, ops.max(x)))

    def result(self):
        return self.value + 0.0  # a tensor, which validation does not change


@on_mesh
def test_layer_metric_that_devices_cannot_share_raises_an_error():
    class Owner(keras.layers.Layer):
        def __init__(self):
            super().__init__(name="owner")
            self.greatest = Greatest(name="greatest")

        def call(self, x):
            self.greatest.update_state(x)
            return x

    expected, found = (
        numbers(make(network(lambda: [Owner()]))) for make in (lambda network: network, Trainer)
    )
    assert len(set(found["history"]["greatest"])) == 2  # begun anew
    assert_as_in_keras(found, expected, TRAINING)
    start(model_parallel=2)
    trainer = Trainer(network(lambda: [Owner()]))
    with pytest.raises(
        ValueError, match="owner has the metric 'greatest'.*pass the metric to `compile`"
    ):
        numbers(trainer)
    dtransformer.shutdown()
