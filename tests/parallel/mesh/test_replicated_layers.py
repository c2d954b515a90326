"""Promise: one warning reports the share of the weights that tensor parallelism does not shard."""

import warnings

import keras
import numpy as np

from dtransformer.layers import Linear
from dtransformer.models import CausalLM
from dtransformer.trainers import Trainer
from tests.on_mesh import on_mesh, start, stop


def warning_texts(network):
    """Predict twice with a network on a mesh and return the warnings about sharding."""
    trainer = Trainer(network)
    x = np.ones((4, 6), "int32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            trainer.predict(x, verbose=0)
    return [str(w.message) for w in caught if "sharding" in str(w.message)]


def keras_network(middle):
    embedding = keras.layers.Embedding(10, 8)  # 320 bytes
    norm = keras.layers.LayerNormalization()  # 64 bytes
    return keras.Sequential([keras.Input((6,)), embedding, norm, middle])


@on_mesh
def test_warns_once_with_the_bytes_that_are_not_sharded():
    start(model_parallel=2)
    (text,) = warning_texts(keras_network(keras.layers.Dense(4)))  # 144 bytes
    assert "`model_parallel=2` shards 0 of the 528 bytes" in text
    assert "replicates 528: Dense, Embedding have no sharding rule" in text
    stop()


@on_mesh
def test_warns_if_a_part_of_the_weights_is_sharded():
    start(model_parallel=2)
    # A kernel of 128 bytes and a bias of 16 bytes are sharded.
    (text,) = warning_texts(keras_network(Linear(4)))
    assert "shards 144 of the 528 bytes of the weights and replicates 384: Embedding" in text
    stop()


@on_mesh
def test_does_not_warn_of_layers_with_sharding_rules():
    start(model_parallel=2)
    assert not warning_texts(CausalLM(10, hidden_size=8, num_heads=2, num_layers=1))
    stop()
    start(data_parallel=2, model_parallel=1)
    assert not warning_texts(keras_network(keras.layers.Dense(4)))
    stop()
