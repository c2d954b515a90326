"""Invalid batches raise an error of one line, on every layout."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.errors import InputError
from dtransformer.layers import CrossEntropyLoss, PositionEmbedding
from dtransformer.models import CausalLM
from dtransformer.trainers import Trainer
from dtransformer.trainers.step_errors import convert_step_errors
from tests.on_mesh import on_mesh, raises, start

IDS = np.random.default_rng(0).integers(1, 12, (8, 6)).astype("int32")
CLASSES = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def language_model(loss=None, optimizer="sgd"):
    network = CausalLM(12, hidden_size=8, num_heads=4, num_layers=1, dropout_rate=0.0)
    trainer = Trainer(network)
    trainer.compile(optimizer, loss)
    return trainer


def replace_first_id(value, dtype="int32"):
    ids = IDS.astype(dtype)
    ids[0, 0] = value
    return ids


def fit(trainer, x=IDS, y=IDS):
    return trainer.fit(x, y, verbose=0).history["loss"]


# The check that runs first raises the error.
BAD_LABELS = {
    label: rf"^The labels must be 0 to 11\. The batch has the range {label_range}\.{hint}$"
    rf"|^An id or label of the batch is {label}, but must be 0 to 11\.{hint}$"
    for label, label_range, hint in (
        (100, "1 to 100", ""),
        (-100, "-100 to 11", " .*ignore_id=-100.*"),
    )
}


@pytest.mark.parametrize(["label", "message"], BAD_LABELS.items())
@pytest.mark.parametrize("method", ["fit", "evaluate", "train_on_batch", "test_on_batch"])
def test_labels_out_of_range(method, label, message):
    with pytest.raises(ValueError, match=message):
        getattr(language_model(), method)(IDS, replace_first_id(label))


def test_labels_out_of_range_without_a_known_vocabulary():
    inputs = keras.Input((6,), dtype="int32")
    trainer = Trainer(keras.Sequential([inputs, keras.layers.Embedding(12, 12)]))
    trainer.compile("sgd", CrossEntropyLoss())
    with pytest.raises(
        ValueError, match=r"The labels must be 0 or more\. .* -3 to 11\.$|is -3, but must"
    ):
        fit(trainer, y=replace_first_id(-3))
    with pytest.raises(
        ValueError, match=r"^An id or label of the batch is 12, but must be 0 to 11\.$"
    ):
        fit(trainer, y=replace_first_id(12))


def test_errors_of_data_readers_are_raised_unchanged():
    def read():
        raise InputError("x/shard.npy is damaged: copy it again")

    ids = lambda _: tf.ensure_shape(tf.numpy_function(read, [], tf.int32), (8, 6))
    data = tf.data.Dataset.range(3).map(lambda n: (ids(n), ids(n)))
    with pytest.raises(InputError, match="^x/shard.npy is damaged: copy it again$"):
        language_model(CrossEntropyLoss()).fit(data, verbose=0)


def test_ignored_labels_may_be_out_of_range():
    ignored = language_model(CrossEntropyLoss(ignore_id=-100))
    assert np.isfinite(fit(ignored, y=replace_first_id(-100))).all()
    with pytest.raises(
        ValueError, match="labels other than ignore_id=-100 must be 0 to 11. .* -1 "
    ):
        fit(ignored, y=replace_first_id(-1))


def test_float_labels_raise_an_error():
    with pytest.raises(
        ValueError, match="needs integer class ids, but the labels have the dtype float32"
    ):
        fit(language_model(), y=IDS.astype("float32"))


@pytest.mark.parametrize("elements", [(IDS, IDS), (IDS.astype("float32"), IDS[:, 0])])
def test_unbatched_dataset_raises_an_error(elements):
    network = CausalLM(12, hidden_size=8, num_heads=2, num_layers=1)
    if elements[0].dtype == "float32":
        network = keras.Sequential([keras.Input(IDS.shape[1:]), keras.layers.Dense(1)])
    trainer = Trainer(network)
    trainer.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"without a batch dimension. Call `batch\(...\)`"):
        trainer.fit(tf.data.Dataset.from_tensor_slices(elements), verbose=0)


def test_labels_out_of_range_with_a_keras_loss():
    with pytest.raises(
        ValueError, match="A label of the batch is 50, but the outputs have 12 classes"
    ):
        fit(language_model(CLASSES), y=replace_first_id(50))


@pytest.mark.parametrize("token_id", [-1, 12])
@pytest.mark.parametrize("method", ["fit", "predict", "predict_on_batch"])
def test_token_ids_out_of_range_raise_an_error(method, token_id):
    message = rf"^An id or label of the batch is {token_id}, but must be 0 to 11\.$"
    with pytest.raises(ValueError, match=message):
        getattr(language_model(), method)(replace_first_id(token_id), *[IDS] * (method == "fit"))


class ReturnsNone(keras.Model):
    """Network that forgets to return its output."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        self.dense(x)


