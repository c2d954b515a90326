"""The compute plane: forward and backward of this rank's share of a batch.

Where the island is one device, it is the trainer's own functions. On a mesh they are
compiled for it; the weights' slices and the batch go in, this rank's slices of the
gradients come out.
"""

import numpy as np
import tensorflow as tf

from dtransformer.parallel.dtensor.batch import (
    local_value,
    num_rows,
    put_batch,
    put_numbers,
    put_sharded,
)
from dtransformer.parallel.dtensor.function import MeshFunction
from dtransformer.parallel.dtensor.layouts import relayout, replicate
from dtransformer.parallel.dtensor.variable import specs_of, unpacked
from dtransformer.parallel.same_batch import check_mesh_batch
from dtransformer.reports import audit


class MeshEngine:
    """The compute plane on the island's mesh.

    Args:
        trainer: the `Trainer`, whose network is built.
    """

    def __init__(self, trainer):
        self._trainer = trainer
        self._weights = trainer.network.trainable_variables
        self.input_shapes = None  # of the last batch
        read = trainer.network.variables
        self._train = MeshFunction(self._train_on_mesh, read, gradients=True)
        self._test = MeshFunction(self._test_on_mesh, read)
        self._predict = MeshFunction(self._predict_on_mesh, read)

    def collectives(self):
        """Return the `Collective`s of the training step that was compiled last."""
        return audit.mesh_collectives(self._train.compiled)

    def train(self, inputs, labels, sample_weight, count, loss_scale, seed):
        """As `Trainer._loss_and_gradients`; gradients are those of this rank's shards."""
        check_mesh_batch((inputs, labels, sample_weight))
        batch = put_batch(inputs, labels, sample_weight)
        self.input_shapes = tf.nest.map_structure(lambda x: tuple(np.shape(x)), inputs)
        count = None if count is None else put_numbers(count)
        numbers = count, put_numbers(loss_scale), put_numbers(seed)
        gradients, outputs, sums = self._train(*batch, *numbers)
        shards = [
            part
            for variable, gradient in zip(self._weights, gradients)
            for part in unpacked(variable, gradient)
        ]
        return shards, self._rows(outputs, inputs), tf.nest.map_structure(local_value, sums)

    def test(self, inputs, labels, sample_weight):
        """As `Trainer._outputs_and_sums`."""
        check_mesh_batch((inputs, labels, sample_weight))
        outputs, sums = self._test(*put_batch(inputs, labels, sample_weight))
        return self._rows(outputs, inputs), tf.nest.map_structure(local_value, sums)

    def predict(self, inputs):
        """As `Trainer.call`."""
        check_mesh_batch(inputs)
        return self._rows(self._predict(put_sharded(inputs)), inputs)

    def _train_on_mesh(self, inputs, labels, sample_weight, count, loss_scale, seed):
        count = None if count is None else count[0]
        gradients, outputs, sums = self._trainer._loss_and_gradients(
            inputs, labels, sample_weight, count, loss_scale[0], seed[:2]
        )
        gradients = [
            relayout(tf.convert_to_tensor(gradient), specs_of(variable))
            for variable, gradient in zip(self._weights, gradients)
        ]
        return gradients, replicate(outputs), replicate(sums)

    def _test_on_mesh(self, *args):
        return replicate(self._trainer._outputs_and_sums(*args))

    def _predict_on_mesh(self, inputs):
        return replicate(self._trainer(inputs, training=False))

    @staticmethod
    def _rows(outputs, inputs):
        """Return outputs without the rows that were added to the batch."""
        number = num_rows(inputs)
        return tf.nest.map_structure(
            lambda x: None if x is None else local_value(x)[:number], outputs
        )
