"""Train Keras models with Keras' `fit` in one process, and with the trainer on every layout."""

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import TransformerEncoder, TransformerEncoderLayer, VocabEmbedding
from dtransformer.models import CausalLM
from dtransformer.parallel.runtime import job
from dtransformer.trainers import Trainer
from harness import stateful

ROWS, WIDTH, CLASSES = 20, 5, 4
rng = np.random.default_rng(0)
X = rng.standard_normal((ROWS, WIDTH, 3)).astype("float32")
CLASS = rng.integers(0, CLASSES, (ROWS, WIDTH))
VALUE = rng.standard_normal((ROWS, WIDTH, 1)).astype("float32")
WEIGHT = rng.random((ROWS, WIDTH)).astype("float32")
IDS = rng.integers(0, 12, (ROWS, WIDTH + 1)).astype("int32")


class Largest(keras.metrics.Metric):
    """Metric of the largest output. Its state is a maximum, not a sum."""

    state_reduction = "max"

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, labels, outputs, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(outputs)))

    def result(self):
        return self.value


class Shares(keras.metrics.Metric):
    """Fraction of labels of the first class. Like F1Score, it creates its state on the first batch."""

    state_reduction = "sum"

    def update_state(self, labels, outputs, sample_weight=None):
        if not self.variables:
            self.counts = self.add_variable((outputs.shape[-1],), "zeros", name="counts")
        classes = keras.ops.one_hot(keras.ops.reshape(labels, (-1,)), outputs.shape[-1])
        self.counts.assign_add(keras.ops.sum(classes, axis=0))

    def result(self):
        return self.counts[0] / keras.ops.sum(self.counts)


def train(model, data, optimizer=None, epochs=2, callbacks=(), **options):
    """Fit, evaluate and predict with the global data, and return history, evaluation and outputs."""
    if job.size() > 1 or job.mesh() is not None:
        model = Trainer(model)
    model.compile(optimizer or keras.optimizers.AdamW(0.01), **options)
    history = model.fit(
        **data, batch_size=8, epochs=epochs, verbose=0, shuffle=False, callbacks=list(callbacks)
    )
    evaluation = model.evaluate(data["x"], data["y"], batch_size=8, verbose=0, return_dict=True)
    outputs = keras.tree.flatten(model.predict(data["x"], batch_size=8, verbose=0))
    return {
        "history": {name: list(map(float, values)) for name, values in history.history.items()},
        "evaluation": {name: float(value) for name, value in evaluation.items()},
        **{f"outputs/{index}": np.asarray(x) for index, x in enumerate(outputs)},
    }


def several_outputs():
    """Train a functional Keras model with two outputs, losses, loss weights and metrics."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((WIDTH, 3))
    regularizer = keras.regularizers.L2(0.1)
    x = keras.layers.Dense(8, activation="tanh", kernel_regularizer=regularizer)(inputs)
    tag = keras.layers.Dense(CLASSES, name="tag")(x)
    model = keras.Model(inputs, {"tag": tag, "value": keras.layers.Dense(1, name="value")(x)})
    classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    labels, weights = {"tag": CLASS, "value": VALUE}, {"tag": WEIGHT, "value": WEIGHT[:, :1]}
    return train(
        model,
        {"x": X, "y": labels, "sample_weight": weights},
        loss={"tag": classes, "value": "mse"},
        loss_weights={"tag": 1.0, "value": 0.3},
        metrics={"tag": ["accuracy", Largest()], "value": ["mae"]},
    )


def a_mask():
    """Train with a Keras mask, whose loss normalizer is known only after the forward pass."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((WIDTH,)),
            keras.layers.Embedding(12, 8, mask_zero=True),
            keras.layers.Dense(12),
        ]
    )
    classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Adam does not work here: for rows that are looked up several times, Keras squares each gradient
    # instead of their sum.
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    return train(model, {"x": IDS[:, :-1], "y": IDS[:, 1:]}, optimizer, loss=classes)


def keeps():
    """Train layers with states and metrics, behind a layer that sets a mask."""
    model = stateful.network(lambda: [stateful.Seen(), stateful.Counts(name="counts")])
    classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    data, optimizer = {"x": stateful.IDS, "y": stateful.TAGS}, keras.optimizers.SGD(0.5)
    options = stateful.masked_metrics()
    options["metrics"].append(Shares(name="shares"))
    result = train(model, data, optimizer, loss=classes, **options)
    counts = model.get_layer("counts")
    if counts.weights:  # Only the stage of this layer has its weights.
        assert (int(counts.steps), float(counts.rows)) == (4, 32.0)
        assert float(keras.ops.sum(counts.mean)) == pytest.approx(8.0e-4, abs=2e-6)
    return {**result, "begun": begun(), "with_calls": with_calls()}


