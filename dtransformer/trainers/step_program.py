"""The training step as functions, made once: forward–backward, optimizer step, logs."""

import functools

import tensorflow as tf

from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.runtime import job
from dtransformer.parallel.runtime.seeds import derived_seed
from dtransformer.trainers.engines.accumulation import in_micro_batches
from dtransformer.trainers.engines.base import Numbers
from dtransformer.trainers.expert_loads import ExpertLoads
from dtransformer.trainers.optimizer import reduce as grads


class StepProgram:
    """What a trainer's steps call, one after the other.

    Where the engine compiles itself, what follows it is compiled in parts; else all is traced
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
        self._step, self._states, self._optimizer = step, step.states, optimizer
        self.optimizer_step, self.metrics = optimizer_step, metrics
        self.expert_loads = ExpertLoads()
        self.forward_backward, self.evaluate = engine.forward_backward, engine.evaluate
        number = get_parallel_config().micro_batch_num
        if number > 1 and not engine.takes_micro_batches:
            self.forward_backward = in_micro_batches(
                engine.forward_backward, number, optimizer_step.reduce_micro_batch
            )
        self.finish, self.finish_test = self._finish, self._finish_test
        self._graphs = {}
        if engine.compiles_itself:
            self.finish_test = _compiled(self._finish_test)
            self._begin = self._part(self._begin)
            self._end = self._part(self._end)
            optimizer_step.compile(self._part)

    @property
    def graphs(self) -> list:
        """The graphs that a step was traced in last, but for the engine's; none before the first."""
        return list(self._graphs.values())

    def _part(self, function):
        """Return a part of `finish`, compiled, whose graph is kept."""

        @functools.wraps(function)
        def traced(*args):
            if not tf.executing_eagerly():
                self._graphs[function.__name__] = tf.compat.v1.get_default_graph()
                job.compiles()
            return function(*args)

        return _compiled(traced)

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
        if not tf.executing_eagerly():
            self._graphs = {"finish": tf.compat.v1.get_default_graph()}
        changed, held, begun = self._begin(gradients, sums)
        units = self.optimizer_step.units
        gradients = [
            changed.get(str(i), gradients[unit.positions[0]]) for i, unit in enumerate(units)
        ]
        self.optimizer_step.update(gradients, held, begun["norm"])
        del changed, gradients, held  # what metrics compute has their memory
        return self._end(begun, counts, *seen)

    def _begin(self, gradients, sums):
        """Return what `ShardedOptimizer.update` takes, and a dict of what the logs are made of.

        Of the gradients only those that are changed, a dict by their units' numbers as texts.
        """
        totals = grads.reduce_sum(sums, name="sums")
        self._states.apply(totals)
        factor = None
        if "divided" in totals:
            factor = tf.math.divide_no_nan(1.0, totals.pop("divided"))
        loss = (totals.pop("loss") + totals.pop("added")) * (1.0 if factor is None else factor)
        rate = tf.convert_to_tensor(self._optimizer.learning_rate)  # changes with the update
        scale = self.optimizer_step.loss_scale.value()
        new, held, norm = self.optimizer_step.prepared(gradients, factor)
        same = {id(x) for x in gradients}
        changed = {str(i): x for i, x in enumerate(new) if id(x) not in same}
        begun = {"totals": totals, "loss": loss, "rate": rate, "scale": scale, "norm": norm}
        return changed, held, begun

    def _end(self, begun, counts, *seen):
        """Return the logs, after the update."""
        totals, loss, norm = begun["totals"], begun["loss"], begun["norm"]
        loss_scale = self.optimizer_step.loss_scale
        logs = self.metrics.update(loss, totals, counts, *seen)
        if loss_scale.is_used:
            logs["loss_scale"] = begun["scale"]
            logs["skipped_steps"] = tf.identity(loss_scale.skipped_steps)
        logs |= self._states.results() | self.expert_loads.update(totals)
        return {**logs, "step_loss": loss, "gradient_norm": norm, "learning_rate": begun["rate"]}

    def _finish_test(self, sums, counts, *seen):
        """Return the logs of an evaluated batch."""
        totals = grads.reduce_sum(sums, "test_sums")
        loss = totals.pop("loss") + totals.pop("added")
        loss = tf.math.divide_no_nan(loss, totals.pop("divided", 1.0))
        self._states.apply(totals)
        return self.metrics.update(loss, totals, counts, *seen) | self._states.results()


def _compiled(function):
    return tf.function(function, reduce_retracing=True, autograph=False)
