"""A step, read from top to bottom: counts, forward–backward, reduce, clip, apply, logs."""

import tensorflow as tf

from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.ops.gpu_calls import INDEX_TYPE
from dtransformer.parallel.runtime import job
from dtransformer.parallel.runtime.seeds import derived_seed
from dtransformer.trainers.batch_fingerprints import FINGERPRINTS, fingerprint_table
from dtransformer.trainers.engines.accumulation import in_micro_batches
from dtransformer.trainers.engines.base import Numbers
from dtransformer.trainers.expert_loads import EXPERTS, ExpertLoads
from dtransformer.trainers.optimizer.reduce import reduce_sum


class Step:
    """Steps of training and of evaluation on this rank's share of a batch.

    Args:
        forward: the `ForwardStep`.
        engine: an `Engine`, built.
        optimizer: the Keras optimizer.
        optimizer_step: its `ShardedOptimizer`.
        metrics: the `StepMetrics`.
        compiler: the `StepCompiler`.

    Attributes:
        expert_loads: the `ExpertLoads` of the steps since the epoch began.
    """

    def __init__(self, forward, engine, optimizer, optimizer_step, metrics, compiler):
        self._forward, self._states, self._engine = forward, forward.states, engine
        self._adds_up = forward.parts.adds_up
        self._optimizer, self._optimizer_step = optimizer, optimizer_step
        self.metrics = metrics
        self.expert_loads = ExpertLoads()
        self._forward_backward = engine.forward_backward
        number = get_parallel_config().micro_batch_num
        if number > 1 and not engine.takes_micro_batches:
            self._forward_backward = in_micro_batches(
                engine.forward_backward, number, optimizer_step.reduce_micro_batch
            )
        self._fingerprints = compiler.part(fingerprint_table)
        self._reduce = compiler.part(self._reduce_and_clip)
        self._apply = compiler.part(optimizer_step.apply)
        self._logs = compiler.part(self._training_logs)
        self._test_logs = compiler.part(self._evaluation_logs, trains=False)
        self.take_seed()

    def take_seed(self):
        """Derive dropout masks from the job's seed, which a checkpoint may have changed."""
        self._seed = tf.constant(derived_seed("dropout", job.data_shard()[0]), INDEX_TYPE)

    def train(self, inputs, labels, sample_weight, *batch):
        """Update the weights with a batch.

        Args:
            inputs, labels, sample_weight: Nested tensors [b, ...], the local rows.
            *batch: Arguments of `fingerprint_table`.

        Returns:
            A dict of tensors, the logs. On several data ranks `FINGERPRINTS` has their tables.
        """
        numbers = self._numbers(inputs, labels, sample_weight)
        gradients, outputs, sums = self._forward_backward(inputs, labels, sample_weight, numbers)
        seen = self._seen(labels, outputs, sample_weight)
        if self._adds_up:
            sums[FINGERPRINTS] = self._fingerprints(*batch)
        gradients, held, result = self._reduce(gradients, sums)
        self._apply(gradients, held, result["norm"])
        del gradients, held  # what metrics compute has their memory
        return self._logs(result, numbers.counts, *seen)

    def test(self, inputs, labels, sample_weight, *batch):
        """Evaluate a batch; arguments and result as in `train`."""
        counts = self._forward.counts(inputs, labels, sample_weight)
        outputs, sums = self._engine.evaluate(inputs, labels, sample_weight, counts)
        if self._adds_up:
            sums[FINGERPRINTS] = self._fingerprints(*batch)
        return self._test_logs(sums, counts, *self._seen(labels, outputs, sample_weight))

    def _numbers(self, *batch):
        return Numbers(
            counts=self._forward.counts(*batch),
            loss_scale=self._optimizer_step.loss_scale.value(),
            seed=tf.stack([self._seed, tf.cast(self._optimizer.iterations, INDEX_TYPE)]),
        )

    def _seen(self, labels, outputs, sample_weight):
        """Return what metrics look at; None where there are none, so that shapes do not matter."""
        if not self.metrics.sees_outputs:
            return None, None, None
        if not self.metrics.is_built:
            like = self._engine.example_outputs() if outputs is None else outputs[0]
            self.metrics.build(labels, like, sample_weight)
        return labels, outputs, sample_weight

    def _reduce_and_clip(self, gradients, sums):
        """Return what `ShardedOptimizer.apply` takes, and a dict of what the logs are made of."""
        totals, factor = self._totals(sums, "sums"), None
        loss = totals.pop("loss") + totals.pop("added")
        if "divided" in totals:  # what the mean is divided by was a guess before the forward pass
            factor = tf.math.divide_no_nan(1.0, totals.pop("divided"))
            loss *= factor
        before = {  # which the update changes
            "learning_rate": tf.convert_to_tensor(self._optimizer.learning_rate),
            "loss_scale": self._optimizer_step.loss_scale.value(),
        }
        gradients, held, norm = self._optimizer_step.reduce_and_clip(gradients, factor)
        return gradients, held, {"totals": totals, "loss": loss, "norm": norm, **before}

    def _training_logs(self, result, counts, *seen):
        totals, loss = result["totals"], result["loss"]
        logs = self.metrics.update(loss, totals, counts, *seen)
        loss_scale = self._optimizer_step.loss_scale
        if loss_scale.is_used:
            logs["loss_scale"] = result["loss_scale"]
            logs["skipped_steps"] = tf.identity(loss_scale.skipped_steps)
            logs["skipped_in_a_row"] = tf.identity(loss_scale.skipped_in_a_row)
        if any(name.startswith(EXPERTS) for name in totals):
            logs |= self.expert_loads.update(totals)
        logs |= self._other_logs(totals) | {"step_loss": loss, "gradient_norm": result["norm"]}
        return {**logs, "learning_rate": result["learning_rate"]}

    def _evaluation_logs(self, sums, counts, *seen):
        totals = self._totals(sums, "test_sums")
        loss = totals.pop("loss") + totals.pop("added")
        loss = tf.math.divide_no_nan(loss, totals.pop("divided", 1.0))
        return self.metrics.update(loss, totals, counts, *seen) | self._other_logs(totals)

    def _other_logs(self, totals):
        """Return the fingerprints of the batches, and the metrics that layers own."""
        logs = {FINGERPRINTS: totals[FINGERPRINTS]} if self._adds_up else {}
        return logs | self._states.results() if self._states.metrics else logs

    def _totals(self, sums, name):
        """Return the sums over the data-parallel group; those of layers' states change them."""
        totals = reduce_sum(sums, name) if self._adds_up else dict(sums)
        if self._states.is_used:
            self._states.apply(totals)
        return totals
