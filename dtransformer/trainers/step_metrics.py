"""What the logs of a step show: means since the epoch began, and what the step itself was."""

import tensorflow as tf

from dtransformer.parallel import job
from dtransformer.parallel.pipeline.forward_pass import from_last
from dtransformer.trainers import gradients as grads


class StepMetrics:
    """Means over the global batch, and the metrics that the trainer was compiled with.

    Args:
        loss, accuracy: `keras.metrics.Mean`s, which Keras resets at the start of an epoch.
        compiled: Keras' container of the user's metrics; None where there are none.
    """

    def __init__(self, loss, accuracy, compiled=None):
        self._means = {"loss": loss, "accuracy": accuracy}
        self._compiled = compiled

    @property
    def variables(self):
        """The list of the variables that are sums since the epoch began."""
        metrics = [*self._means.values(), self._compiled]
        return [v for metric in metrics if metric is not None for v in metric.variables]

    @property
    def sees_outputs(self):
        """Whether some metric looks at labels and outputs."""
        return self._compiled is not None

    @property
    def is_built(self):
        """Whether the metrics have their states, which has to be before they are read."""
        return self._compiled is None or self._compiled.built

    def build(self, labels, outputs):
        """Make the metrics' states, from tensors like those that they will see."""
        self._compiled.build(labels, outputs)

    def update(self, totals, labels, outputs, sample_weight):
        """Count a batch; return the logs, means since the epoch began.

        Args:
            totals: dict of float32 scalars, sums over the global batch.
            labels, outputs, sample_weight: of this rank; None where no metric sees them.
        """
        logs = {}
        for name, mean in self._means.items():
            if name in totals:
                value = tf.math.divide_no_nan(totals[name], totals["count"])
                mean.update_state(value, sample_weight=totals["count"])
                logs[name] = mean.result()
        if self._compiled is not None:
            self._update_compiled(labels, outputs, sample_weight)
            logs.update(self._compiled.result())
        return logs

    def _update_compiled(self, labels, outputs, sample_weight):
        states = [variable.value for variable in self._compiled.variables]
        before = [tf.identity(state) for state in states]
        if outputs is not None:
            self._compiled.update_state(labels, outputs, sample_weight)
        if job.data_shard()[1] > 1:  # what each rank added, from all of them
            added = {str(i): s - b for i, (s, b) in enumerate(zip(states, before))}
            added = grads.reduce_sum(added, name="metrics")
            for i, (state, start) in enumerate(zip(states, before)):
                state.assign(start + added[str(i)])
        if job.stage()[1] > 1:
            values = from_last([tf.identity(state) for state in states], "metrics")
            for state, value in zip(states, values):
                state.assign(value)
