"""Checks of networks, losses, optimizers and configs, made before the first step."""

import dataclasses
import functools
import os
import warnings

import keras

from dtransformer import _compat
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.runtime import job
from dtransformer.trainers.optimizer.checks import check_elementwise
from dtransformer.trainers.sample_preprocessing import PREPROCESS


def check_compile_options(objective, optimizer, compiler):
    """Check that the current layout supports the arguments of `Trainer.compile`.

    Args:
        objective: The `Objective`.
        optimizer: A Keras optimizer.
        compiler: The `StepCompiler`.

    Raises:
        ValueError: If the layout does not support an argument.
    """
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        raise ValueError(
            "The trainer updates all weights with one optimizer and does not support "
            "MultiOptimizer. Use a single Keras optimizer, such as AdamW."
        )
    if job.placement().num_chunks > 1 and not objective.has_known_normalizers:
        raise ValueError(
            "A pipeline must know the token weights of a loss before the forward pass, but the "
            "loss has no method token_weights(labels, mask). Define it, or set `pipeline_stage=1`."
        )
    has_micro_batches = get_parallel_config().micro_batch_num > 1
    if job.placement().num_chunks > 1 and has_micro_batches and objective.compares_rows:
        raise ValueError(
            "The loss compares all rows of a batch, but a pipeline computes a separate loss for "
            "each micro-batch. Set `micro_batch_num=1`, or `pipeline_stage=1`."
        )
    if job.mesh() is not None:
        check_elementwise(optimizer)
    if compiler.in_parts and (compiler.run_eagerly or compiler.jit_forward):
        name = "run_eagerly" if compiler.run_eagerly else "jit_compile"
        raise ValueError(
            f"`{name}=True` does not work with a pipeline or with operations that are sharded over "
            f"a mesh. Remove `{name}`."
        )


def check_launch():
    """Check that a process started by horovodrun has joined the other ranks.

    Raises:
        RuntimeError: If it has not, and would therefore train alone.
    """
    size = os.environ.get("HOROVOD_SIZE", "1")
    if size != "1" and not job.is_initialized():
        raise RuntimeError(
            f"horovodrun has started {size[:10]} ranks, but this rank has not joined them. Call "
            "dtransformer.init() first."
        )


def find_trained_batch_norms(network) -> list[keras.layers.Layer]:
    """Return the network's trainable `BatchNormalization` layers."""
    return [
        layer
        for layer in _compat.flat_layers(network)
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
    ]


# The trainer replaces these methods, so it would ignore an overriding network.
_STEP_METHODS = "train_step", "test_step", "predict_step", "compute_loss", "compute_metrics"
_LOOP_METHODS = "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "reset_metrics"


def check_network(network):
    """Check that the trainer can train a network as Keras would.

    Raises:
        ValueError: If the network overrides a step such as `train_step`, or if it has a trainable
            BatchNormalization whose means would differ between data shards.
    """
    num_shards = job.data_shard()[1]
    if num_shards > 1:
        _check_batch_norms(find_trained_batch_norms(network), num_shards)
    for name in _STEP_METHODS:
        if _defining_class(network, name) is not None:
            raise ValueError(
                f"{type(network).__name__} overrides `{name}`, which the trainer does not call. "
                "Move its computation to a loss, a metric or `add_loss`."
            )


def _check_batch_norms(layers, num_shards):
    for layer in layers:
        cause = None
        if not layer.synchronized:
            cause = "Pass `synchronized=True` to it"
        elif job.mesh() is not None:
            cause = (
                f"`synchronized=True` does not reduce over {num_shards} replicas of a mesh. Set "
                "`optimizer_shard=3`, which puts all data shards on one mesh"
            )
        if cause is not None:
            raise ValueError(
                f"The BatchNormalization {layer.name!r} would compute different means on each data "
                f"shard. {cause}, freeze it (trainable=False), or use LayerNormalization or "
                "GroupNormalization."
            )


def _defining_class(network, name):
    """Return the class that overrides a method of Keras, or `None`."""
    for kind in type(network).__mro__:
        if name in vars(kind):
            return None if kind.__module__.startswith("keras.") else kind
    return None


