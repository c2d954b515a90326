"""Training of networks with `BatchNormalization(synchronized=True)`, by `Trainer` or Keras' `fit`."""

import functools

import keras
import numpy as np
from keras import layers

from dtransformer.trainers import Trainer
from harness.layouts import ALONE

STEPS = 20
QUICK_STEPS = 3
_CLASSES = 5


def batch_norm(**options):
    return layers.BatchNormalization(momentum=0.8, synchronized=True, **options)


def resnet():
    """Return a residual network of convolutions, and a batch."""
    pictures = keras.Input((6, 6, 3))
    x = layers.Conv2D(8, 3, padding="same")(pictures)
    for _ in range(2):
        y = layers.Conv2D(8, 3, padding="same", use_bias=False)(x)
        y = layers.ReLU()(batch_norm()(y))
        y = batch_norm()(layers.Conv2D(8, 3, padding="same", use_bias=False)(y))
        x = layers.ReLU()(layers.Add()([x, y]))
    x = layers.GlobalAveragePooling2D()(x)
    network = keras.Model(pictures, layers.Dense(_CLASSES)(x))
    rng = np.random.default_rng(0)
    # Rows have different means, so the statistics of two rows differ from the statistics of all.
    inputs = rng.standard_normal((8, 6, 6, 3)) + np.arange(8.0)[:, None, None, None]
    return network, inputs.astype("float32"), rng.integers(0, _CLASSES, 8)


def masked(num_rows=7):
    """Return a network whose mask removes padding, and a batch of rows that ranks cannot halve."""
    ids = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 8, mask_zero=True)(ids)
    x = batch_norm()(layers.Dense(8)(x))
    x = layers.GlobalAveragePooling1D()(x)
    network = keras.Model(ids, layers.Dense(_CLASSES)(x))
    rng = np.random.default_rng(0)
    inputs = rng.integers(1, 20, (num_rows, 6))
    inputs[np.arange(6) > np.arange(num_rows)[:, None]] = 0
    return network, inputs.astype("int32"), rng.integers(0, _CLASSES, num_rows)


def channels_first():
    """Return a network that normalizes the first feature axis of masked rows, and a batch."""
    x = keras.Input((4, 6))
    y = layers.Masking()(x)
    y = batch_norm(axis=1, renorm=True)(y)
    network = keras.Model(x, layers.Dense(_CLASSES)(layers.Flatten()(y)))
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((8, 4, 6)).astype("float32")
    inputs[:5, 2:] = 0.0
    return network, inputs, rng.integers(0, _CLASSES, 8)


NETWORKS = {"resnet": resnet, "masked": masked, "channels_first": channels_first}


def train(name, steps, layout):
    """Train a network for some steps on one batch. Keras trains on one device."""
    keras.utils.set_random_seed(0)
    network, inputs, labels = NETWORKS[name]()
    model = network if layout == ALONE else Trainer(network)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), loss)
    history = model.fit(
        inputs, labels, batch_size=len(labels), epochs=steps, shuffle=False, verbose=0
    ).history
    evaluation = model.evaluate(inputs, labels, verbose=0)
    weights = {f"weights/{i}": weight for i, weight in enumerate(network.get_weights())}
    return {"losses": history["loss"], "evaluation": evaluation} | weights


TASKS = {name: functools.partial(train, name, STEPS) for name in NETWORKS}
TASKS |= {f"{name}_quick": functools.partial(train, name, QUICK_STEPS) for name in NETWORKS}
