"""Engine for a mesh: its devices run the forward and backward passes together."""

import warnings

import numpy as np
import tensorflow as tf

from dtransformer.parallel.collectives.replica_consistency import ReplicaConsistency
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.mesh import variable as mesh_variable
from dtransformer.parallel.mesh.axis_rules import axis_size, mesh_axis, relayout, replicate
from dtransformer.parallel.mesh.batch import (
    local_value,
    num_rows,
    put_batch,
    put_scalars,
    put_sharded,
    rows_added,
)
from dtransformer.parallel.mesh.function import MeshFunction
from dtransformer.parallel.pipeline_parallel.shared_chunks import count_blocks
from dtransformer.parallel.runtime import job
from dtransformer.reports import audit
from dtransformer.trainers.compile_checks import find_trained_batch_norms
from dtransformer.trainers.data import input_symbols
from dtransformer.trainers.engines.base import Engine
from dtransformer.trainers.engines.output_gradients import training_outputs
from dtransformer.trainers.forward_step import StepScalars

MANY_BLOCKS = 24  # DTensor takes about half a minute to compile a function with this many blocks.


class MeshEngine(Engine):
    """Engine that runs forward and backward passes on this rank's mesh.

    Args:
        step: The `ForwardStep`.
    """

    def __init__(self, step):
        self._step = step
        self._consistency = ReplicaConsistency()
        self._train = self._outputs = self._test = self._predict = None

    def build(self, first):
        if self._train is not None:
            return
        network = self._step.network
        if not network.built:
            network(input_symbols(first))
        _warn_slow_compilation(network)
        self._train = MeshFunction(self._train_on_mesh, network.variables, gradients=True)
        self._outputs = MeshFunction(self._outputs_on_mesh, network.variables)
        self._test = MeshFunction(self._test_on_mesh, network.variables)
        self._predict = MeshFunction(self._predict_on_mesh, network.variables)

    def collectives(self):
        num_micro_batches = get_parallel_config().micro_batch_num
        collectives = audit.mesh_collectives(self._train.compiled, self._train.calls)
        collectives += audit.mesh_collectives(self._outputs.compiled, self._outputs.calls)
        return num_micro_batches * collectives

    def forward_backward(self, inputs, labels, sample_weight, scalars):
        self._consistency.check((inputs, labels, sample_weight), "train")
        batch = put_batch(inputs, labels, sample_weight)
        self.input_shapes = tf.nest.map_structure(lambda x: tuple(np.shape(x)), inputs)
        gradients, outputs, sums = self._train(*batch, *map(put_scalars, scalars))
        self._check_added_rows(inputs, self._train, training=True)
        weights = self._step.network.trainable_variables
        shards = [
            shard
            for weight, gradient in zip(weights, gradients)
            for shard in mesh_variable.unpacked(weight, gradient)
        ]
        return shards, _remove_added_rows(outputs, inputs), tf.nest.map_structure(local_value, sums)

    def training_outputs(self, inputs, seed):
        outputs = self._outputs(put_sharded(inputs), put_scalars(seed))
        return _remove_added_rows(outputs, inputs)

    def evaluate(self, inputs, labels, sample_weight, counts):
        self._consistency.check((inputs, labels, sample_weight), "test")
        batch = put_batch(inputs, labels, sample_weight)
        outputs, sums = self._test(*batch, put_scalars(counts))
        self._check_added_rows(inputs, self._test)
        return _remove_added_rows(outputs, inputs), tf.nest.map_structure(local_value, sums)

    def predict(self, inputs):
        self._consistency.check(inputs, "predict")
        return _remove_added_rows(self._predict(put_sharded(inputs)), inputs)

    def _check_added_rows(self, inputs, function, training=False):
        """Check that nothing counts the zero rows that fill up a batch.

        The loss excludes these rows.

        Raises:
            ValueError: If rows were added and layers add losses, update states or metrics, or, in
                training, if there is a trainable BatchNormalization.
        """
        rows = num_rows(inputs)
        axis = axis_size(mesh_axis("batch"))
        if not rows_added(rows):
            return
        counter = None
        if function.adds_losses:
            counter = "losses that layers add"
        elif training and find_trained_batch_norms(self._step.network):
            counter = "the means of a BatchNormalization"
        elif self._step.states.is_used:
            counter = "states and metrics of layers"
        if counter is not None:
            raise ValueError(
                f"A batch or micro-batch of {rows} rows is filled up with zeros, because the "
                f"mesh's data axis has size {axis}, and {counter} would include them. Use batches "
                f"with a multiple of {axis * get_parallel_config().micro_batch_num} rows, or drop "
                "the remainder."
            )

    # Functions that are traced on the mesh.

    def _train_on_mesh(self, inputs, labels, sample_weight, counts, loss_scale, seed):
        job.record_compilation()
        scalars = StepScalars(counts, loss_scale[0], seed[:2])
        gradients, outputs, sums = self._step.loss_and_gradients(
            inputs, labels, sample_weight, scalars
        )
        gradients = [
            relayout(tf.convert_to_tensor(gradient), mesh_variable.sharding_specs(weight))
            for weight, gradient in zip(self._step.network.trainable_variables, gradients)
        ]
        return gradients, replicate(outputs), replicate(sums)

    def _outputs_on_mesh(self, inputs, seed):
        job.record_compilation()
        return replicate(training_outputs(self._step, inputs, seed[:2]))

    def _test_on_mesh(self, *batch):
        return replicate(self._step.outputs_and_sums(*batch))

    def _predict_on_mesh(self, inputs):
        return replicate(self._step.outputs(inputs))


def _warn_slow_compilation(network):
    """Warn if the network is so deep that its first step takes long to compile."""
    num_blocks = count_blocks(network)
    if num_blocks >= MANY_BLOCKS and job.is_chief():
        warnings.warn(
            f"{num_blocks} blocks are compiled for the mesh as one function, which may take "
            "minutes. To compile equal blocks only once, with the same losses, pass "
            "TransformerOpParallelConfig(pipeline_schedule='interleaved', "
            f"pipeline_chunks={num_blocks // 4 + 1}, ...) to dtransformer.init() before you create "
            "the network. Later steps are slower if blocks are small. See 'Deep networks on a mesh' in "
            "docs/pipeline.md.",
            stacklevel=2,
        )


def _remove_added_rows(outputs, inputs):
    """Return the local outputs without the rows that were added to the batch."""
    rows = num_rows(inputs)
    return tf.nest.map_structure(lambda x: None if x is None else local_value(x)[:rows], outputs)