def warn_overridden_loops(network):
    """Warn once, on rank 0, if a network overrides a loop such as `fit`.

    The loops of a class with a method `preprocess_samples`, as in KerasHub, only preprocess data.
    The trainer calls this method too.
    """
    names = []
    for name in _LOOP_METHODS:
        kind = _defining_class(network, name)
        if kind is not None and PREPROCESS not in vars(kind):
            names.append(name)
    if names and job.is_chief():
        warnings.warn(
            f"{type(network).__name__} overrides {', '.join(names)}, which the trainer does not "
            "call. Preprocess the data first, or in a method `preprocess_samples(x, y, "
            "sample_weight)`, and move other code to a callback.",
            stacklevel=3,
        )


def add_metric_checks(metrics):
    """Add a check to metric functions: they must return one value per row.

    With a single data shard the metrics are returned unchanged. Otherwise a function that returns a
    scalar for the local rows would be averaged incorrectly.

    Args:
        metrics: As in `keras.Model.compile`: names, `keras.metrics.Metric`s, functions of
            `(y_true, y_pred)`, or nested lists and dicts of them.

    Returns:
        The metrics in the same structure. A function raises `ValueError` when it returns a scalar.
    """
    if job.data_shard()[1] == 1:
        return metrics

    def add_check(metric):
        if not callable(metric) or isinstance(metric, (keras.metrics.Metric, type)):
            return metric

        @functools.wraps(metric)
        def checked_metric(y_true, y_pred):
            values = metric(y_true, y_pred)
            if not len(values.shape):
                name = getattr(metric, "__name__", metric)
                raise ValueError(
                    f"The metric {name!r} returns a scalar for all rows, which is not defined when "
                    "data shards divide the rows. Return one value for each row."
                )
            return values

        return checked_metric

    return keras.tree.map_structure(add_check, metrics)


def weight_paths(network) -> dict[tuple[int, bool], str]:
    """Return a dict that maps `(id, is trainable)` of each variable of a network to its path."""
    return {(id(weight), weight.trainable): weight.path for weight in network.variables}


def check_weights_unchanged(network, old_paths):
    """Check that a network still has the weights that the compiled steps use.

    Args:
        network: The `keras.Model`.
        old_paths: `weight_paths` of the network when the steps were built.

    Raises:
        ValueError: If a weight was added, removed, frozen or unfrozen since then, for example by
            `freeze` or `add_lora`.
    """
    paths = weight_paths(network)
    changed = [
        path for key, path in {**old_paths, **paths}.items() if (key in paths) != (key in old_paths)
    ]
    if changed:
        raise ValueError(
            f"The weight {changed[0]} was added, removed, frozen or unfrozen after the trainer had "
            "built its steps. Do this before `compile`, or call `compile` again with a new "
            "optimizer."
        )


def check_same_config(config):
    """Check that the current parallel config equals the trainer's.

    Args:
        config: The trainer's `TransformerOpParallelConfig`.

    Raises:
        RuntimeError: If a field has a different value.
    """
    current = get_parallel_config()
    for field in dataclasses.fields(config):
        original = getattr(config, field.name)
        value = getattr(current, field.name)
        if original != value:
            raise RuntimeError(
                f"The Trainer was created with `{field.name}={original!r}` in the parallel config, "
                f"but the current value is {value!r}. Create a new Trainer, or use this one in the "
                "scope of its original config."
            )


def check_added_means(network, losses, row_loss_layers):
    """Check losses that layers add if the loss normalizer depends on the forward pass.

    The losses of other packages' layers are then weighted like the loss, with a warning.

    Args:
        network: The `keras.Model`.
        losses: List of the losses that layers have added.
        row_loss_layers: List of the names of layers that add losses which depend on the rows.

    Raises:
        ValueError: If a layer adds a mean over rows, such as a mixture of experts.
    """
    if not losses:
        return
    if row_loss_layers and job.is_chief():
        warnings.warn(
            f"The loss is a mean over a mask. The losses that {', '.join(row_loss_layers)} add to it "
            "are weighted by the unmasked positions of each data shard and micro-batch, not by "
            "rows, and differ from Keras'. Use one data shard and `micro_batch_num=1` for "
            "Keras' results.",
            stacklevel=2,
        )
    if any(getattr(layer, "aux_loss_is_mean", False) for layer in _compat.flat_layers(network)):
        raise ValueError(
            "A loss that is a mean over a mask cannot be combined with the losses of a mixture "
            "of experts over several ranks or micro-batches. Use sample weights and "
            "`reduction='mean_with_sample_weight'` instead of the mask."
        )
