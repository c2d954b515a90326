"""Training of networks of Keras' and KerasHub's layers, by `Trainer` or by Keras' `fit`."""

import functools

import keras

import dtransformer
from dtransformer.trainers import Trainer
from harness.keras_networks import NETWORKS, make_batch
from harness.layouts import ALONE

STEPS = 20
QUICK_STEPS = 5


def train(name, steps, layout):
    """Train a network of `NETWORKS` for some steps on one batch.

    Keras trains on one device. Every rank starts from other weights, and rank 0's weights must win,
    except in a pipeline, where each rank has the only weights of its stage.
    """
    keras.utils.set_random_seed(dtransformer.rank() if layout.stages == 1 else 0)
    network = NETWORKS[name]()
    inputs, labels = make_batch(name)
    model = network if layout == ALONE else Trainer(network)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), loss, metrics=["accuracy"])
    history = model.fit(
        inputs, labels, batch_size=len(labels), epochs=steps, shuffle=False, verbose=0
    ).history
    results = {
        "losses": history["loss"],
        "accuracies": history["accuracy"],
        "evaluation": model.evaluate(inputs, labels, verbose=0),
        "outputs": model.predict(inputs, verbose=0),
        "bytes": 4 * network.count_params(),
    }
    if layout != ALONE:
        results["bytes_per_device"] = model.plan().bytes_per_device
    return results


TASKS = {name: functools.partial(train, name, STEPS) for name in NETWORKS}
TASKS |= {f"{name}_quick": functools.partial(train, name, QUICK_STEPS) for name in NETWORKS}
