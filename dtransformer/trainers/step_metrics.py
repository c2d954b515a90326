"""Metrics of a step: means since the epoch began."""

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.collectives import transport
from dtransformer.parallel.collectives.transport import by_dtype
from dtransformer.parallel.pipeline_parallel.forward_pass import from_last
from dtransformer.parallel.runtime import job
from dtransformer.trainers.optimizer.reduce import reduce_sum


class StepMetrics:
    """Epoch means over the global batch, and the metrics passed to `Trainer.compile`.

    Args:
        objective: The `Objective`, which specifies the weight of a batch in an epoch's mean.
        compiled: Keras' container of the compiled metrics, or `None` without any.
        on_build: Function that is called when metrics have created states for the first batch.

    Attributes:
        names: Set of the log names of the last traced `update` that Keras' lists contain. The
            accuracy is among them only without compiled metrics.
    """

    def __init__(self, objective, compiled, on_build):
        self._objective = objective
        self._compiled = compiled
        self._on_build = on_build
        self._loss = keras.metrics.Mean(name="loss")
        self._accuracy = keras.metrics.Mean(name="accuracy")
        self._output_losses = {}  # Key in the sums -> mean, if the network has several losses.
        self.names = set()

    @property
    def means(self):
        """The loss, the accuracy and the container of the compiled metrics, if any."""
        metrics = [self._loss, self._accuracy, self._compiled]
        return [metric for metric in metrics if metric is not None]

    @property
    def output_losses(self):
        """The means of the outputs' losses, if the network has several."""
        return list(self._output_losses.values())

    @property
    def keras_metrics(self):
        """The metrics that Keras shows, in Keras' order."""
        metrics = [self._loss]
        if self._compiled is not None:
            metrics.append(self._compiled)
        elif self._objective.is_token_loss:
            metrics.append(self._accuracy)
        return [*metrics, *self.output_losses]

    @property
    def needs_outputs(self):
        """True if a metric needs labels and outputs."""
        return self._compiled is not None

    @property
    def is_built(self):
        """True if all metrics have created their states."""
        return self._compiled is None or self._compiled.built

    def build(self, labels, outputs, sample_weight=None):
        """Create the states of the metrics for one row of tensors of these shapes and dtypes.

        Some metrics, such as `F1Score` and `R2Score`, create states in their first update.
        """

        def zero_row(x):
            if x is None:
                return None
            return tf.zeros([1, *(size or 1 for size in x.shape[1:])], x.dtype)

        with tf.init_scope():
            row = keras.tree.map_structure(zero_row, (labels, outputs, sample_weight))
            self._compiled.build(*row[:2])
            if job.size() > 1 or not all(metric.variables for metric in self._compiled.metrics):
                self._compiled.update_state(*row)
                self._compiled.reset_state()
        self._on_build()

    def update(self, loss, totals, counts, labels, outputs, sample_weight):
        """Add a batch and return the logs. Batches of skipped steps also count.

        Args:
            loss: Scalar, the loss of the global batch.
            totals: Dict of float32 scalars, sums over the global batch; see `ForwardStep.sums`.
            counts: Counts of the global batch, see `Objective.counts`.
            labels, outputs, sample_weight: Local rows, or `None` if no metric needs them. Outputs
                come with their masks, see `ForwardStep.metric_outputs`.

        Returns:
            A dict of scalar tensors, the means since the epoch began.
        """
        self._build_output_losses(totals)
        rows = self._objective.num_rows(counts)
        weight = totals["counted"] if self._objective.weights_epoch_means else rows
        logs = {"loss": self._mean(self._loss, loss, weight)}
        if "right" in totals:
            counted = totals["counted"]
            accuracy = tf.math.divide_no_nan(totals["right"], counted)
            logs["accuracy"] = self._mean(self._accuracy, accuracy, counted)
        for key, mean in self._output_losses.items():
            logs[mean.name] = self._mean(mean, totals[key], weight)
        self.names = set(logs)
        if self._compiled is not None:
            self._update_compiled(labels, outputs, sample_weight)
            results = self._compiled.result()
            self.names = self.names - {"accuracy"} | set(results)
            logs |= results
        return logs

    def _build_output_losses(self, totals):
        """Create a mean for each output's loss when they first appear in the sums."""
        names = {
            key: f"{key.removeprefix('loss/')}_loss" for key in totals if key.startswith("loss/")
        }
        if self._output_losses.keys() != names.keys():
            with tf.init_scope():
                self._output_losses = {
                    key: keras.metrics.Mean(name=name) for key, name in names.items()
                }
            self._on_build()

    @staticmethod
    def _mean(mean, value, weight):
        # A non-finite value with weight 0 must not turn the mean into NaN.
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
        """Reduce the local updates of the states over the data ranks: sums, or extremes."""
        kinds = reductions(self._compiled)
        sums = [i for i, kind in enumerate(kinds) if kind == "sum"]

        def reduce_changes(changes, dtype):
            numbered = {str(i): x for i, x in enumerate(changes)}
            return list(reduce_sum(numbered, name=f"metrics_{dtype}").values())

        totals = by_dtype(reduce_changes, [states[i] - before[i] for i in sums])
        for i, total in zip(sums, totals):
            states[i].assign(before[i] + total)
        group = job.data_parallel_group()
        for i, kind in enumerate(kinds):
            if kind != "sum":
                extreme = transport.all_reduce(states[i], kind.capitalize(), group, f"metrics_{i}")
                states[i].assign(extreme)


def reductions(metric: keras.metrics.Metric) -> list[str]:
    """Return "sum", "max" or "min" for each state of a metric: its reduction over the ranks.

    The states of Keras' metrics are sums. Other metrics specify the reduction in the attribute
    `state_reduction`.

    Raises:
        ValueError: If a custom metric has no valid `state_reduction`.
    """
    inner_metrics = getattr(metric, "metrics", None) or []
    if inner_metrics:
        return [kind for inner in inner_metrics for kind in reductions(inner)]
    kind = getattr(metric, "state_reduction", None)
    if kind is None and type(metric).update_state.__module__.startswith("keras."):
        kind = "sum"
    if kind not in ("sum", "max", "min"):
        raise ValueError(
            f"The metric {metric.name!r} has a custom update_state and `state_reduction={kind!r}`, "
            "but several data shards compute its states. Set the class attribute "
            "`state_reduction` to 'sum', 'max' or 'min'."
        )
    return [kind] * len(metric.variables)
