"""The compute plane: forward and backward of this rank's share of a batch.

Where the island is one device, it is the trainer's own functions. On a mesh they are
compiled for it; the weights' slices and the batch go in, this rank's slices of the
gradients come out.
"""

import numpy as np
import tensorflow as tf

from dtransformer.parallel import layout, variables
from dtransformer.parallel.audit import mesh_collectives
from dtransformer.parallel.computation import (
    MeshFunction,
    check_island_batch,
    num_rows,
    put_batch,
    put_numbers,
    put_rows,
    whole,
)


class MeshPlane:
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
        return mesh_collectives(self._train.compiled)

    def train(self, inputs, labels, sample_weight, count, loss_scale, seed):
        """As `Trainer._loss_and_gradients`; gradients are those of this rank's shards."""
        check_island_batch((inputs, labels, sample_weight))
        batch = put_batch(inputs, labels, sample_weight)
        self.input_shapes = tf.nest.map_structure(lambda x: tuple(np.shape(x)), inputs)
        count = None if count is None else put_numbers(count)
        numbers = count, put_numbers(loss_scale), put_numbers(seed)
        gradients, outputs, sums = self._train(*batch, *numbers)
        shards = [
            part
            for variable, gradient in zip(self._weights, gradients)
            for part in variables.unpacked(variable, gradient)
        ]
        return shards, self._rows(outputs, inputs), tf.nest.map_structure(whole, sums)

    def test(self, inputs, labels, sample_weight):
        """As `Trainer._outputs_and_sums`."""
        check_island_batch((inputs, labels, sample_weight))
        outputs, sums = self._test(*put_batch(inputs, labels, sample_weight))
        return self._rows(outputs, inputs), tf.nest.map_structure(whole, sums)

    def predict(self, inputs):
        """As `Trainer.call`."""
        check_island_batch(inputs)
        return self._rows(self._predict(put_rows(inputs)), inputs)

    def _train_on_mesh(self, inputs, labels, sample_weight, count, loss_scale, seed):
        count = None if count is None else count[0]
        gradients, outputs, sums = self._trainer._loss_and_gradients(
            inputs, labels, sample_weight, count, loss_scale[0], seed[:2]
        )
        gradients = [
            layout.pin(tf.convert_to_tensor(gradient), variables.specs_of(variable))
            for variable, gradient in zip(self._weights, gradients)
        ]
        return gradients, layout.pin_whole(outputs), layout.pin_whole(sums)

    def _test_on_mesh(self, *args):
        return layout.pin_whole(self._trainer._outputs_and_sums(*args))

    def _predict_on_mesh(self, inputs):
        return layout.pin_whole(self._trainer(inputs, training=False))

    @staticmethod
    def _rows(outputs, inputs):
        """Return outputs without the rows that were added to the batch."""
        number = num_rows(inputs)
        return tf.nest.map_structure(lambda x: None if x is None else whole(x)[:number], outputs)
