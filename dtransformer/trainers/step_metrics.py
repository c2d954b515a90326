"""Metrics of a step: means since the epoch began, and what the step itself was."""

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.collectives import transport
from dtransformer.parallel.collectives.transport import by_dtype
from dtransformer.parallel.pipeline_parallel.forward_pass import from_last
from dtransformer.parallel.runtime import job
from dtransformer.trainers.optimizer.reduce import reduce_sum


class StepMetrics:
    """Means over the global batch, and the metrics that the trainer was compiled with.

    Args:
        loss, accuracy: `keras.metrics.Mean`s, which Keras resets at the start of an epoch.
        compiled: Keras' container of the user's metrics; None where there are none.
        objective: the `Objective`, which says what a batch weighs in an epoch's mean.
        built: a function that is called when metrics have got states, with the first batch.

    Attributes:
        names: those that Keras' lists have of the logs of `update`, once it was traced: not the
            accuracy where other metrics were asked for.
    """

    def __init__(self, loss, accuracy, compiled, objective, built):
        self._loss, self._accuracy, self._compiled = loss, accuracy, compiled
        self._objective, self._built = objective, built
        self._of_outputs = {}  # the losses of the outputs, where there are several
        self.names = ()

    @property
    def of_outputs(self):
        """The list of the means of the outputs' losses, where there are several."""
        return list(self._of_outputs.values())

    @property
    def sees_outputs(self):
        """Whether some metric looks at labels and outputs."""
        return self._compiled is not None

    @property
    def is_built(self):
        """Whether the metrics have their states, which has to be before they are read."""
        return self._compiled is None or self._compiled.built

    def build(self, labels, outputs, sample_weight=None):
        """Create the states of the metrics, for tensors like these.

        Some metrics, such as `F1Score` and `R2Score`, create states in their first update.
        """
        like = lambda x: (
            None if x is None else tf.zeros([1, *(n or 1 for n in x.shape[1:])], x.dtype)
        )
        with tf.init_scope():
            row = keras.tree.map_structure(like, (labels, outputs, sample_weight))
            self._compiled.build(*row[:2])
            if job.size() > 1 or not all(metric.variables for metric in self._compiled.metrics):
                self._compiled.update_state(*row)
                self._compiled.reset_state()
        self._built()

    def update(self, loss, totals, counts, labels, outputs, sample_weight):
        """Count a batch, of a step that is skipped, too; return the logs, means of the epoch so far.

        Args:
            loss: of the global batch.
            totals: dict of float32 scalars, sums over the global batch; see `ForwardStep.sums`.
            counts: see `Objective.counts`, of the global batch.
            labels, outputs, sample_weight: of this rank; None where no metric sees them. Outputs
                come with their masks, see `ForwardStep.kept`.
        """
        of_outputs = {x: f"{x.removeprefix('loss/')}_loss" for x in totals if x.startswith("loss/")}
        if self._of_outputs.keys() != of_outputs.keys():
            with tf.init_scope():
                self._of_outputs = {x: keras.metrics.Mean(name=y) for x, y in of_outputs.items()}
            self._built()
        rows = self._objective.rows(counts)
        weight = totals["counted"] if self._objective.weights_epoch_means else rows
        logs = {"loss": self._mean(self._loss, loss, weight)}
        if "right" in totals:
            counted = totals["counted"]
            right = tf.math.divide_no_nan(totals["right"], counted)
            logs["accuracy"] = self._mean(self._accuracy, right, counted)
        for name, mean in self._of_outputs.items():
            logs[mean.name] = self._mean(mean, totals[name], rows)
        self.names = set(logs)
        if self._compiled is not None:
            self._update_compiled(labels, outputs, sample_weight)
            asked = self._compiled.result()
            self.names = self.names - {"accuracy"} | set(asked)
            logs.update(asked)
        return logs

    @staticmethod
    def _mean(mean, value, weight):
        # What is not finite does not count where its weight is 0, either.
        mean.update_state(tf.where(weight > 0, value, 0.0), sample_weight=weight)
        return mean.result()

    def _update_compiled(self, labels, outputs, sample_weight):
        states = [variable.value for variable in self._compiled.variables]
        before = [tf.identity(state) for state in states]
        if outputs is not None:
            self._compiled.update_state(labels, _compat.with_masks(*outputs), sample_weight)
        if job.data_shard()[1] > 1:
            self._reduce_states(states, before)
        if job.stage()[1] > 1:
            values = from_last([tf.identity(state) for state in states], "metrics")
            for state, value in zip(states, values):
                state.assign(value)

    def _reduce_states(self, states, before):
        """Make the states those of the global batch: what each rank added, or the extreme."""
        how = reductions(self._compiled)
        sums = [i for i, kind in enumerate(how) if kind == "sum"]

        def add_up(added, dtype):
            numbered = {str(i): x for i, x in enumerate(added)}
            return list(reduce_sum(numbered, name=f"metrics_{dtype}").values())

        totals = by_dtype(add_up, [states[i] - before[i] for i in sums])
        for i, total in zip(sums, totals):
            states[i].assign(before[i] + total)
        for i, kind in enumerate(how):
            if kind != "sum":
                op, group = kind.capitalize(), job.data_parallel_group()
                states[i].assign(transport.all_reduce(states[i], op, group, f"metrics_{i}"))


def reductions(metric: keras.metrics.Metric) -> list[str]:
    """Return how the ranks' states of a metric come together, "sum", "max" or "min" of each.

    Those of Keras' own metrics are sums. An own metric that counts by itself says it by its
    attribute `state_reduction`.

    Raises:
        ValueError: it does not.
    """
    inner = getattr(metric, "metrics", None) or []
    if inner:
        return [how for one in inner for how in reductions(one)]
    how = getattr(metric, "state_reduction", None)
    if how is None and type(metric).update_state.__module__.startswith("keras."):
        how = "sum"
    if how not in ("sum", "max", "min"):
        raise ValueError(
            f"the metric {metric.name!r} has an update_state of its own, and several data shards: "
            "say by its class' attribute state_reduction whether the ranks' states come together "
            f"by 'sum', 'max' or 'min'; got {how!r}"
        )
    return [how] * len(metric.variables)