def test_network_that_returns_none_raises_an_error():
    trainer = Trainer(ReturnsNone())
    trainer.compile("sgd", "mse")
    x = np.zeros((8, 3), "float32")
    for run in (lambda: trainer.fit(x, x[:, :1], verbose=0), lambda: trainer.predict(x, verbose=0)):
        with pytest.raises(ValueError, match="network 'returns_none' returned None"):
            run()


def test_failure_of_another_rank_is_one_line():
    """The error of Horovod has one line per function."""
    horovod_message = "Graph execution error:\n\nHorovod has been shut down. This was caused by"
    with pytest.raises(
        RuntimeError, match="^Stopped because another rank has failed or exited"
    ) as caught:
        with convert_step_errors():
            raise tf.errors.UnknownError(None, None, horovod_message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda: PositionEmbedding(8, "learned")(tf.zeros([1, 9, 4])),
        lambda: keras.Sequential([PositionEmbedding(8, "learned")])(tf.zeros([1, 9, 4])),
        lambda: fit(language_model(), np.tile(IDS, 200), np.tile(IDS, 200)),
    ],
)
def test_errors_in_calls_are_one_line(call):
    """Keras would add the arguments of the call to the message."""
    with pytest.raises(ValueError) as caught:
        call()
    assert "\n" not in str(caught.value) and "max_length" in str(caught.value)


def test_other_errors_are_unchanged():
    def fail(labels, outputs):
        tf.debugging.assert_less(labels, tf.zeros([], labels.dtype), "of the user's own")
        return tf.reduce_mean(outputs, -1)

    with pytest.raises(tf.errors.InvalidArgumentError, match="assert_less"):
        fit(language_model(fail))


def test_nan_loss_warns_once(recwarn):
    inputs = keras.Input((3,))
    trainer = Trainer(keras.Model(inputs, keras.layers.Dense(1)(inputs)))
    trainer.compile("sgd", "mse")
    x = np.full((8, 3), np.nan, "float32")
    trainer.fit(x, x[:, :1], batch_size=2, epochs=2, verbose=0)
    messages = [str(warning.message) for warning in recwarn if "nan" in str(warning.message)]
    assert len(messages) == 1 and "The loss of step 1 is nan" in messages[0]


@on_mesh
def test_errors_on_a_mesh():
    start()
    for label in BAD_LABELS:
        message_parts = ["The labels must be 0 to 11. The batch has the range", str(label)]
        raises(
            ValueError, message_parts, lambda y=label: fit(language_model(), y=replace_first_id(y))
        )
    message_parts = ["Adam has gradient_accumulation_steps=2, which does not work if a mesh"]
    optimizer = keras.optimizers.Adam(gradient_accumulation_steps=2)
    raises(ValueError, message_parts, lambda: fit(language_model(optimizer=optimizer)))
    callbacks, message_parts = (
        [keras.callbacks.SwapEMAWeights()],
        ["SwapEMAWeights", "averaged_weights()"],
    )
    raises(
        ValueError,
        message_parts,
        lambda: language_model().fit(IDS, IDS, verbose=0, callbacks=callbacks),
    )
    inputs = keras.Input((6, 4))
    lstm = Trainer(keras.Model(inputs, keras.layers.LSTM(4, return_sequences=True)(inputs)))
    lstm.compile("sgd", "mse")
    x = np.zeros((8, 6, 4), "float32")
    message_parts = ["lstm", "which DTensor cannot compute"]
    raises(ValueError, message_parts, lambda: fit(lstm, x, x))
    raises(ValueError, message_parts[1:], lambda: lstm(x))
    trainer = Trainer(
        keras.Sequential([keras.Input((6, 4)), CountingLayer(), keras.layers.Dense(4)])
    )
    trainer.compile("sgd", "mse")
    message_parts = ["CountingLayer.call()", "Use `add_weight(trainable=False)`"]
    raises(RuntimeError, message_parts, lambda: fit(trainer, x, x))


class CountingLayer(keras.layers.Layer):
    """Counts calls in a `tf.Variable`, which each device would have separately."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.count = tf.Variable(0.0, trainable=False)

    def call(self, x):
        self.count.assign_add(1.0)
        return x * self.count
