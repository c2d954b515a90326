"""States that layers update in their calls, kept identical on all ranks.

Keras layers update moving averages, counters and metrics during a forward pass. Data
shards, micro-batches and pipeline stages each compute only a part of a step. Here every part
starts from the states before the step. The changes are summed like the other sums of the step and
applied once, to the states of all ranks.
"""

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.runtime import job
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.weights.sharded_variable import get_local_shards, get_shard_bounds
from dtransformer.trainers.compiled_metrics import reductions
from dtransformer.trainers.split_probe import (
    MEAN,
    SUM,
    probe_split,
    updatable_states,
    warn_split_results,
)


class LayerStates:
    """States of a network's layers, and the metrics that belong to layers.

    Attributes:
        metrics: List of the layers' metrics. Their results appear in the logs.
        row_loss_layers: List of the names of layers that add losses which depend on the rows.
        is_used: Whether changes of states must be collected and applied.
        needs_probe: Whether the layers must still be probed with the first batch.
    """

    def __init__(self):
        self.metrics = []
        self.row_loss_layers = []
        self.is_used = False
        self.needs_probe = False
        self._states = {}  # Name in the sums -> (layer, variable, MEAN or SUM).
        self._metric_states = {}  # The same for metric states, which start each part at zero.

    def pop_row_loss_layers(self) -> list[str]:
        """Return and clear `row_loss_layers`, so that later calls return an empty list."""
        names = self.row_loss_layers
        self.row_loss_layers = []
        return names

    def find_metrics(self, network: keras.Model) -> None:
        """Collect the metrics of all layers, and decide whether layers must be probed.

        Args:
            network: The `keras.Model`, built.

        Raises:
            ValueError: If several devices share a batch and the states of a layer's metric are not
                sums, or if a model inside a pipeline has a metric.
        """
        in_pipeline = job.placement().num_chunks > 1
        num_shards = job.data_shard()[1]
        self.metrics = layer_metrics(network)
        if in_pipeline or job.mesh() is not None or num_shards > 1:
            self._add_metric_states(network, in_pipeline)
        self.is_used = bool(self._metric_states)
        self.needs_probe = in_pipeline or num_shards * get_parallel_config().micro_batch_num > 1

    def probe(self, network: keras.Model, objective, inputs, labels) -> None:
        """Find out which states the layers update, and how the updates of parts combine.

        Warns about layers and losses whose results differ when a batch is divided.

        Args:
            network: The `keras.Model`, built.
            objective: The `Objective`.
            inputs, labels: Nested tensors of a batch. Only their shapes and dtypes are used.
        """
        self.needs_probe = False
        rules, differing, self.row_loss_layers = probe_split(network, objective, inputs, labels)
        for layer in _compat.flat_layers(network):
            for variable in updatable_states(layer):
                if id(variable) in rules:
                    name = f"states/{job.stage()[0]}.{len(self._states)}"
                    self._states[name] = layer, variable, rules[id(variable)]
        self.is_used = bool(self._states or self._metric_states)
        if job.data_shard()[1] * get_parallel_config().micro_batch_num > 1:
            warn_split_results(differing)

    def _add_metric_states(self, network, in_pipeline):
        for layer in _compat.flat_layers(network):
            for metric in _direct_metrics(layer):
                where = f"The layer {layer.path or layer.name} has the metric {metric.name!r}"
                if in_pipeline and isinstance(layer, keras.Model):
                    raise ValueError(
                        f"{where}, but it is a model, and no pipeline stage runs a model's call. "
                        "Update the metric in a layer."
                    )
                if not _is_sum(metric):
                    raise ValueError(
                        f"{where}, but devices share a batch, so its states must be sums over "
                        "rows. Set state_reduction = 'sum' in its class if they are, pass the "
                        "metric to `compile`, or use one device."
                    )
                for variable in metric.variables:
                    self._metric_states[f"metrics/{len(self._metric_states)}"] = (
                        layer,
                        variable,
                        SUM,
                    )

    @contextlib.contextmanager
    def collect_changes(self, layers: list | None = None) -> Iterator[dict[str, tf.Tensor]]:
        """Collect state changes during the `with` block and undo them at its end.

        Metric states are set to zero first.

        Args:
            layers: Layers that are computed, including the layers inside of them. `None` means all.

        Yields:
            A dict that, after the block, maps each state's name in the sums to its change, a
            float32 tensor.
        """
        if layers is not None:
            layers = {id(inner) for layer in layers for inner in _compat.flat_layers(layer)}
        variables = {
            name: variable
            for name, (layer, variable, _) in {**self._states, **self._metric_states}.items()
            if layers is None or id(layer) in layers
        }
        before = {}
        starts = {}
        changes = {}
        for name, variable in variables.items():
            if trace.is_on_mesh():  # `None` for metric states, which are not on the mesh.
                before[name] = starts[name] = _compat.stateless_value(variable)
            else:
                before[name] = starts[name] = tf.identity(variable.value)
            if name in self._metric_states:
                starts[name] = tf.zeros(variable.shape, variable.dtype)
                variable.assign(starts[name])
        yield changes
        for name, variable in variables.items():
            end = variable.value
            start = starts[name]
            if tf.as_dtype(end.dtype).is_bool:
                end = tf.cast(end, "float32")
                start = tf.cast(start, "float32")
            changes[name] = tf.stop_gradient(tf.cast(end - start, "float32"))
            if before[name] is not None:
                variable.assign(before[name])

    def weight_changes(self, changes: dict, fraction: tf.Tensor) -> dict[str, tf.Tensor]:
        """Return state changes that can be summed over the parts of a step.

        Changes with the rule `MEAN` are multiplied by `fraction`.

        Args:
            changes: Result of `collect_changes`.
            fraction: Scalar tensor. Fraction of the global batch's rows in this part.
        """
        means = {name for name, (_, _, rule) in self._states.items() if rule == MEAN}
        return {
            # The mean over zero rows is NaN.
            name: tf.math.multiply_no_nan(change, fraction) if name in means else change
            for name, change in changes.items()
        }

    def apply(self, totals: dict[str, tf.Tensor]) -> None:
        """Remove the summed state changes from `totals` and add them to the local states.

        Args:
            totals: Dict of float32 tensors, reduced over all parts of a step. It is modified.
        """
        for name in [name for name in totals if name.startswith(("states/", "metrics/"))]:
            change = totals.pop(name)
            state = self._states.get(name) or self._metric_states.get(name)
            if state is None:  # The state belongs to another pipeline stage.
                continue
            variable = state[1]
            if tf.as_dtype(variable.dtype).is_integer:
                change = tf.round(change)
            for shard, (bounds, _) in zip(get_local_shards([variable]), get_shard_bounds(variable)):
                part = change[tuple(slice(*ends) for ends in bounds)]
                value = shard.value
                if tf.as_dtype(value.dtype).is_bool:
                    shard.assign(tf.cast(value, "float32") + part > 0.5)
                else:
                    shard.assign(value + tf.cast(part, value.dtype))

    def metric_results(self) -> dict[str, tf.Tensor]:
        """Return the results of the layers' metrics by name, as Keras shows them."""
        logs = {}
        for metric in self.metrics:
            result = metric.result()
            logs.update(result if isinstance(result, dict) else {metric.name: result})
        return logs


def layer_metrics(network: keras.Model) -> list:
    """Return the metrics of a network and its layers in Keras' order, without duplicates.

    Metrics of models inside of the network are skipped, as in Keras.
    """
    layers = _compat.flat_layers(network)
    metrics = {}
    for layer in layers:
        if layer is network or not isinstance(layer, keras.Model):
            metrics.update((id(metric), metric) for metric in _direct_metrics(layer))
    return list(metrics.values())


def _is_sum(metric):
    try:
        return {*reductions(metric)} == {"sum"}
    except ValueError:  # The metric does not specify its reduction.
        return False


def _direct_metrics(layer):
    """Return a layer's metrics, without the metrics of layers inside of it."""
    inner_layers = _compat.flat_layers(layer, include_self=False, recursive=False)
    inner_ids = {id(metric) for inner in inner_layers for metric in inner.metrics}
    return [metric for metric in keras.Layer.metrics.fget(layer) if id(metric) not in inner_ids]
