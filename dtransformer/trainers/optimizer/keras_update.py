"""Update of the local units by a Keras optimizer: in one call, or grouped and compiled."""

from functools import partial

import tensorflow as tf

from dtransformer import _compat
from dtransformer.trainers.optimizer.grouped_update import GroupedUpdate
from dtransformer.trainers.optimizer.optimizer_step import scaled
from dtransformer.trainers.optimizer.parameter_proxy import ParameterProxy
from dtransformer.trainers.optimizer.states import unit_states

# Modules of optimizers that update each weight separately.
_MODULES = ("keras.", "dtransformer.")
# Keras would scale and clip again. With `gradient_accumulation_steps`, Keras clips the sum.
_SCALING = {"loss_scale_factor": None}
_CLIPPING = dict.fromkeys(("clipvalue", "clipnorm", "global_clipnorm"))


def keras_update(optimizer, units, run_eagerly, jit_compile, rounding=None):
    """Return a function that updates units.

    Optimizers of Keras and of this library run in shared functions, see `GroupedUpdate`, unless
    functions run eagerly or a unit cannot be updated without the others. Custom optimizers update
    all units in one call, because their use of weights and states is unknown.

    Args:
        optimizer: Built Keras optimizer.
        units: List of the `UpdateUnit`s that it was built for.
        run_eagerly: Boolean. Whether to compile nothing.
        jit_compile: Boolean. Whether XLA compiles shared functions.
        rounding: `StateRounding` of bfloat16 states and weights. Defaults to `None`.

    Returns:
        A function of the units' gradients and of the values of their `ParameterProxy`s, two lists
        of tensors, and of a scalar that multiplies the gradients, or `None`. It returns the new
        values of the `ParameterProxy`s.

    Raises:
        ValueError: If shared functions are not possible, and a weight has an `UpdateGroup`, states
            are rounded, or averages overwrite shards.
    """
    attributes = _SCALING if optimizer.gradient_accumulation_steps else _SCALING | _CLIPPING
    parameters = [unit.parameter for unit in units]
    groups = [getattr(unit.weight, "update_group", None) for unit in units]
    states = None
    if type(optimizer).__module__.startswith(_MODULES) and not run_eagerly:
        states = unit_states(optimizer, len(units))
    needs_functions = any(groups) or rounding is not None
    if states is not None and (needs_functions or not tf.config.functions_run_eagerly()):
        return GroupedUpdate(
            optimizer, parameters, states, groups, jit_compile, attributes, rounding
        )
    if needs_functions:
        task = "update groups of weights" if any(groups) else "round updates to bfloat16"
        raise ValueError(
            f"{type(optimizer).__name__} cannot {task}. Use a Keras optimizer that only keeps states "
            "per weight, without gradient_accumulation_steps and run_eagerly."
        )
    if optimizer.ema_overwrite_frequency and any(unit.is_proxy for unit in units):
        raise ValueError(
            f"{type(optimizer).__name__} has ema_overwrite_frequency="
            f"{optimizer.ema_overwrite_frequency}, which needs a Keras optimizer that only keeps states "
            "per weight, without run_eagerly, if a mesh or optimizer_shard divides the weights. Remove "
            "it, or use AdamW. fit assigns averages when training ends."
        )
    return partial(_update_together, optimizer, parameters, attributes)


def _update_together(optimizer, parameters, attributes, gradients, values, factor):
    proxies = [parameter for parameter in parameters if isinstance(parameter, ParameterProxy)]
    for proxy, value in zip(proxies, values, strict=True):
        proxy.bind(value)
    if parameters:
        with _compat.patched(optimizer, **attributes):
            optimizer.apply(scaled(gradients, factor), parameters)
    else:
        # Keras counts no step without gradients, as in a pipeline stage of frozen weights.
        optimizer.iterations.assign_add(1)
    return [proxy.unbind() for proxy in proxies]
