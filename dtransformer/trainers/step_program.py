"""The training step as functions, made once: forward–backward, optimizer step, logs."""

import tensorflow as tf

from dtransformer.parallel import job
from dtransformer.parallel.config import get_parallel_config
from dtransformer.parallel.seeds import derived_seed
from dtransformer.trainers import gradients as grads
from dtransformer.trainers.engines.accumulation import in_micro_batches
from dtransformer.trainers.engines.base import Numbers
from dtransformer.trainers.expert_loads import ExpertLoads


class StepProgram:
    """What a trainer's steps call, one after the other.

    Where the engine compiles itself, what follows it is compiled apart; else all is traced
    into the trainer's own `tf.function`.

    Args:
        step: the `ForwardStep`.
        engine: an `Engine`, built.
        optimizer: the Keras optimizer.
        optimizer_step: its `ShardedOptimizer`.
        metrics: the `StepMetrics`.

    Attributes:
        expert_loads: the `ExpertLoads` of the steps since the epoch began.
        forward_backward, evaluate: as the engine's; of all micro-batches.
        finish: a function of (gradients, sums, counts, labels, outputs, sample_weight), which
            updates the weights and returns the logs.
        finish_test: a function of (sums, counts, labels, outputs, sample_weight) that returns the logs.
    """

    def __init__(self, step, engine, optimizer, optimizer_step, metrics):
        self._step, self._optimizer = step, optimizer
        self.optimizer_step, self.metrics = optimizer_step, metrics
        self.expert_loads = ExpertLoads()
        self.forward_backward, self.evaluate = engine.forward_backward, engine.evaluate
        number = get_parallel_config().micro_batch_num
        if number > 1 and not engine.takes_micro_batches:
            self.forward_backward = in_micro_batches(
                engine.forward_backward, number, optimizer_step.reduce_micro_batch
            )
        self.finish, self.finish_test = self._finish, self._finish_test
        if engine.compiles_itself:
            options = {"reduce_retracing": True, "autograph": False}
            self.finish = tf.function(self._finish, **options)
            self.finish_test = tf.function(self._finish_test, **options)

    def numbers(self, inputs, labels, sample_weight):
        """Return the `Numbers` of a step, for this rank's share of the batch."""
        shard, _ = job.data_shard()
        start = tf.constant(derived_seed("dropout", shard))
        return Numbers(
            counts=self._step.counts(inputs, labels, sample_weight),
            loss_scale=tf.convert_to_tensor(self._optimizer.scale_loss(1.0), "float32"),
            seed=tf.stack([start, tf.cast(self._optimizer.iterations, "int32")]),
        )

    def counts(self, *batch):
        """Return `Numbers.counts` of (inputs, labels, sample_weight)."""
        return self._step.counts(*batch)

    def seen(self, *batch):
        """Return what metrics look at; None where there are none, so that shapes do not matter."""
        return batch if self.metrics.sees_outputs else (None,) * len(batch)

    def _finish(self, gradients, sums, counts, *seen):
        """Update the weights, and return the logs."""
        totals = grads.reduce_sum(sums, name="sums")
        factor = None
        if "divided" in totals:
            factor = tf.math.divide_no_nan(1.0, totals.pop("divided"))
        loss = (totals.pop("loss") + totals.pop("added")) * (1.0 if factor is None else factor)
        rate = tf.convert_to_tensor(self._optimizer.learning_rate)  # changes with the update
        loss_scale = self.optimizer_step.loss_scale
        scale = loss_scale.value()
        norm = self.optimizer_step.step(gradients, factor)
        # A step that is skipped does not count.
        happened = tf.math.is_finite(norm) if loss_scale.is_used else tf.constant(True)
        logs = self.metrics.update(loss, totals, counts, happened, *seen)
        if loss_scale.is_used:
            logs["loss_scale"] = scale
            logs["skipped_steps"] = tf.identity(loss_scale.skipped_steps)
        logs.update(self.expert_loads.update(totals))
        logs.update(step_loss=loss, gradient_norm=norm, learning_rate=rate)
        return {**logs, **{name: totals[name] for name in ("tokens", "flops") if name in totals}}

    def _finish_test(self, sums, counts, *seen):
        """Return the logs of an evaluated batch."""
        totals = grads.reduce_sum(sums, "test_sums")
        loss = totals.pop("loss") + totals.pop("added")
        loss = tf.math.divide_no_nan(loss, totals.pop("divided", 1.0))
        return self.metrics.update(loss, totals, counts, tf.constant(True), *seen)