def with_calls():
    """Return losses of a fit on local rows, and results of a callback that uses global data."""
    x, y = X.reshape(ROWS, -1), VALUE.reshape(ROWS, -1)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((WIDTH * 3,)), *map(keras.layers.Dense, (8, WIDTH))])
    data, options, calls = (x, y), {}, []
    if job.size() > 1 or job.mesh() is not None:
        index, count = job.data_shard()
        data, options = (x[index::count], y[index::count]), {"shard": False}
        model = Trainer(model)

    def call(epoch, logs):
        shared = {"shard": True} if options else {}
        calls.append(float(model.evaluate(x, y, batch_size=ROWS, verbose=0, **shared)))
        calls.append(float(np.sum(model.predict(x, verbose=0, **shared))))

    model.compile("sgd", "mse")
    callback = keras.callbacks.LambdaCallback(on_epoch_end=call)
    fitted = model.fit(
        *data, batch_size=ROWS, epochs=3, shuffle=False, verbose=0, callbacks=[callback], **options
    )
    return [*map(float, fitted.history["loss"]), *calls]


def begun():
    """Count the iterations over the datasets of training, validation and prediction."""
    times = [0, 0, 0]

    def dataset(index):
        def rows():
            times[index] += 1
            yield from zip(X.reshape(-1, WIDTH * 3), VALUE[:, 0])

        specs = (tf.TensorSpec((WIDTH * 3,)), tf.TensorSpec((1,)))
        return tf.data.Dataset.from_generator(rows, output_signature=specs).batch(10)

    model = keras.Sequential([keras.Input((WIDTH * 3,)), *map(keras.layers.Dense, (8, 1))])
    model = Trainer(model) if job.size() > 1 or job.mesh() is not None else model
    model.compile("sgd", "mse")
    model.fit(dataset(0), validation_data=dataset(1), epochs=2, verbose=0)
    model.predict(dataset(2), verbose=0)
    return times


def tokens():
    """Train a CausalLM with a Keras loss that ignores a class."""
    model = CausalLM(12, hidden_size=16, num_heads=2, num_layers=2, dropout_rate=0.0)
    model.build()
    classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=3)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    data = {"x": IDS[:16, :-1], "y": IDS[:16, 1:]}
    return train(model, data, optimizer, loss=classes, metrics=["accuracy"])


SIZES = {"hidden_size": 16, "num_heads": 2, "ffn_hidden_size": 32}
NO_DROPOUT = {"hidden_dropout_rate": 0.0, "attention_dropout_rate": 0.0}


class Weights(keras.callbacks.Callback):
    """Callback that reads, changes and restores weights, and sets learning rates."""

    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.1 / (1 + epoch)
        if epoch == 1:
            self.kept = self.model.get_weights()
        if epoch == 3:
            self.model.set_weights(self.kept)

    def on_epoch_end(self, epoch, logs=None):
        for layer in getattr(self.model, "network", self.model).layers:
            layer.set_weights([0.99 * weight for weight in layer.get_weights()])
        for weight in self.model.trainable_variables:
            weight.assign(weight * 0.99)


def callbacks(folder, layout):
    """Train with callbacks that read and write weights and learning rates."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((WIDTH,), dtype="int32")
    x = TransformerEncoder(2, **SIZES, **NO_DROPOUT)(keras.layers.Embedding(12, 16)(inputs))
    classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    logs = pathlib.Path(folder) / f"logs-{layout.name}"
    result = train(
        keras.Model(inputs, keras.layers.Dense(12)(x)),
        {"x": IDS[:16, :-1], "y": IDS[:16, 1:]},
        keras.optimizers.SGD(0.1, momentum=0.9),
        epochs=6,
        callbacks=[
            Weights(),
            keras.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True),
            keras.callbacks.TensorBoard(str(logs), histogram_freq=1),
        ],
        loss=classes,
    )
    job.barrier()
    return {**result, "log_folders": sorted(path.name for path in logs.iterdir())}


class SharedByHand(keras.Model):
    """Model that calls a block twice and uses its embedding table as the head."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedding = VocabEmbedding(12, 16)
        self.block = TransformerEncoderLayer(**SIZES, **NO_DROPOUT)

    def call(self, ids, training=False):
        x, table = self.embedding(ids)
        x = self.block(self.block(x, training=training), training=training)
        return keras.ops.matmul(x, keras.ops.transpose(table))


