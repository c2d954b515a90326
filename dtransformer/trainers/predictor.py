"""Prediction for the batches of a dataset."""

import keras
import tensorflow as tf

from dtransformer.parallel.collectives.replica_consistency import check_replica_consistency
from dtransformer.parallel.runtime import job
from dtransformer.trainers.padded_vocabulary import without_padding
from dtransformer.trainers.step_runner import without_optionals


class Predictor:
    """Compiled prediction of an engine.

    Args:
        engine: The `Engine`, built.
        network: The `keras.Model`.
        compiler: The `StepCompiler`.
        sharding: `RowSharding` of the batches.

    Call arguments:
        batches: List of batches, tuples of inputs, labels and sample weights.

    Returns:
        Nested tensors [rows, ...], the outputs of all batches. For global batches every rank
        returns all rows.
    """

    def __init__(self, engine, network, compiler, sharding):
        self._engine = engine
        self._network = network
        self._sharding = sharding
        self._compiled = compiler.compile_step(self._predict)

    def __call__(self, batches):
        if self._sharding.is_global:
            batches = without_optionals(batches)
            check_replica_consistency(batches, job.data_parallel_group(), "a prediction")
        outputs = [self._compiled(batch, None, self._sharding) for batch in batches]
        return tf.nest.map_structure(lambda *xs: tf.concat(xs, 0), *outputs)

    def _predict(self, batch, sharding):
        if sharding.is_global:
            batch = sharding.local_rows(batch)
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        outputs = sharding.gather_rows(self._engine.predict(inputs))
        return without_padding(outputs, self._network)
