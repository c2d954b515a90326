"""Training of Keras' and KerasHub's layers with and without recompute, on the same layout."""

import functools

import keras
import numpy as np
from keras import layers

import dtransformer
from dtransformer.trainers import Trainer

STEPS = 3
_LENGTH, _HIDDEN, _VOCAB_SIZE, _ROWS = 32, 16, 12, 8
_NAMES = ("inner_0", "inner_1")


class Block(layers.Layer):
    """Custom layer with inner layers, dropout and an added loss."""

    def build(self, shape):
        self.attention = layers.MultiHeadAttention(2, _HIDDEN // 2, dropout=0.2)
        self.hidden = layers.Dense(16 * _HIDDEN, activation="gelu")
        self.projection = layers.Dense(_HIDDEN)
        self.dropout = layers.Dropout(0.3)
        self.attention.build(shape, shape)
        self.hidden.build(shape)
        self.projection.build((*shape[:-1], 16 * _HIDDEN))

    def call(self, x):
        x = x + self.dropout(self.attention(x, x))
        y = self.projection(self.dropout(self.hidden(x)))
        self.add_loss(0.01 * keras.ops.mean(keras.ops.square(y)))
        return x + y


class Attention(layers.MultiHeadAttention):
    """Self-attention with one argument."""

    def call(self, x, training=None):
        return super().call(x, x, training=training)

    def build(self, shape):
        super().build(shape, shape)

    def compute_output_spec(self, x, training=None):
        return keras.KerasTensor(x.shape, x.dtype)


def _hub_block(name):
    import keras_hub  # An optional package.

    return keras_hub.layers.TransformerEncoder(16 * _HIDDEN, 2, dropout=0.2, name=name)


LAYERS = {
    "dense": lambda name: keras.Sequential(
        [layers.Dense(16 * _HIDDEN, "gelu", name=name), layers.Dense(_HIDDEN)]
    ),
    "attention": lambda name: Attention(2, 64, dropout=0.2, name=name),
    "subclass": lambda name: Block(name=name),
    "keras_hub": _hub_block,
}


def _network(make, mode, by_name):
    keras.utils.set_random_seed(0)
    scope = keras.RematScope(mode=mode, output_size_threshold=1, layer_names=_NAMES)
    with scope:
        ids = keras.Input((_LENGTH,), dtype="int32")
        x = layers.Embedding(_VOCAB_SIZE, _HIDDEN)(ids)
        for name in _NAMES:
            layer = make(name)
            if by_name:
                parts = getattr(layer, "layers", [layer])
                dtransformer.recompute(parts[0])
            x = layer(x)
        return keras.Model(ids, layers.Dense(_VOCAB_SIZE)(x))


def _train(kind, mode=None, by_name=False):
    """Return the losses of some steps and the sum of all weights after them."""
    network = _network(LAYERS[kind], mode, by_name)
    trainer = Trainer(network)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainer.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    ids = np.random.default_rng(0).integers(0, _VOCAB_SIZE, (_ROWS, _LENGTH)).astype("int32")

    def step():
        return float(trainer.train_on_batch(ids, ids, return_dict=True)["step_loss"])

    losses = [step() for _ in range(STEPS)]
    weights = float(sum(np.abs(weight).sum() for weight in network.get_weights()))
    return {"losses": losses, "weights": weights}


def compare(kind, modes):
    """Return the results without recompute, with `dtransformer.recompute`, and with scopes."""
    results = {"stored": _train(kind), "recomputed": _train(kind, by_name=True)}
    return results | {mode: _train(kind, mode) for mode in modes}


MODES = ("full", "activations", "larger_than", "list_of_layers")
TASKS = {kind: functools.partial(compare, kind, ()) for kind in LAYERS}
TASKS["scopes"] = functools.partial(compare, "subclass", MODES)
TASKS["quick"] = functools.partial(compare, "dense", ("list_of_layers",))
