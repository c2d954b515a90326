"""States of layers, metrics of layers and masks in metrics match Keras on every layout."""

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


def stateful_network():
    return network(lambda: [Seen(), Counts()])


def test_micro_batches_set_states_once_per_step():
    """States are set once per step, logs contain layer metrics, and compiled metrics apply masks."""
    expected = numbers(stateful_network(), **stateful.masked_metrics())
    assert {"seen", "val_seen", "rows", "val_rows"} < set(expected["history"])
    with parallel_config(micro_batch_num=2):
        actual = numbers(Trainer(stateful_network()), **stateful.masked_metrics())
    assert_as_in_keras(actual, expected, TRAINING)


def test_cross_entropy_loss_applies_masks():
    options = {"loss": CrossEntropyLoss(), "metrics": ["accuracy"], "epochs": 1}
    options["batch_size"] = stateful.ROWS  # Means over several batches weight tokens.
    expected = numbers(network(), **options)
    with parallel_config(micro_batch_num=2):
        assert_as_in_keras(numbers(Trainer(network()), **options), expected, TRAINING)


def test_spectral_normalization_in_micro_batches():
    make = lambda: network(norm_of_the_spectrum)
    expected = numbers(make(), epochs=1)
    with parallel_config(micro_batch_num=2):
        assert_as_in_keras(numbers(Trainer(make()), epochs=1), expected, TRAINING)


class Marks(keras.layers.Layer):
    """Layer with a count too large for float32, a flag, and a state that changes in later steps."""

    def build(self, shape):
        initializer = keras.initializers.Constant(2**25)
        self.count = self.add_weight((), initializer, "int64", trainable=False)
        self.seen = self.add_weight((), "zeros", "bool", trainable=False)
        self.late = self.add_weight((), "zeros", trainable=False)  # Set from the third step on.

    def call(self, x):
        self.count.assign_add(1)
        self.seen.assign(True)
        is_late = self.count > 2**25 + 2
        self.late.assign(ops.where(is_late, 0.5 * self.late + 1, self.late))
        return x


def test_large_counts_and_flags_in_micro_batches():
    expected, marks = Marks(), Marks()
    numbers(network(lambda: [expected]), epochs=1)
    with parallel_config(micro_batch_num=2):
        numbers(Trainer(network(lambda: [marks])), epochs=1)
    assert 2**25 < int(marks.count) == int(expected.count) and bool(marks.seen.numpy())
    assert 0 < float(marks.late) == pytest.approx(float(expected.late), TRAINING)


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
    """Recomputed block with layers that set states."""

    def add_sublayers(self):
        super().add_sublayers()
        self.inner = [Seen(), Counts()]
        self.recompute(True)

    def feed(self, *args, **kwargs):
        x = super().feed(*args, **kwargs)
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
    expected = numbers(stateful_network(), **stateful.masked_metrics(), epochs=1)
    start(model_parallel=2, **fields)
    actual = numbers(Trainer(stateful_network()), **stateful.masked_metrics(), epochs=1)
    assert_as_in_keras(actual, expected, TRAINING)
    stop()


@on_mesh
def test_model_chunks_on_a_mesh_pass_values_and_masks():
    check_on_mesh(**CHUNKS)


@pytest.mark.long
@on_mesh
def test_layer_states_on_a_mesh():
    check_on_mesh()


def mean_loss(labels, outputs):
    return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, outputs, from_logits=True))


CASES = {
    "a ratio": (lambda: [Unmasked()], masked_mean, "the loss masked_mean"),
    "a product of means": (lambda: [Adds(2, name="squares")], None, "squares"),
    "variances": (lambda: [keras.layers.BatchNormalization(name="norm")], None, "norm"),
    "a mean next to a mask": (lambda: [Adds(1, name="mean")], None, "mean"),
    "means": (lambda: [Unmasked(), Adds(1), Dense(6, activity_regularizer="l2")], mean_loss, None),
}


@pytest.mark.parametrize("kind", CASES)
def test_warns_once_about_values_that_micro_batches_change(kind):
    make_layers, loss, name = CASES[kind]
    make = lambda: network(make_layers)
    with parallel_config(micro_batch_num=2), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actual = numbers(Trainer(make()), loss, epochs=1)
    messages = [
        str(warning.message) for warning in caught if "differ from Keras'" in str(warning.message)
    ]
    if name is None:
        assert not messages
        assert_as_in_keras(actual, numbers(make(), loss, epochs=1), TRAINING)
    else:
        assert messages and all(f" {name} " in message for message in messages)
        assert len(set(messages)) == len(messages)


class Dropped(keras.layers.Layer):
    """Layer that adds the mean of its output after Keras' dropout."""

    def __init__(self):
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5)

    def call(self, inputs, training=False):
        outputs = self.dropout(inputs, training=training)
        self.add_loss(ops.mean(outputs))
        return outputs


def test_no_warning_about_a_mean_of_randomly_dropped_values():
    with parallel_config(micro_batch_num=2), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*differ from Keras'")
        numbers(Trainer(network(lambda: [Unmasked(), Dropped()])), epochs=1)


def test_no_warning_without_micro_batches():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*differ from Keras'")
        numbers(Trainer(network(lambda: [Adds(2)])), epochs=1)


class Maximum(keras.metrics.Metric):
    """Metric that is no sum over rows."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, x):
        self.value.assign(ops.maximum(self.value, ops.max(x)))

    def result(self):
        return self.value + 0.0  # A new tensor, because validation changes the variable.


@on_mesh
def test_layer_metric_that_devices_cannot_share_raises_an_error():
    class Owner(keras.layers.Layer):
        def __init__(self):
            super().__init__(name="owner")
            self.greatest = Maximum(name="greatest")

        def call(self, x):
            self.greatest.update_state(x)
            return x

    expected, actual = (
        numbers(make(network(lambda: [Owner()]))) for make in (lambda network: network, Trainer)
    )
    assert len(set(actual["history"]["greatest"])) == 2  # Each epoch resets the metric.
    assert_as_in_keras(actual, expected, TRAINING)
    start(model_parallel=2)
    trainer = Trainer(network(lambda: [Owner()]))
    with pytest.raises(
        ValueError, match="owner has the metric 'greatest'.*pass the metric to `compile`"
    ):
        numbers(trainer)
    dtransformer.shutdown()