def shared_by_hand():
    keras.utils.set_random_seed(0)
    classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    data = {"x": IDS[:16, :-1], "y": IDS[:16, 1:]}
    return train(SharedByHand(), data, optimizer, loss=classes)


def between():
    """Train a model with Keras layers between ours, and a Keras mask that reaches our blocks."""
    keras.utils.set_random_seed(0)
    ids = np.where(np.arange(WIDTH) < 3, IDS[:16, :-1], 0)
    inputs = keras.Input((WIDTH,), dtype="int32")
    normal = keras.initializers.RandomNormal(stddev=1.0)  # Norms amplify noise in small rows.
    embedded = keras.layers.Embedding(12, 16, normal, mask_zero=True)(inputs)
    x = TransformerEncoder(1, **SIZES, **NO_DROPOUT, network_layers=2)(embedded)
    x = keras.layers.Conv1D(16, 3, padding="same")(x)
    x = keras.layers.MaxPooling1D(2, 1, padding="same")(x)
    x = keras.layers.LSTM(16, return_sequences=True, unroll=True)(x)
    x = TransformerEncoder(1, **SIZES, **NO_DROPOUT, network_layers=2, offset=1)(x)
    x = keras.layers.GroupQueryAttention(4, 4, 2)(x, x)
    classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = keras.Model(inputs, keras.layers.Dense(12)(x))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    return train(model, {"x": ids, "y": IDS[:16, 1:]}, optimizer, loss=classes)


class Adds(keras.layers.Layer):
    """Layer that adds a mean over the rows to the loss."""

    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


class AddingBlock(TransformerEncoderLayer):
    """Block with recompute that adds to the loss."""

    def add_sublayers(self):
        super().add_sublayers()
        self.adds = Adds()
        self.recompute(True)

    def _compute(self, inputs, attention_mask, training):
        return self.adds(super()._compute(inputs, attention_mask, training))


def added():
    """Train with added losses, a metric with integer states, and an optimizer that is already built.

    Sharded weights do not support such an optimizer.
    """
    keras.utils.set_random_seed(0)
    inputs = keras.Input((WIDTH, 3))
    x = AddingBlock(8, 2, 16, **NO_DROPOUT)(keras.layers.Dense(8, activation="tanh")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(CLASSES)(Adds()(x)))
    validation = tf.data.Dataset.from_tensor_slices((X[:16], CLASS[:16])).batch(8)
    overlap = keras.metrics.MeanIoU(CLASSES, sparse_y_pred=False)
    classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    data = {"x": X[:16], "y": CLASS[:16], "validation_data": validation}
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    if job.mesh() is None:
        optimizer.build(model.trainable_variables)
    return train(model, data, optimizer, loss=classes, metrics=["accuracy", overlap])


FIRST_CALLS = {
    "evaluate": lambda model, x, y: model.evaluate(x, y, batch_size=8, verbose=0),
    "predict": lambda model, x, y: model.predict(x, batch_size=8, verbose=0),
    "test_on_batch": lambda model, x, y: model.test_on_batch(x[:8], y[:8]),
    "predict_on_batch": lambda model, x, y: model.predict_on_batch(x[:8]),
    "call": lambda model, x, y: model(x[:8]),
}


def first_calls():
    """Call each method of a model that was neither trained nor built."""
    outputs = {}
    for name, call in FIRST_CALLS.items():
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        inputs = keras.Input((WIDTH, 3))
        x = TransformerEncoder(2, 8, 2, 16, **NO_DROPOUT)(keras.layers.Dense(8)(inputs))
        model = keras.Model(inputs, keras.layers.Dense(CLASSES)(x))
        if job.size() > 1 or job.mesh() is not None:
            model = Trainer(model)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        outputs[f"outputs/{name}"] = np.asarray(call(model, X[:16], CLASS[:16]))
    return {"history": {}, "evaluation": {}, **outputs}


_ALL = (
    several_outputs,
    a_mask,
    keeps,
    tokens,
    callbacks,
    shared_by_hand,
    between,
    added,
    first_calls,
)
TASKS = {task.__name__: task for task in _ALL}
