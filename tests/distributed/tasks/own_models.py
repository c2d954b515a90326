"""Train custom models with Keras' `fit` in one process, and with the trainer on every layout."""

import pathlib

import keras
import numpy as np

from dtransformer.layers import (
    TransformerDecoder,
    TransformerEncoder,
    TransformerEncoderLayer,
    VocabEmbedding,
)
from dtransformer.parallel.runtime import job
from dtransformer.trainers import Trainer

ROWS, WIDTH, HIDDEN, VOCAB_SIZE, CLASSES, STEPS = 8, 6, 16, 24, 4, 10
rng = np.random.default_rng(0)
IDS = rng.integers(1, VOCAB_SIZE, (ROWS, WIDTH + 1)).astype("int32")
TAGS = rng.integers(0, CLASSES, (ROWS, WIDTH)).astype("int32")
INPUTS = {
    "tagger": IDS[:, :-1],
    "translator": [IDS[:, :-1], IDS[::-1, :-1].copy()],
    "vision": rng.standard_normal((ROWS, 8, 8, 3)).astype("float32"),
    "plain": IDS[:, :-1],
}
LENGTHS = rng.random((ROWS, 1)).astype("float32")
SIZES = {"hidden_size": HIDDEN, "num_heads": 2, "ffn_hidden_size": 32}
NO_DROPOUT = {"hidden_dropout_rate": 0.0, "attention_dropout_rate": 0.0}


def classes():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def train(model, x, y, **options):
    """Train with the global batch and return losses, evaluation, weights and outputs."""
    network = model
    if job.size() > 1 or job.mesh() is not None:
        model = Trainer(network)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), **options)
    history = model.fit(x, y, batch_size=ROWS, epochs=STEPS, verbose=0, shuffle=False)
    evaluation = model.evaluate(x, y, batch_size=ROWS, verbose=0, return_dict=True)
    outputs = keras.tree.flatten(model.predict(x, batch_size=ROWS, verbose=0))
    return {
        "losses": list(map(float, history.history["loss"])),
        "evaluation": {name: float(value) for name, value in evaluation.items()},
        "num_weights": len(network.trainable_variables),
        "model": model,
        "parameters": [network.count_params(), model.count_params()],
        **{f"weights/{i}": x for i, x in enumerate(model.get_weights())},
        **{f"outputs/{i}": np.asarray(x) for i, x in enumerate(outputs)},
    }


class Tagger(keras.Model):
    """Model with our embedding and encoder, followed by a Keras layer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedding = VocabEmbedding(VOCAB_SIZE, HIDDEN)
        self.encoder = TransformerEncoder(2, **SIZES, **NO_DROPOUT)
        self.tags = keras.layers.Dense(CLASSES)

    def call(self, ids, training=False):
        words, _ = self.embedding(ids)
        return self.tags(self.encoder(words, training=training))


def tagger():
    return train(Tagger(), INPUTS["tagger"], TAGS, loss=classes(), metrics=["accuracy"])


def translator():
    """Train a functional model of Keras layers and ours, with two outputs and two losses."""
    source, target = keras.Input((WIDTH,), dtype="int32"), keras.Input((WIDTH,), dtype="int32")
    memory = keras.layers.Embedding(VOCAB_SIZE, HIDDEN, keras.initializers.RandomNormal(0, 1))(
        source
    )
    memory = TransformerEncoder(1, **SIZES, **NO_DROPOUT, network_layers=2)(memory)
    words = keras.layers.Embedding(VOCAB_SIZE, HIDDEN, keras.initializers.RandomNormal(0, 1))(
        target
    )
    decoder = TransformerDecoder(1, **SIZES, **NO_DROPOUT, offset=1, network_layers=2)
    words = decoder(words, encoder_output=memory)
    length = keras.layers.Dense(1, name="length")(keras.layers.GlobalAveragePooling1D()(memory))
    outputs = {"words": keras.layers.Dense(VOCAB_SIZE, name="words")(words), "length": length}
    return train(
        keras.Model([source, target], outputs),
        INPUTS["translator"],
        {"words": IDS[:, 1:], "length": LENGTHS},
        loss={"words": classes(), "length": "mse"},
        loss_weights={"words": 1.0, "length": 0.5},
    )


class VisionTransformer(keras.Model):
    """Model with a Keras convolution for patches, our blocks and a Keras head."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.patches = keras.layers.Conv2D(HIDDEN, 2, strides=2)
        self.flat = keras.layers.Reshape((16, HIDDEN))
        self.blocks = [TransformerEncoderLayer(**SIZES, **NO_DROPOUT) for _ in range(2)]
        self.pool = keras.layers.GlobalAveragePooling1D()
        self.head = keras.layers.Dense(CLASSES)

    def call(self, pictures, training=False):
        x = self.flat(self.patches(pictures))
        for block in self.blocks:
            x = block(x, training=training)
        return self.head(self.pool(x))


def vision():
    return train(
        VisionTransformer(), INPUTS["vision"], TAGS[:, 0], loss=classes(), metrics=["accuracy"]
    )


class Block(keras.layers.Layer):
    """Block that contains only Keras layers, like the blocks of KerasHub."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = keras.layers.MultiHeadAttention(2, HIDDEN // 2)
        self.norms = [keras.layers.LayerNormalization() for _ in range(2)]
        self.up = keras.layers.Dense(32, activation="gelu", kernel_regularizer="l2")
        self.down = keras.layers.Dense(HIDDEN)

    def call(self, x):
        y = self.norms[0](x)
        x += self.attention(y, y, use_causal_mask=True)
        return x + self.down(self.up(self.norms[1](x)))


def plain():
    """Train a language model that contains only Keras layers."""
    model = keras.Sequential(
        [
            keras.layers.Embedding(VOCAB_SIZE, HIDDEN),
            Block(),
            Block(),
            keras.layers.Dense(VOCAB_SIZE),
        ]
    )
    return train(model, INPUTS["plain"], IDS[:, 1:], loss=classes(), metrics=["accuracy"])


def model_path(folder, task, layout):
    """Return the path of the model that a task saves."""
    return pathlib.Path(folder) / f"{task}-{layout.name}.keras"


def seeded(task):
    """Return a task that seeds every rank equally, runs `task`, and saves and exports the model."""

    def run(folder, layout):
        keras.utils.set_random_seed(0)
        results = task()
        model, file = results.pop("model"), model_path(folder, task.__name__, layout)
        model.save(file)
        if isinstance(model, Trainer):
            model.export(file.with_suffix(""), verbose=False)
            before = [weight.numpy() for weight in model.weights]
            model.set_weights(model.get_weights())  # This sets the weights of all stages.
            assert all(map(np.array_equal, before, [weight.numpy() for weight in model.weights]))
        return results

    return run


TASKS = {one.__name__: seeded(one) for one in (tagger, translator, vision, plain)}
