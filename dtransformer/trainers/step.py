"""A training step: count tokens, run forward and backward, reduce, clip, update, log."""

import keras
import tensorflow as tf

from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.ops.gpu_calls import INDEX_TYPE
from dtransformer.parallel.runtime import job
from dtransformer.parallel.runtime.seeds import derived_seed
from dtransformer.trainers.batch_fingerprints import FINGERPRINTS, fingerprint_table
from dtransformer.trainers.engines import make_forward_backward
from dtransformer.trainers.expert_loads import EXPERTS, ExpertLoads
from dtransformer.trainers.forward_step import StepScalars
from dtransformer.trainers.optimizer.gradient_norms import LAYER_NORM
from dtransformer.trainers.optimizer.reduction import reduce_sum


class Step:
    """Training and evaluation steps on this rank's rows of a batch.

    Args:
        forward: The `ForwardStep`.
        engine: An `Engine`, built.
        optimizer: The Keras optimizer.
        optimizer_step: Its `ShardedOptimizer`.
        metrics: The `StepMetrics`.
        compiler: The `StepCompiler`.

    Attributes:
        metrics: The `StepMetrics`.
        expert_loads: `ExpertLoads` of the steps of the current epoch.
    """

    def __init__(self, forward, engine, optimizer, optimizer_step, metrics, compiler):
        self._forward = forward
        self._states = forward.states
        self._needs_reduce = forward.layout.needs_reduce
        self._engine = engine
        self._optimizer = optimizer
        self._optimizer_step = optimizer_step
        self.metrics = metrics
        self.expert_loads = ExpertLoads()
        self._num_micro_batches = get_parallel_config().micro_batch_num
        self._is_one_part = self._num_micro_batches * job.data_shard()[1] == 1
        reduction = optimizer_step.reduce_micro_batch
        self._forward_backward = make_forward_backward(forward, engine, reduction, compiler)
        self._fingerprints = compiler.compile_part(fingerprint_table)
        self._reduce = compiler.compile_part(self._reduce_and_clip)
        self._apply = compiler.compile_part(optimizer_step.apply)
        self._logs = compiler.compile_part(self._training_logs)
        self._test_logs = compiler.compile_part(self._evaluation_logs, trains=False)
        self.take_seed()

    def take_seed(self):
        """Derive all seeds from the job's seed, which a checkpoint may have changed."""
        if self._optimizer_step.rounding is not None:
            self._optimizer_step.rounding.take_seed()
        self._seed = tf.constant(derived_seed("dropout"), INDEX_TYPE)

    def num_updates(self):
        """Return the number of optimizer steps so far, read from the device."""
        return int(self._optimizer.iterations)

    def train(self, batch, sharding):
        """Update the weights with a batch.

        Args:
            batch: Inputs, labels and sample weights, nested tensors [b, ...].
            sharding: `RowSharding` of the batch.

        Returns:
            A dict of scalar tensors, the logs. With several data ranks `FINGERPRINTS` contains the
            ranks' batch fingerprints.
        """
        local_batch = self._local_batch(batch, sharding, self._num_micro_batches)
        first_rows = self._first_rows(batch, sharding)
        scalars = self._step_scalars(*local_batch, first_rows)
        gradients, outputs, sums = self._forward_backward(*local_batch, scalars)
        metric_inputs = self._metric_inputs(local_batch, outputs)
        if self._needs_reduce:
            sums[FINGERPRINTS] = self._fingerprints(batch, sharding.is_global)
        gradients, unit_values, result = self._reduce(gradients, sums)
        self._apply(gradients, unit_values, result["norm"])
        del gradients, unit_values  # Free the gradients before metrics allocate.
        return self._logs(result, scalars.counts, *metric_inputs)

    def test(self, batch, sharding):
        """Evaluate a batch; arguments and result as in `train`."""
        local_batch = self._local_batch(batch, sharding)
        counts = self._forward.counts(*local_batch)
        outputs, sums = self._engine.evaluate(*local_batch, counts)
        if self._needs_reduce:
            sums[FINGERPRINTS] = self._fingerprints(batch, sharding.is_global)
        return self._test_logs(sums, counts, *self._metric_inputs(local_batch, outputs))

    def _local_batch(self, batch, sharding, num_parts=1):
        """Return this rank's `(inputs, labels, sample_weight)`; probe the layers' states once.

        For `num_parts`, see `RowSharding.local_rows`.
        """
        if sharding.is_global:
            batch = sharding.local_rows(batch, num_parts)
        local_batch = keras.utils.unpack_x_y_sample_weight(batch)
        if self._states.needs_probe:
            inputs, labels, _ = local_batch
            with tf.init_scope():
                self._states.probe(self._forward.network, self._forward.objective, inputs, labels)
        return local_batch

    def _first_rows(self, batch, sharding):
        """Return `StepScalars.first_rows`."""
        if self._is_one_part:
            return tf.zeros([1], INDEX_TYPE)
        return sharding.first_rows(batch, self._num_micro_batches)

    def _step_scalars(self, inputs, labels, sample_weight, first_rows):
        return StepScalars(
            counts=self._forward.counts(inputs, labels, sample_weight),
            loss_scale=self._optimizer_step.loss_scale.value(),
            seed=tf.stack([self._seed, tf.cast(self._optimizer.iterations, INDEX_TYPE)]),
            first_rows=first_rows,
        )

    def _metric_inputs(self, local_batch, outputs):
        """Return the labels, outputs and sample weights for metrics, or `None`s without metrics.

        Without metrics the compiled logs do not depend on the batch's shapes.
        """
        compiled = self.metrics.compiled
        if compiled is None:
            return None, None, None
        _, labels, sample_weight = local_batch
        if not compiled.container.built:
            example = self._engine.example_outputs() if outputs is None else outputs[0]
            compiled.build(labels, example, sample_weight)
        return labels, outputs, sample_weight

    def _reduce_and_clip(self, gradients, sums):
        """Return the arguments of `ShardedOptimizer.apply` and a dict of values for the logs."""
        totals = self._reduce_sums(sums, "sums")
        loss = totals.pop("loss") + totals.pop("added")
        factor = None
        # The true loss normalizer is only known after the forward pass.
        if "normalizer_ratio" in totals:
            factor = tf.math.divide_no_nan(1.0, totals.pop("normalizer_ratio"))
            loss *= factor
        result = {
            "totals": totals,
            "loss": loss,
            # Read before the update changes them.
            "learning_rate": tf.convert_to_tensor(self._optimizer.learning_rate),
            "loss_scale": self._optimizer_step.loss_scale.value(),
        }
        gradients, unit_values, *norms = self._optimizer_step.reduce_and_clip(gradients, factor)
        result["norm"], result["layer_norms"] = norms
        return gradients, unit_values, result

    def _training_logs(self, result, counts, *metric_inputs):
        totals = result["totals"]
        loss = result["loss"]
        logs = self.metrics.update(loss, totals, counts, *metric_inputs)
        loss_scale = self._optimizer_step.loss_scale
        if loss_scale.is_used:
            logs["loss_scale"] = result["loss_scale"]
            logs["skipped_steps"] = tf.identity(loss_scale.skipped_steps)
            logs["skipped_in_a_row"] = tf.identity(loss_scale.skipped_in_a_row)
        guard = self._optimizer_step.guard
        if guard is not None:
            logs["skipped_spikes"] = tf.identity(guard.num_skipped)
            logs["spikes_in_a_row"] = tf.identity(guard.in_a_row)
        if any(name.startswith(EXPERTS) for name in totals):
            logs |= self.expert_loads.update(totals)
        logs |= self._other_logs(totals)
        logs["step_loss"] = loss
        logs["gradient_norm"] = result["norm"]
        logs["learning_rate"] = result["learning_rate"]
        logs |= {LAYER_NORM + name: norm for name, norm in result["layer_norms"].items()}
        return logs

    def _evaluation_logs(self, sums, counts, *metric_inputs):
        totals = self._reduce_sums(sums, "test_sums")
        loss = totals.pop("loss") + totals.pop("added")
        loss = tf.math.divide_no_nan(loss, totals.pop("normalizer_ratio", 1.0))
        logs = self.metrics.update(loss, totals, counts, *metric_inputs)
        return logs | self._other_logs(totals)

    def _other_logs(self, totals):
        """Return the batch fingerprints and the results of metrics that belong to layers."""
        logs = {FINGERPRINTS: totals[FINGERPRINTS]} if self._needs_reduce else {}
        if self._states.metrics:
            logs |= self._states.metric_results()
        return logs

    def _reduce_sums(self, sums, name):
        """Reduce sums over the data-parallel group and apply the layers' state updates."""
        totals = reduce_sum(sums, name) if self._needs_reduce else dict(sums)
        if self._states.is_used:
            self._states.apply(totals)
        return totals
