"""States that layers set in their calls: once a step, whatever shares of its batch are computed.

Keras' layers set moving means, counters and metrics of their own while they compute. Data shards,
micro-batches and pipeline stages each compute a share of a step; here every share begins with the
states of before the step, what it changes is added up like the sums of the logs, and is applied
to the states of all ranks alike.
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
    """The states of a network's layers, and the metrics that they own.

    Attributes:
        metrics: list of the layers' own metrics, whose results are shown in the logs.
        adding: list of the names of layers that add losses of the rows, until they are told.
        is_used: whether states are collected.
        are_tried: whether layers are still to be tried with the first batch.
    """

    def __init__(self):
        self.metrics, self.adding, self.is_used, self.are_tried = [], [], False, False
        self._states = {}  # name in the sums -> (layer, variable, MEAN or SUM)
        self._counts = {}  # the same of metrics, which begin a share with zeros

    def take_adding(self) -> list[str]:
        """Return the names of layers that add losses of the rows; an empty list in later calls."""
        adding = self.adding
        self.adding = []
        return adding

    def find(self, network: keras.Model) -> None:
        """Find the metrics of layers, and whether what else they set is to be tried.

        Args:
            network: the `keras.Model`, built.

        Raises:
            ValueError: a layer's metric cannot be put together of shares; names both.
        """
        in_pipeline, num_shards = job.placement().num_chunks > 1, job.data_shard()[1]
        self.metrics = layer_metrics(network)
        if in_pipeline or job.mesh() is not None or num_shards > 1:
            self._count(network, in_pipeline)
        self.is_used = bool(self._counts)
        self.are_tried = in_pipeline or num_shards * get_parallel_config().micro_batch_num > 1

    def try_layers(self, network: keras.Model, objective, inputs, labels) -> None:
        """Find out, once, what layers set, and what becomes of it; warns of what has no shares.

        Args:
            network: the `keras.Model`, built.
            objective: the `Objective`.
            inputs, labels: nested tensors of a batch, or what a `tf.function` has of it.
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
                where = f"{layer.path or layer.name} owns the metric {metric.name!r}"
                if in_pipeline and isinstance(layer, keras.Model):
                    raise ValueError(
                        f"{where}, and no stage of a pipeline computes a model's own call: let a "
                        "layer update it"
                    )
                if not _is_sum(metric):
                    raise ValueError(
                        f"{where}, whose states are not known to be sums over the rows, as those of "
                        "layers have to be where devices share a batch: say state_reduction = 'sum' "
                        "in its class if they are, give it to compile, or use one device"
                    )
                for variable in metric.variables:
                    self._counts[f"metrics/{len(self._counts)}"] = layer, variable, SUM

    @contextlib.contextmanager
    def collected(self, layers: list | None = None) -> Iterator[dict[str, tf.Tensor]]:
        """After the `with` block states are what they were before.

        Args:
            layers: those that are computed, with the ones inside; None for all.

        Yields:
            A dict that has, after the block, by how much each state was changed.
        """
        if layers is not None:
            layers = {id(one) for layer in layers for one in _compat.flat_layers(layer)}
        here = {**self._states, **self._counts}
        here = {k: v for k, (of, v, _) in here.items() if layers is None or id(of) in layers}
        before, begins, found = {}, {}, {}
        for name, variable in here.items():
            if trace.is_on_mesh():  # where metrics are not
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
        """Return what was collected as it adds up over the shares of a step.

        Args:
            found: what `collected` gave.
            share: the share of the global batch's rows that was computed, a scalar.
        """
        means = {name for name, (_, _, rule) in self._states.items() if rule == MEAN}
        weighed = lambda x: tf.math.multiply_no_nan(x, share)  # of no rows it is no number
        return {name: weighed(x) if name in means else x for name, x in found.items()}

    def apply(self, totals: dict[str, tf.Tensor]) -> None:
        """Take the sums of all shares' changes out of a step's sums, and change the states."""
        for name in [name for name in totals if name.startswith(("states/", "metrics/"))]:
            change = totals.pop(name)
            _, variable, _ = self._states.get(name) or self._counts.get(name) or (None,) * 3
            if variable is None:  # another stage's
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
        """Return the results of the layers' metrics, by their names, as Keras shows them."""
        logs = {}
        for metric in self.metrics:
            result = metric.result()
            logs.update(result if isinstance(result, dict) else {metric.name: result})
        return logs


def layer_metrics(network: keras.Model) -> list:
    """Return the metrics that a network and its layers own, in Keras' order, each once.

    Those of models inside of it are not shown, by Keras neither.
    """
    layers = _compat.flat_layers(network)
    shown = [one for one in layers if one is network or not isinstance(one, keras.Model)]
    return list({id(metric): metric for one in shown for metric in _own_metrics(one)}.values())


def _is_sum(metric):
    try:
        return {*reductions(metric)} == {"sum"}
    except ValueError:  # nobody says what they are
        return False


def _own_metrics(layer):
    """Return a layer's metrics without those of layers inside of it."""
    inside = _compat.flat_layers(layer, include_self=False, recursive=False)
    inner = {id(metric) for one in inside for metric in one.metrics}
    return [one for one in keras.Layer.metrics.fget(layer) if id(one) not in inner]
