"""Promise: what a batch has that cannot be is told in one line, on every layout."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.errors import InputError
from dtransformer.layers import CrossEntropyLoss, PositionEmbedding
from dtransformer.models import CausalLM
from dtransformer.trainers import Trainer
from dtransformer.trainers.step_errors import errors_in_one_line
from tests.on_mesh import on_mesh, raises, start

IDS = np.random.default_rng(0).integers(1, 12, (8, 6)).astype("int32")
CLASSES = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def language_model(loss=None, optimizer="sgd"):
    network = CausalLM(12, hidden_size=8, num_heads=4, num_layers=1, dropout_rate=0.0)
    trainer = Trainer(network)
    trainer.compile(optimizer, loss)
    return trainer


def with_one(value, dtype="int32"):
    ids = IDS.astype(dtype)
    ids[0, 0] = value
    return ids


def fit(trainer, x=IDS, y=IDS):
    return trainer.fit(x, y, verbose=0).history["loss"]


BAD_LABELS = {
    label: f"^labels, expected 0 to 11; the least and the greatest of the batch are {both}{hint}$"
    f"|^an id or label of the batch is {label}, expected 0 to 11{hint}$"  # whichever comes first
    for label, both, hint in ((100, "1 and 100", ""), (-100, "-100 and 11", ": .*ignore_id=-100.*"))
}


@pytest.mark.parametrize(["label", "words"], BAD_LABELS.items())
@pytest.mark.parametrize("method", ["fit", "evaluate", "train_on_batch", "test_on_batch"])
def test_labels_out_of_range(method, label, words):
    with pytest.raises(ValueError, match=words):
        getattr(language_model(), method)(IDS, with_one(label))


def test_labels_out_of_range_of_a_network_whose_vocabulary_is_not_known():
    inputs = keras.Input((6,), dtype="int32")
    trainer = Trainer(keras.Sequential([inputs, keras.layers.Embedding(12, 12)]))
    trainer.compile("sgd", CrossEntropyLoss())
    with pytest.raises(
        ValueError, match="labels, expected 0 or more; .* -3 and 11$|is -3, expected"
    ):
        fit(trainer, y=with_one(-3))
    with pytest.raises(ValueError, match="^an id or label of the batch is 12, expected 0 to 11$"):
        fit(trainer, y=with_one(12))


def test_what_reads_the_data_refuses_them():
    def read():
        raise InputError("x/shard.npy is damaged: copy it again")

    ids = lambda _: tf.ensure_shape(tf.numpy_function(read, [], tf.int32), (8, 6))
    data = tf.data.Dataset.range(3).map(lambda n: (ids(n), ids(n)))
    with pytest.raises(InputError, match="^x/shard.npy is damaged: copy it again$"):
        language_model(CrossEntropyLoss()).fit(data, verbose=0)


def test_labels_that_are_ignored_may_be_out_of_range():
    ignored = language_model(CrossEntropyLoss(ignore_id=-100))
    assert np.isfinite(fit(ignored, y=with_one(-100))).all()
    with pytest.raises(
        ValueError, match="labels other than ignore_id=-100, expected 0 to 11; .* -1 "
    ):
        fit(ignored, y=with_one(-1))


def test_labels_that_are_no_integers():
    with pytest.raises(
        ValueError, match="takes the numbers of classes, and the labels are float32"
    ):
        fit(language_model(), y=IDS.astype("float32"))


@pytest.mark.parametrize("elements", [(IDS, IDS), (IDS.astype("float32"), IDS[:, 0])])
def test_a_dataset_without_batches(elements):
    network = CausalLM(12, hidden_size=8, num_heads=2, num_layers=1)
    if elements[0].dtype == "float32":
        network = keras.Sequential([keras.Input(IDS.shape[1:]), keras.layers.Dense(1)])
    trainer = Trainer(network)
    trainer.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"without the batch's dimension: call batch\(...\)"):
        trainer.fit(tf.data.Dataset.from_tensor_slices(elements), verbose=0)


def test_labels_of_a_keras_loss():
    with pytest.raises(
        ValueError, match="a label of the batch is 50, and the outputs have 12 classes"
    ):
        fit(language_model(CLASSES), y=with_one(50))


@pytest.mark.parametrize("number", [-1, 12])
@pytest.mark.parametrize("method", ["fit", "predict", "predict_on_batch"])
def test_ids_that_no_table_has(method, number):
    words = f"^an id or label of the batch is {number}, expected 0 to 11$"
    with pytest.raises(ValueError, match=words):
        getattr(language_model(), method)(with_one(number), *[IDS] * (method == "fit"))


class Silent(keras.Model):
    """Forgets to return what it computes."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        self.dense(x)


