"""Checks of an optimizer that is to update shards of weights."""

import warnings

import keras
import numpy as np
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.config.config import NOT_ELEMENTWISE, get_parallel_config
from dtransformer.parallel.runtime import job


def check_update(optimizer, weights, parameters, is_sharded, is_divided):
    """Check that an optimizer can update what this rank has of weights.

    Args:
        optimizer: a Keras optimizer.
        weights: list of the Keras variables that are trained.
        parameters: list of what the optimizer is given of them.
        is_sharded: whether ranks of the data-parallel group update shards of weights.
        is_divided: whether these, a mesh or a pipeline divide weights.

    Raises:
        ValueError: it cannot; says what to change.
    """
    _check_overwritten(weights)
    warn_of_muon(optimizer, weights)
    check_constraints(weights)
    if is_sharded:
        check_elementwise(optimizer)
    if is_divided:
        check_shards(optimizer)
    _check_built(optimizer, parameters)


def _check_overwritten(weights):
    """Refuse weights whose gradients are new values, such as the scales of Keras' float8.

    Raises:
        ValueError: names the first one.
    """
    for weight in weights:
        if getattr(weight, "overwrite_with_gradient", False):
            raise ValueError(
                f"{weight.path} is overwritten with its gradient (overwrite_with_gradient=True), as "
                "scales of float8 are, and the trainer adds gradients up: use mixed_bfloat16"
            )


def warn_of_muon(optimizer, weights):
    """Warn on rank 0 if Keras' Muon updates kernels of this library with AdamW.

    It uses AdamW for every weight that does not have two dimensions.
    """
    is_muon = type(getattr(optimizer, "inner_optimizer", optimizer)) is keras.optimizers.Muon
    kernels = [w.path for w in weights if hasattr(w, "num_inputs") and len(w.shape) != 2]
    if is_muon and kernels and job.is_chief():
        warnings.warn(
            f"keras.optimizers.Muon updates {kernels[0]} and {len(kernels) - 1} other kernels with "
            "AdamW, because they do not have two dimensions, and an untied head with Muon: use "
            "AdamW, Adafactor or Lion",
            stacklevel=2,
        )


def check_elementwise(optimizer):
    """Check that an optimizer can update the shards of a weight one by one, where it has to.

    Raises:
        ValueError: names the optimizer, and the partition with which it can.
    """
    if get_parallel_config().optimizer_shard_partition == "whole":
        return
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    named = any(kind.__name__.lower() in NOT_ELEMENTWISE for kind in type(optimizer).__mro__)
    if named or not _updates_each_element(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} computes with full weights, and a mesh or optimizer_shard "
            "shards them: set optimizer_shard_partition='whole' with optimizer_shard=1 or 2, or use "
            "an optimizer that updates each element by itself, such as AdamW, Lion or SGD"
        )


def _updates_each_element(optimizer):
    """Return whether an own optimizer gives halves of a weight the numbers of the whole.

    Of one whose copy cannot be made it is believed.
    """
    if type(optimizer).__module__.startswith("keras."):
        return True
    weight, gradients = np.array([1.0, -2.0, 30.0, 4.0], "float32"), ([3, 1, -2, 0.1], [1, 5, 2, 1])

    def updated(parts):
        without_clips = dict.fromkeys(("clipnorm", "global_clipnorm", "clipvalue"))
        copy = type(optimizer).from_config({**optimizer.get_config(), **without_clips})
        weights = [keras.Variable(part) for part in np.split(weight, parts)]
        for gradient in gradients:
            copy.apply(tf.split(tf.constant(gradient, tf.float32), parts), weights)
        return np.concatenate([variable.numpy() for variable in weights])

    try:
        return np.allclose(updated(2), updated(1), rtol=1e-5)
    except Exception:  # whatever an own configuration or an update of a vector raises
        return True


def check_shards(optimizer):
    """Refuse what an optimizer keeps of full weights, or does not do in every step.

    Raises:
        ValueError: names the option.
    """
    for name, hint in (
        ("ema_overwrite_frequency", "leave it out, and take averages when training ends"),
        ("gradient_accumulation_steps", "use micro_batch_num instead"),
    ):
        if getattr(optimizer, name):
            raise ValueError(
                f"{type(optimizer).__name__} has {name}={getattr(optimizer, name)}, which does not "
                f"work where a mesh, a pipeline or optimizer_shard divides weights: {hint}"
            )


def _check_built(optimizer, parameters):
    """Check that an optimizer was built for what it is to update, where it was built before.

    Raises:
        ValueError: it was not: for full weights, which are sharded, or for another network's.
    """
    if optimizer.built and not all(_compat.knows(optimizer, one) for one in parameters):
        raise ValueError(
            f"{type(optimizer).__name__} was built before compile, for other weights than are to be "
            "updated, which a mesh, a pipeline or optimizer_shard divides: give compile one that is "
            "not built"
        )


def check_constraints(weights):
    """Check that weights on a mesh can be projected after an update, as their constraints ask.

    Raises:
        ValueError: names the first one that cannot.
    """
    if job.mesh() is None or get_parallel_config().optimizer_shard_partition == "whole":
        return
    for weight in weights:
        if getattr(weight, "constraint", None) is not None:
            raise ValueError(
                f"{weight.path} has a constraint, which needs the full weight after each update, "
                "and a mesh shards it: set optimizer_shard=1 with "
                "optimizer_shard_partition='whole', or leave the constraint out"
            )
