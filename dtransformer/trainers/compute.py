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
    put_rows,
    put_whole,
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
        batch = self._put(inputs, labels, sample_weight)
        self.input_shapes = tf.nest.map_structure(lambda x: tuple(np.shape(x)), inputs)
        count = None if count is None else _put_numbers(count)
        numbers = count, _put_numbers(loss_scale), _put_numbers(seed)
        gradients, outputs, sums = self._train(*batch, *numbers)
        shards = [
            part
            for variable, gradient in zip(self._weights, gradients)
            for part in variables.unpacked(variable, gradient)
        ]
        return shards, self._rows(outputs, inputs), tf.nest.map_structure(whole, sums)

    def test(self, inputs, labels, sample_weight):
        """As `Trainer._outputs_and_sums`."""
        outputs, sums = self._test(*self._put(inputs, labels, sample_weight))
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
        return gradients, _pin_whole(outputs), _pin_whole(sums)

    def _test_on_mesh(self, *args):
        return _pin_whole(self._trainer._outputs_and_sums(*args))

    def _predict_on_mesh(self, inputs):
        return _pin_whole(self._trainer(inputs, training=False))

    def _put(self, inputs, labels, sample_weight):
        batch = {"inputs": inputs, "labels": labels}
        num_rows = _num_rows(batch)
        missing = -num_rows % layout.axis_size(layout.mesh_axis("batch"))
        if missing and sample_weight is None:  # rows that are added may not count
            sample_weight = np.ones([num_rows], "float32")
        if sample_weight is not None:
            batch["sample_weight"] = sample_weight
        check_island_batch(batch)
        batch = put_rows(batch)
        return batch["inputs"], batch["labels"], batch.get("sample_weight")

    @staticmethod
    def _rows(outputs, inputs):
        """Return outputs without the rows that were added to the batch."""
        num_rows = _num_rows(inputs)
        return tf.nest.map_structure(lambda x: None if x is None else whole(x)[:num_rows], outputs)


def _put_numbers(numbers):
    """Put numbers that differ from step to step on the mesh, repeated.

    DTensor takes tensors of less than 256 entries for constants, and compiles the function
    again when they change.
    """
    return put_whole(np.resize(numbers, 256))


def _num_rows(batch):
    numbers = {len(x) for x in tf.nest.flatten(batch)}
    if len(numbers) != 1:
        raise ValueError(
            f"the tensors of a batch have different numbers of rows: {sorted(numbers)}"
        )
    return numbers.pop()


def _pin_whole(tensors):
    return tf.nest.map_structure(
        lambda x: None if x is None else layout.pin(x, (None,) * len(x.shape)), tensors
    )
