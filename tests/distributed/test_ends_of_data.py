"""Data ranks handle data of unknown length, and recover from an invalid layout."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtransformer
from dtransformer import parallel_config
from dtransformer.parallel.collectives import transport
from dtransformer.parallel.runtime import job
from dtransformer.trainers import Trainer
from tests.shared_runs import on_ranks

LAYOUT = "dp2@2x1"


def values(rank):
    """Return 12 random rows, the same for each call with this rank."""
    return tf.cast(np.random.default_rng(rank).normal(size=(12, 4)) * 8, "float32")


def _train_evaluate_and_predict(config):
    """Train, evaluate and predict twice on data whose length TensorFlow does not know."""
    layers = [keras.layers.Dense(8, activation="relu"), keras.layers.Dense(3)]
    data = tf.data.Dataset.from_tensor_slices((values(dtransformer.rank()), np.zeros(12, "i")))
    data = data.batch(4, drop_remainder=True).filter(lambda *_: True)  # The shapes stay static.
    with parallel_config(**config):
        trainer = Trainer(keras.Sequential([keras.Input((4,)), *layers]))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trainer.compile("sgd", loss)
        history = trainer.fit(data, epochs=2, validation_data=data, verbose=0, shard=False)
        outputs = [trainer.predict(data, verbose=0, shard=False) for _ in range(2)]
    losses = history.history["val_loss"]
    assert losses[1] < losses[0]
    assert [x.shape[-1] for x in outputs] == [3, 3]


@on_ranks(LAYOUT)
def test_data_of_unknown_length_ends_between_steps():
    _train_evaluate_and_predict({})


@on_ranks(LAYOUT)
def test_data_of_unknown_length_ends_between_steps_with_gathered_weights():
    _train_evaluate_and_predict(
        {"optimizer_shard": 3, "parallel_optimizer_threshold": 0, "micro_batch_num": 2}
    )


@on_ranks(LAYOUT)
def test_collectives_work_after_an_invalid_layout():
    with pytest.raises(ValueError, match="model_parallel"):
        dtransformer.init(dtransformer.TransformerOpParallelConfig(model_parallel=3))
    group = job.data_parallel_group()
    total = transport.all_reduce(tf.constant(2.0), "Sum", group, "after_a_refusal")
    assert float(total) == 4


@on_ranks("dp2mp2@2x2")
def test_larger_mesh_after_smaller_meshes_raises_an_error():
    with pytest.raises(RuntimeError, match="meshes of 2 ranks, but the ranks were in meshes of 1"):
        dtransformer.init(dtransformer.TransformerOpParallelConfig(model_parallel=2))
