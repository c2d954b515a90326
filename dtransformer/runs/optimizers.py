"""The optimizer of a run, with its schedule."""

import inspect

import keras

from dtransformer.errors import InputError, refusing
from dtransformer.models.weight_paths import matching_paths, path_in
from dtransformer.runs.config import RunConfig
from dtransformer.runs.unread import check_optimizer
from dtransformer.trainers import lr_schedules
from dtransformer.trainers.optimizer.update_group import UpdateGroup

# Schedules that end with the training, and the options that they take besides.
_ENDING = {"linear": (), "cosine": (), "wsd": ("decay_steps",), "restarts": ("restarts",)}


def optimizer_class(name: str) -> type[keras.optimizers.Optimizer]:
    """Return the class of a Keras optimizer.

    Args:
        name: The optimizer's name, such as `"adamw"`.

    Raises:
        InputError: If Keras has no optimizer of this name, or it is Muon.
    """
    check_optimizer(name)
    try:
        return type(keras.optimizers.get(name))
    except (TypeError, ValueError):
        raise InputError(
            "`training.optimizer` must be a Keras optimizer such as adamw, adam, sgd, lion or "
            f"adafactor, got {name!r}."
        ) from None


def group_weights(network: keras.Model, config: RunConfig) -> None:
    """Mark the weights of `training.groups`, for the optimizer step; all ranks call.

    Raises:
        InputError: a pattern matches no weight, or one that another group has.
    """
    variables = {path_in(network, variable): variable for variable in network.variables}
    seen = {}
    for number, group in enumerate(config.training.groups, 1):
        with refusing("training.groups"):
            paths = matching_paths(network, group.pattern)
        for path in paths:
            if path in seen:
                raise InputError(f"training.groups: {path} is in groups {seen[path]} and {number}")
            seen[path] = number
            if path in variables:
                update = UpdateGroup(group.learning_rate_factor, group.weight_decay)
                variables[path].update_group = update


@refusing("training")
def make_optimizer(config: RunConfig, total_steps: int) -> keras.optimizers.Optimizer:
    """Return the optimizer of a run, with its schedule.

    Args:
        config: the run's config.
        total_steps: number of steps of the training, at which some schedules end.

    Raises:
        InputError: the options do not make an optimizer.
    """
    options = config.training
    kind = optimizer_class(options.optimizer)
    schedule = {"peak_learning_rate": options.learning_rate, "warmup_steps": options.warmup_steps}
    if options.schedule in _ENDING:
        schedule["total_steps"] = max(total_steps, options.warmup_steps + 1)
        schedule["final_learning_rate"] = options.final_learning_rate
        schedule |= {name: getattr(options, name) for name in _ENDING[options.schedule]}
    keywords = {
        "learning_rate": lr_schedules.get(options.schedule, **schedule),
        "weight_decay": options.weight_decay,  # 0, too: Keras' AdamW has another default
    }
    if options.ema:
        keywords |= {"use_ema": True, "ema_momentum": options.ema}
    if options.clip_norm:
        keywords["global_clipnorm"] = options.clip_norm
    if "beta_2" in inspect.signature(kind).parameters:
        keywords["beta_2"] = options.beta_2
    elif options.beta_2 != type(options).beta_2:
        raise ValueError(f"beta_2: optimizer {options.optimizer} has none: leave it out")
    optimizer = kind(**keywords)
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    return optimizer
