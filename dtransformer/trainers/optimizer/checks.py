"""Checks of an optimizer that updates weights or shards of weights."""

import warnings

import keras
import numpy as np
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.config.config import NOT_ELEMENTWISE, get_parallel_config
from dtransformer.parallel.runtime import job


def check_update(optimizer, weights, parameters, is_sharded, is_divided):
    """Check that an optimizer can update the local parts of weights.

    Args:
        optimizer: Keras optimizer.
        weights: List of trainable Keras variables.
        parameters: List of the variables and `ParameterProxy`s that the optimizer updates.
        is_sharded: Boolean. Whether the data-parallel group shards the update of any weight.
        is_divided: Boolean. Whether the group, a mesh or a pipeline divides the weights.

    Raises:
        ValueError: If the optimizer cannot.
    """
    _check_overwrites(weights)
    _warn_muon_uses_adamw(optimizer, weights)
    check_constraints(weights)
    if is_sharded:
        check_elementwise(optimizer)
    if is_divided:
        check_shards(optimizer)
    _check_built(optimizer, parameters)


def _check_overwrites(weights):
    for weight in weights:
        if getattr(weight, "overwrite_with_gradient", False):
            raise ValueError(
                f"{weight.path} is overwritten with its gradient (overwrite_with_gradient=True), "
                "like a float8 scale, but the trainer sums gradients. Use mixed_bfloat16."
            )


def _warn_muon_uses_adamw(optimizer, weights):
    """Warn on rank 0 if Muon updates kernels with AdamW because they do not have two dimensions."""
    is_muon = type(getattr(optimizer, "inner_optimizer", optimizer)) is keras.optimizers.Muon
    kernels = [w.path for w in weights if hasattr(w, "num_inputs") and len(w.shape) != 2]
    if is_muon and kernels and job.is_chief():
        warnings.warn(
            f"keras.optimizers.Muon updates {kernels[0]} and {len(kernels) - 1} other kernels with "
            "AdamW, because they do not have two dimensions, and an untied head with Muon. Use "
            "dtransformer.trainers.Muon.",
            stacklevel=2,
        )


def check_elementwise(optimizer):
    """Check that an optimizer can update flat shards, if the partition is `"flat"`.

    Adafactor, Lamb, Muon and their subclasses cannot. A custom optimizer must give both halves of
    a small vector the update of the full vector.

    Args:
        optimizer: Keras optimizer.

    Raises:
        ValueError: If the update of an element depends on other elements.
    """
    if get_parallel_config().optimizer_shard_partition == "whole":
        return
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    named = any(kind.__name__.lower() in NOT_ELEMENTWISE for kind in type(optimizer).__mro__)
    if named or not _is_elementwise(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} computes with full weights, but a mesh or optimizer_shard "
            "shards them. Set optimizer_shard_partition='whole' with optimizer_shard=1 or 2, or use "
            "an elementwise optimizer, such as AdamW, Lion or SGD."
        )


def _is_elementwise(optimizer):
    """Return whether halves of a vector get the update of the full vector.

    Optimizers of Keras and optimizers that cannot be copied count as elementwise.
    """
    if type(optimizer).__module__.startswith("keras."):
        return True
    weight = np.array([1.0, -2.0, 30.0, 4.0], "float32")
    gradients = [[3, 1, -2, 0.1], [1, 5, 2, 1]]

    def update(num_parts):
        without_clips = dict.fromkeys(("clipnorm", "global_clipnorm", "clipvalue"))
        copy = type(optimizer).from_config({**optimizer.get_config(), **without_clips})
        parts = [keras.Variable(part) for part in np.split(weight, num_parts)]
        for gradient in gradients:
            copy.apply(tf.split(tf.constant(gradient, tf.float32), num_parts), parts)
        return np.concatenate([variable.numpy() for variable in parts])

    try:
        return np.allclose(update(2), update(1), rtol=1e-5)
    except Exception:  # A custom config or update may raise anything.
        return True


def check_shards(optimizer):
    """Check that an optimizer has no option that needs all weights in one process.

    Args:
        optimizer: Keras optimizer.

    Raises:
        ValueError: If the optimizer accumulates gradients.
    """
    steps = optimizer.gradient_accumulation_steps
    if steps:
        raise ValueError(
            f"{type(optimizer).__name__} has gradient_accumulation_steps={steps}, which does not work "
            "if a mesh, a pipeline or optimizer_shard divides the weights. Use micro_batch_num instead."
        )


def _check_built(optimizer, parameters):
    if optimizer.built and not all(_compat.has_variable(optimizer, x) for x in parameters):
        raise ValueError(
            f"{type(optimizer).__name__} was built before compile, for other weights or shards than "
            "this layout updates. Pass an optimizer to compile that is not built."
        )


def check_constraints(weights):
    """Check that a mesh does not shard weights with constraints, unless the partition is `"whole"`.

    Args:
        weights: List of Keras variables.

    Raises:
        ValueError: If a weight has a constraint.
    """
    if job.mesh() is None or get_parallel_config().optimizer_shard_partition == "whole":
        return
    for weight in weights:
        if getattr(weight, "constraint", None) is not None:
            raise ValueError(
                f"{weight.path} has a constraint, which needs the full weight after each update, "
                "but a mesh shards it. Set optimizer_shard=1 with "
                "optimizer_shard_partition='whole', or remove the constraint."
            )