def test_a_network_that_returns_nothing():
    trainer = Trainer(Silent())
    trainer.compile("sgd", "mse")
    x = np.zeros((8, 3), "float32")
    for run in (lambda: trainer.fit(x, x[:, :1], verbose=0), lambda: trainer.predict(x, verbose=0)):
        with pytest.raises(ValueError, match="network 'silent' returned None"):
            run()


def test_the_failure_of_another_rank_is_one_line():
    """Of Horovod's error, which has a line for each function in between."""
    told = "Graph execution error:\n\nHorovod has been shut down. This was caused by"
    with pytest.raises(RuntimeError, match="^another rank has failed, or left: ") as caught:
        with errors_in_one_line():
            raise tf.errors.UnknownError(None, None, told)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda: PositionEmbedding(8, "learned")(tf.zeros([1, 9, 4])),
        lambda: keras.Sequential([PositionEmbedding(8, "learned")])(tf.zeros([1, 9, 4])),
        lambda: fit(language_model(), np.tile(IDS, 200), np.tile(IDS, 200)),
    ],
)
def test_what_a_call_refuses_is_one_line(call):
    """Keras would put its arguments around it."""
    with pytest.raises(ValueError) as caught:
        call()
    assert "\n" not in str(caught.value) and "max_length" in str(caught.value)


def test_other_errors_are_as_they_were():
    def fail(labels, outputs):
        tf.debugging.assert_less(labels, tf.zeros([], labels.dtype), "of the user's own")
        return tf.reduce_mean(outputs, -1)

    with pytest.raises(tf.errors.InvalidArgumentError, match="assert_less"):
        fit(language_model(fail))


def test_a_loss_that_is_nan_is_told_once(recwarn):
    inputs = keras.Input((3,))
    trainer = Trainer(keras.Model(inputs, keras.layers.Dense(1)(inputs)))
    trainer.compile("sgd", "mse")
    x = np.full((8, 3), np.nan, "float32")
    trainer.fit(x, x[:, :1], batch_size=2, epochs=2, verbose=0)
    told = [str(warning.message) for warning in recwarn if "nan" in str(warning.message)]
    assert len(told) == 1 and "The loss of step 1 is nan" in told[0]


@on_mesh
def test_the_same_on_a_mesh():
    start()
    for label in BAD_LABELS:
        words = ["labels, expected 0 to 11; the least and the greatest", str(label)]
        raises(ValueError, words, lambda y=label: fit(language_model(), y=with_one(y)))
    words = ["Adam has ema_overwrite_frequency=2, which does not work if a mesh"]
    optimizer = keras.optimizers.Adam(use_ema=True, ema_overwrite_frequency=2)
    raises(ValueError, words, lambda: fit(language_model(optimizer=optimizer)))
    swaps, words = [keras.callbacks.SwapEMAWeights()], ["SwapEMAWeights", "averaged_weights()"]
    raises(ValueError, words, lambda: language_model().fit(IDS, IDS, verbose=0, callbacks=swaps))
    inputs = keras.Input((6, 4))
    lstm = Trainer(keras.Model(inputs, keras.layers.LSTM(4, return_sequences=True)(inputs)))
    lstm.compile("sgd", "mse")
    x = np.zeros((8, 6, 4), "float32")
    words = ["lstm", "which DTensor cannot compute"]
    raises(ValueError, words, lambda: fit(lstm, x, x))
    raises(ValueError, words[1:], lambda: lstm(x))
    counts = Trainer(keras.Sequential([keras.Input((6, 4)), Counts(), keras.layers.Dense(4)]))
    counts.compile("sgd", "mse")
    words = ["Counts.call()", "Use `add_weight(trainable=False)`"]
    raises(RuntimeError, words, lambda: fit(counts, x, x))


class Counts(keras.layers.Layer):
    """Keeps a variable of TensorFlow's, which each device would count in."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.number = tf.Variable(0.0, trainable=False)

    def call(self, x):
        self.number.assign_add(1.0)
        return x * self.number
