"""The optimizer of a run, with its schedule."""

import inspect

import keras

from dtransformer.errors import InputError, raise_as_input_error
from dtransformer.models.weight_paths import matching_paths, path_in
from dtransformer.runs.config import RunConfig
from dtransformer.runs.options import MuonOptions
from dtransformer.runs.unread import SCHEDULES_WITH_END
from dtransformer.trainers import Muon, lr_schedules
from dtransformer.trainers.optimizer.update_group import UpdateGroup


def optimizer_class(name: str) -> type[keras.optimizers.Optimizer]:
    """Return the class of an optimizer: `Muon` of this library, or else Keras' optimizer.

    Args:
        name: The optimizer's name, such as `"adamw"`.

    Raises:
        InputError: If Keras has no optimizer of this name.
    """
    if name.lower() == "muon":
        return Muon
    try:
        return type(keras.optimizers.get(name))
    except (TypeError, ValueError):
        raise InputError(
            "`training.optimizer` must be muon or a Keras optimizer such as adamw, adam, sgd, lion "
            f"or adafactor, got {name!r}."
        ) from None


def group_weights(network: keras.Model, config: RunConfig) -> None:
    """Set the `update_group` attribute of all weights that `training.groups` matches.

    The optimizer step reads it. All ranks call this function.

    Raises:
        InputError: If a pattern matches no weight, or two groups match the same weight.
    """
    variables = {path_in(network, variable): variable for variable in network.variables}
    groups = {}
    for index, group in enumerate(config.training.groups, 1):
        with raise_as_input_error("training.groups"):
            paths = matching_paths(network, group.pattern)
        for path in paths:
            if path in groups:
                raise InputError(
                    f"`training.groups`: {path} matches groups {groups[path]} and {index}. Each weight "
                    "can be in one group only."
                )
            groups[path] = index
            if path in variables:
                update = UpdateGroup(group.learning_rate_factor, group.weight_decay, group.adamw)
                variables[path].update_group = update


@raise_as_input_error("training")
def make_optimizer(config: RunConfig, total_steps: int) -> keras.optimizers.Optimizer:
    """Create the optimizer of a run, with its learning rate schedule.

    Biases and normalization weights are excluded from weight decay.

    Args:
        config: Config of the run.
        total_steps: Integer. Number of training steps. Some schedules end there.

    Raises:
        InputError: If the optimizer or the schedule rejects its options.
    """
    options = config.training
    kind = optimizer_class(options.optimizer)
    schedule = {"peak_learning_rate": options.learning_rate, "warmup_steps": options.warmup_steps}
    if options.schedule in SCHEDULES_WITH_END:
        schedule["total_steps"] = max(total_steps, options.warmup_steps + 1)
        schedule["final_learning_rate"] = options.final_learning_rate
        schedule |= {name: getattr(options, name) for name in SCHEDULES_WITH_END[options.schedule]}
    arguments = {
        "learning_rate": lr_schedules.get(options.schedule, **schedule),
        "weight_decay": options.weight_decay,  # Also set if it is 0, because AdamW's default is not.
    }
    if options.ema:
        arguments |= {"use_ema": True, "ema_momentum": options.ema}
    if options.clip_norm:
        arguments["global_clipnorm"] = options.clip_norm
    if kind is Muon:
        muon = options.muon or MuonOptions()
        arguments |= {"adam_beta_2": options.beta_2, **vars(muon)}
        arguments["adam_weight_decay"] = options.weight_decay * muon.adam_lr_ratio
    elif "beta_2" in inspect.signature(kind).parameters:
        arguments["beta_2"] = options.beta_2
    elif options.beta_2 != type(options).beta_2:
        raise ValueError(f"beta_2 is not an argument of optimizer {options.optimizer}. Remove it.")
    optimizer = kind(**arguments)
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    return optimizer
