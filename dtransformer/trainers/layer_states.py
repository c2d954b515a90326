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
from dtransformer.parallel.weights.sharded_variable import own_shards, shard_bounds_of
from dtransformer.trainers.step_metrics import reductions
from dtransformer.trainers.tried_parts import MEAN, SUM, own_states, tell_of_parts, try_parts


class LayerStates:
    """States of a network's layers, and the metrics that belong to layers.

    Attributes:
        metrics: List of the layers' metrics. Their results appear in the logs.
        adding: List of the names of layers that add losses which depend on the rows.
        is_used: Whether changes of states must be collected and applied.
        are_tried: Whether the layers must still be probed with the first batch.
    """

    def __init__(self):
        self.metrics, self.adding, self.is_used, self.are_tried = [], [], False, False
        self._states = {}  # Name in the sums -> (layer, variable, MEAN or SUM).
        self._counts = {}  # The same for metric states, which start each part at zero.

    def take_adding(self) -> list[str]:
        """Return and clear `adding`, so that later calls return an empty list."""
        adding = self.adding
        self.adding = []
        return adding

    def find(self, network: keras.Model) -> None:
        """Collect the metrics of all layers, and decide whether layers must be probed.

        Args:
            network: The `keras.Model`, built.

        Raises:
            ValueError: If several devices share a batch and the states of a layer's metric are not
                sums, or if a model inside a pipeline has a metric.
        """
        in_pipeline, num_shards = job.placement().num_chunks > 1, job.data_shard()[1]
        self.metrics = layer_metrics(network)
        if in_pipeline or job.mesh() is not None or num_shards > 1:
            self._count(network, in_pipeline)
        self.is_used = bool(self._counts)
        self.are_tried = in_pipeline or num_shards * get_parallel_config().micro_batch_num > 1

    def try_layers(self, network: keras.Model, objective, inputs, labels) -> None:
        """Find out which states the layers update, and how the updates of parts combine.

        Warns about layers and losses whose results differ when a batch is divided.

        Args:
            network: The `keras.Model`, built.
            objective: The `Objective`.
            inputs, labels: Nested tensors of a batch. Only their shapes and dtypes are used.
        """
        self.are_tried = False
        rules, differing, self.adding = try_parts(network, objective, inputs, labels)
        for layer in _compat.flat_layers(network):
            for variable in own_states(layer):
                if id(variable) in rules:
                    name = f"states/{job.stage()[0]}.{len(self._states)}"
                    self._states[name] = layer, variable, rules[id(variable)]
        self.is_used = bool(self._states or self._counts)
        if job.data_shard()[1] * get_parallel_config().micro_batch_num > 1:
            tell_of_parts(differing)

    def _count(self, network, in_pipeline):
        for layer in _compat.flat_layers(network):
            for metric in _own_metrics(layer):
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
                    self._counts[f"metrics/{len(self._counts)}"] = layer, variable, SUM

    @contextlib.contextmanager
    def collected(self, layers: list | None = None) -> Iterator[dict[str, tf.Tensor]]:
        """Collect state changes during the `with` block and undo them at its end.

        Metric states are set to zero first.

        Args:
            layers: Layers that are computed, including the layers inside of them. `None` means all.

        Yields:
            A dict that, after the block, maps each state's name in the sums to its change, a
            float32 tensor.
        """
        if layers is not None:
            layers = {id(one) for layer in layers for one in _compat.flat_layers(layer)}
        here = {**self._states, **self._counts}
        here = {k: v for k, (of, v, _) in here.items() if layers is None or id(of) in layers}
        before, begins, found = {}, {}, {}
        for name, variable in here.items():
            if trace.is_on_mesh():  # `None` for metric states, which are not on the mesh.
                before[name] = begins[name] = _compat.stateless_value(variable)
            else:
                before[name] = begins[name] = tf.identity(variable.value)
            if name in self._counts:
                begins[name] = tf.zeros(variable.shape, variable.dtype)
                variable.assign(begins[name])
        yield found
        for name, variable in here.items():
            new, begin = variable.value, begins[name]
            if tf.as_dtype(new.dtype).is_bool:
                new, begin = tf.cast(new, "float32"), tf.cast(begin, "float32")
            found[name] = tf.stop_gradient(tf.cast(new - begin, "float32"))
            if before[name] is not None:
                variable.assign(before[name])

    def shares(self, found: dict, share: tf.Tensor) -> dict[str, tf.Tensor]:
        """Return state changes that can be summed over the parts of a step.

        Changes with the rule `MEAN` are multiplied by `share`.

        Args:
            found: Dict of changes from `collected`.
            share: Scalar tensor. Fraction of the global batch's rows that this part has computed.
        """
        means = {name for name, (_, _, rule) in self._states.items() if rule == MEAN}
        weighed = lambda x: tf.math.multiply_no_nan(x, share)  # The mean over zero rows is NaN.
        return {name: weighed(x) if name in means else x for name, x in found.items()}

    def apply(self, totals: dict[str, tf.Tensor]) -> None:
        """Remove the summed state changes from `totals` and add them to the local states.

        Args:
            totals: Dict of float32 tensors, reduced over all parts of a step. It is modified.
        """
        for name in [name for name in totals if name.startswith(("states/", "metrics/"))]:
            change = totals.pop(name)
            _, variable, _ = self._states.get(name) or self._counts.get(name) or (None,) * 3
            if variable is None:  # The state belongs to another pipeline stage.
                continue
            if tf.as_dtype(variable.dtype).is_integer:
                change = tf.round(change)
            for shard, (bounds, _) in zip(own_shards([variable]), shard_bounds_of(variable)):
                part, value = change[tuple(slice(*one) for one in bounds)], shard.value
                if tf.as_dtype(value.dtype).is_bool:
                    shard.assign(tf.cast(value, "float32") + part > 0.5)
                else:
                    shard.assign(value + tf.cast(part, value.dtype))

    def results(self) -> dict[str, tf.Tensor]:
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
    shown = [one for one in layers if one is network or not isinstance(one, keras.Model)]
    return list({id(metric): metric for one in shown for metric in _own_metrics(one)}.values())


def _is_sum(metric):
    try:
        return {*reductions(metric)} == {"sum"}
    except ValueError:  # The metric does not specify its reduction.
        return False


def _own_metrics(layer):
    """Return a layer's metrics, without the metrics of layers inside of it."""
    inside = _compat.flat_layers(layer, include_self=False, recursive=False)
    inner = {id(metric) for one in inside for metric in one.metrics}
    return [one for one in keras.Layer.metrics.fget(layer) if id(one) not in inner]
