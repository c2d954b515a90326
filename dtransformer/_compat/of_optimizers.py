"""Private names of Keras' optimizers."""

import contextlib

import keras


def exclude_parts_from_weight_decay(optimizer, parts: list[tuple[keras.Variable, object]]) -> None:
    """Exclude the parts of the weights that a user has excluded from weight decay.

    Args:
        optimizer: a Keras optimizer that is not built.
        parts: list of (weight, what the optimizer updates of it). Unnecessary as `known_as`.
    """
    excluded = getattr(optimizer, "_exclude_from_weight_decay", set())
    for weight, part in parts:
        if excluded and optimizer._var_key(weight) in excluded:
            excluded.add(optimizer._var_key(part))


def learning_rate_of(optimizer: keras.optimizers.Optimizer):
    """Return an optimizer's learning rate: a variable, a schedule or a function.

    Its property calls the latter two. Unnecessary if Keras told which it is.
    """
    return optimizer._learning_rate


@contextlib.contextmanager
def meanwhile(owner: object, **attributes):
    """Inside the `with` block attributes of an object are others, past Keras' tracking of them.

    Unnecessary if what Keras calls took as arguments what is set here.
    """
    own = vars(owner)
    kept = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del own[name]
        own.update(kept)


def learning_rate_times(optimizer: keras.optimizers.Optimizer, factor: float) -> dict:
    """Return attributes with which an optimizer's learning rate is multiplied with a factor.

    Unnecessary if Keras' optimizers had groups of weights.
    """
    rate = optimizer._learning_rate
    is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)

    def product():
        value = rate(optimizer.iterations) if is_schedule else rate() if callable(rate) else rate
        return keras.ops.multiply(value, factor)

    return {"_learning_rate": product}


def averages_of(optimizer: keras.optimizers.Optimizer) -> list:
    """Return a built optimizer's averages with `use_ema`; else [].

    Unnecessary if they were public.
    """
    return list(optimizer._model_variables_moving_average) if optimizer.use_ema else []


def averaging_alone(
    optimizer: keras.optimizers.Optimizer, numbers: list[int], variables: list
) -> dict:
    """Return attributes with which an optimizer with `use_ema` averages some variables alone.

    Unnecessary if `apply` averaged what it is given, in place of all variables.

    Args:
        optimizer: a built Keras optimizer.
        numbers: of the variables in the order that it was built with.
        variables: what stands for them.
    """
    averages = averages_of(optimizer)
    if not averages:
        return {}
    own = [averages[i] for i in numbers]
    return {"_trainable_variables": variables, "_model_variables_moving_average": own}


def uses_weight_decay(optimizer: keras.optimizers.Optimizer, variable) -> bool:
    """Return whether an optimizer lets a variable decay. Unnecessary as `known_as`."""
    return bool(optimizer._use_weight_decay(variable))


def knows(optimizer: keras.optimizers.Optimizer, variable) -> bool:
    """Return whether an optimizer was built for a variable, of its shape. Unnecessary as `known_as`."""
    number = optimizer._trainable_variables_indices.get(optimizer._var_key(variable))
    known = optimizer._trainable_variables
    return number is not None and tuple(known[number].shape) == tuple(variable.shape)


def optimizer_states(optimizer: keras.optimizers.Optimizer) -> dict:
    """Return what an optimizer keeps, by the names of its attributes, such as "momentums".

    Single variables, and lists with one, or None, for each variable that it updates; not the
    lists of all. `optimizer.variables` does not say what is what. Unnecessary if optimizers
    named their states as layers name their weights.
    """
    lists_of_all = ("_variables", "_trainable_variables", "_non_trainable_variables")
    found = {}
    for name, value in sorted(vars(optimizer).items()):
        variables = value if isinstance(value, list) else [value]
        if name not in lists_of_all and any(isinstance(v, keras.Variable) for v in variables):
            found[name.strip("_")] = value
    return found
