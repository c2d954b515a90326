"""Names of variables in a checkpoint do not depend on earlier networks of the process."""

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
    names_by_id = variable_names(network)
    return [names_by_id[id(variable)] for variable in network.variables]


def test_unnamed_layers_are_numbered_within_their_network():
    expected = names(sequential())
    assert names(sequential()) == expected
    assert expected == [
        *("dense/kernel", "dense/bias"),
        *("sequential/dense/kernel", "sequential/dense/bias"),
        "seed_generator/seed_generator_state",
        *("dense_1/kernel", "dense_1/bias", "own/kernel", "own/bias"),
        "seed_generator_1/seed_generator_state",
    ]


def test_named_layers_keep_their_paths():
    network = translation_model()
    network.build()
    paths = [variable.path.removeprefix(f"{network.name}/") for variable in network.variables]
    assert names(network) == paths and len(set(paths)) == len(paths)
