"""Small networks with their trainers and data, for translation and of plain Keras layers."""

import keras
import numpy as np
import tensorflow as tf

from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import TranslationTransformer
from dtransformer.trainers import Trainer

VOCAB, SMOOTHING, BATCH, RATE = 12, 0.1, 4, 0.1
PAD, START, END = 0, 2, 3


class Record(keras.callbacks.Callback):
    """Records the logs of every step and the weights after it."""

    def on_train_begin(self, logs=None):
        self.logs, self.weights = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append({name: float(value) for name, value in logs.items()})
        self.weights.append([v.numpy() for v in self.model.network.trainable_variables])

    def __getitem__(self, name):
        return [logs[name] for logs in self.logs]


def sentences(num_rows=12, seed=0):
    """Return inputs and labels of sentences with different lengths."""
    rng = np.random.default_rng(seed)
    source = rng.integers(4, VOCAB, (num_rows, 6), "int32")
    labels = rng.integers(4, VOCAB, (num_rows, 5), "int32")
    for row in range(num_rows):
        source[row, 6 - row % 4 :] = PAD
        end = 4 - row % 3
        labels[row, end], labels[row, end + 1 :] = END, PAD
    text = np.where(labels == END, PAD, labels)[:, :-1]
    target = np.concatenate([np.full((num_rows, 1), START, "int32"), text], axis=1)
    return {"source": source, "target": target}, labels


def batches(inputs, labels):
    for start in range(0, len(labels), BATCH):
        rows = slice(start, start + BATCH)
        yield {name: ids[rows] for name, ids in inputs.items()}, labels[rows]


def dataset():
    return tf.data.Dataset.from_tensor_slices(sentences()).batch(BATCH)


def small_model(**options):
    sizes = {"hidden_size": 16, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    return TranslationTransformer(VOCAB, **{**sizes, "dropout_rate": 0.0, **options})


def translation_trainer(optimizer=None, network=None, **compile_options):
    trainer = Trainer(network or small_model())
    trainer.compile(
        optimizer or keras.optimizers.SGD(RATE),
        CrossEntropyLoss(SMOOTHING, ignore_id=PAD),
        **compile_options,
    )
    return trainer


def get_weights_by_path(network):
    return {variable.path: variable.numpy() for variable in network.variables}


def points(num_rows=16, num_classes=None, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_rows, 3)).astype("float32")
    if num_classes:
        return x, np.digitize(x[:, 0], np.linspace(-1, 1, num_classes - 1)).astype("int32")
    return x, (x @ [[1.0], [-2.0], [0.5]]).astype("float32")


def dense_network(units=1, activation="tanh", **options):
    initializer = keras.initializers.GlorotUniform(seed=1)
    return keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, activation=activation, kernel_initializer=initializer),
            keras.layers.Dense(units, kernel_initializer=initializer, **options),
        ]
    )


def dense_trainer(optimizer="sgd", loss="mse", network=None, **options):
    trainer = Trainer(network or dense_network())
    trainer.compile(optimizer, loss, **options)
    return trainer


def squared(y_true, y_pred):
    return tf.reduce_mean(tf.square(y_true - y_pred), axis=-1)
