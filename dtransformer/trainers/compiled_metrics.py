"""The metrics passed to `Trainer.compile`, equal on all ranks."""

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.collectives import transport
from dtransformer.parallel.collectives.transport import by_dtype
from dtransformer.parallel.pipeline_parallel.forward_pass import from_last
from dtransformer.parallel.runtime import job
from dtransformer.trainers.optimizer.reduction import reduce_sum


class CompiledMetrics:
    """Keras' container of the compiled metrics, updated with the rows of all ranks.

    Args:
        container: The container.
        on_build: Function that is called when the metrics have created states.
    """

    def __init__(self, container, on_build):
        self.container = container
        self._on_build = on_build

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
            self.container.build(*row[:2])
            if job.size() > 1 or not all(metric.variables for metric in self.container.metrics):
                self.container.update_state(*row)
                self.container.reset_state()
        self._on_build()

    def update(self, labels, outputs, sample_weight):
        """Add a batch and return the results, a dict of scalar tensors.

        Args:
            labels, outputs, sample_weight: Local rows; see `StepMetrics.update`.
        """
        states = [variable.value for variable in self.container.variables]
        before = [tf.identity(state) for state in states]
        if outputs is not None:
            self.container.update_state(labels, _compat.with_masks(*outputs), sample_weight)
        if job.data_shard()[1] > 1:
            self._reduce_states(states, before)
        if job.stage()[1] > 1:
            values = from_last([tf.identity(state) for state in states], "metrics")
            for state, value in zip(states, values):
                state.assign(value)
        return self.container.result()

    def _reduce_states(self, states, before):
        """Reduce the local updates of the states over the data ranks: sums, or extremes."""
        kinds = reductions(self.container)
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
