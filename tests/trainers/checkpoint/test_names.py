"""Promise: a variable's name in a checkpoint does not depend on what the process made before."""

import keras

from dtransformer.trainers.checkpoint.training_state import variable_names
from harness.networks import translation_model


def sequential():
    inner = keras.Sequential([keras.layers.Dense(2), keras.layers.Dropout(0.1)])
    layers = [
        keras.layers.Dense(3),
        inner,
        keras.layers.Dense(4),
        keras.layers.Dense(5, name="own"),
    ]
    network = keras.Sequential([*layers, keras.layers.Dropout(0.5)])
    network.build((None, 6))
    return network


def names(network):
    found = variable_names(network)
    return [found[id(variable)] for variable in network.variables]


def test_layers_without_a_name_are_counted_in_their_network():
    expected = names(sequential())
    assert names(sequential()) == expected
    assert expected == [
        *("dense/kernel", "dense/bias"),
        *("sequential/dense/kernel", "sequential/dense/bias"),
        "seed_generator/seed_generator_state",
        *("dense_1/kernel", "dense_1/bias", "own/kernel", "own/bias"),
        "seed_generator_1/seed_generator_state",
    ]


def test_a_network_whose_layers_have_names():
    network = translation_model()
    network.build()
    paths = [variable.path.removeprefix(f"{network.name}/") for variable in network.variables]
    assert names(network) == paths and len(set(paths)) == len(paths)
