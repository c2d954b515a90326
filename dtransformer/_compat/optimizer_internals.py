"""Private names of Keras' optimizers."""

import contextlib
import functools

import keras


def exclude_parts_from_weight_decay(optimizer, parts: list[tuple[keras.Variable, object]]) -> None:
    """Exclude parts of weights from weight decay if the user excluded the weights.

    For the reason, see `with_variable_key`.

    Args:
        optimizer: Keras optimizer that is not built.
        parts: List of `(weight, part)` tuples, where the optimizer updates `part`.
    """
    excluded = getattr(optimizer, "_exclude_from_weight_decay", set())
    for weight, part in parts:
        if excluded and optimizer._var_key(weight) in excluded:
            excluded.add(optimizer._var_key(part))


def get_learning_rate(optimizer: keras.optimizers.Optimizer):
    """Return an optimizer's learning rate: a variable, a schedule or a function.

    The public property evaluates schedules and functions. Unnecessary if Keras returned the object.
    """
    return optimizer._learning_rate


@contextlib.contextmanager
def patched(owner: object, **attributes):
    """Context manager that temporarily sets attributes of an object, without Keras' tracking.

    Unnecessary if Keras' methods accepted these values as arguments.
    """
    current = vars(owner)
    saved = {name: current[name] for name in attributes if name in current}
    current.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del current[name]
        current.update(saved)


@contextlib.contextmanager
def declared_dtype(variables: list, dtype: str):
    """Context manager that lets Keras variables report another dtype, without a conversion.

    Keras' operations choose their type by it. Unnecessary if optimizers could compute in a wider type
    than their states.
    """
    with contextlib.ExitStack() as stack:
        for variable in variables:
            stack.enter_context(patched(variable, _dtype=dtype))
        yield


def learning_rate_times(optimizer: keras.optimizers.Optimizer, factor: float) -> dict:
    """Return attributes for `patched` that multiply an optimizer's learning rate by `factor`.

    Unnecessary if Keras' optimizers had groups of weights.
    """
    rate = optimizer._learning_rate
    is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)

    def product():
        value = rate(optimizer.iterations) if is_schedule else rate() if callable(rate) else rate
        return keras.ops.multiply(value, factor)

    return {"_learning_rate": product}


def shared_weight_decay(optimizer: keras.optimizers.Optimizer) -> dict:
    """Return attributes for `patched` that compute the rate of weight decay once for all weights.

    The dict is empty if the optimizer's class overrides weight decay. Unnecessary if Keras multiplied
    two scalars instead of multiplying each weight twice.
    """
    if type(optimizer)._apply_weight_decay is not keras.optimizers.Optimizer._apply_weight_decay:
        return {}

    def decay(variables):
        if optimizer.weight_decay is None:
            return
        rate = keras.ops.multiply(optimizer.learning_rate, optimizer.weight_decay)
        for variable in variables:
            if optimizer._use_weight_decay(variable):
                variable.assign_sub(variable * keras.ops.cast(rate, variable.dtype))

    return {"_apply_weight_decay": decay}


def adam_moments(optimizer: keras.optimizers.Adam, variable) -> tuple:
    """Return the first and the second moment of a variable, two Keras variables.

    Unnecessary if they were public.
    """
    index = optimizer._get_variable_index(variable)
    return optimizer._momentums[index], optimizer._velocities[index]


def get_moving_averages(optimizer: keras.optimizers.Optimizer) -> list:
    """Return a built optimizer's moving averages, or an empty list without `use_ema`.

    Unnecessary if they were public.
    """
    return list(optimizer._model_variables_moving_average) if optimizer.use_ema else []


def average_only(
    optimizer: keras.optimizers.Optimizer, indices: list[int], variables: list
) -> dict:
    """Return attributes for `patched` that restrict `use_ema` to some of the variables.

    They also select new values instead of branching, because a branch cannot assign tensors of the
    outer graph. The dict is empty without `use_ema`. Unnecessary if `apply` averaged and overwrote only
    the variables that it receives.

    Args:
        optimizer: Built Keras optimizer.
        indices: Indices of the variables in the order of the build.
        variables: Objects that replace these variables.
    """
    averages = get_moving_averages(optimizer)
    if not averages:
        return {}
    selected = [averages[i] for i in indices]
    settings = {"_trainable_variables": variables, "_model_variables_moving_average": selected}
    if optimizer.ema_overwrite_frequency:
        overwrite = functools.partial(
            _average_and_overwrite, optimizer, selected, optimizer.ema_overwrite_frequency
        )
        settings["_update_model_variables_moving_average"] = overwrite
        settings["ema_overwrite_frequency"] = None
    return settings


def _average_and_overwrite(optimizer, averages, frequency, variables):
    type(optimizer)._update_model_variables_moving_average(optimizer, variables)
    is_due = keras.ops.equal((optimizer.iterations + 1) % frequency, 0)
    for variable, average in zip(variables, averages):
        variable.assign(keras.ops.where(is_due, average, variable))


def uses_weight_decay(optimizer: keras.optimizers.Optimizer, variable) -> bool:
    """Return whether an optimizer applies weight decay to a variable.

    For the reason, see `with_variable_key`.
    """
    return bool(optimizer._use_weight_decay(variable))


def has_variable(optimizer: keras.optimizers.Optimizer, variable) -> bool:
    """Return whether an optimizer was built with a variable of this key and shape.

    For the reason, see `with_variable_key`.
    """
    index = optimizer._trainable_variables_indices.get(optimizer._var_key(variable))
    variables = optimizer._trainable_variables
    return index is not None and tuple(variables[index].shape) == tuple(variable.shape)


def optimizer_states(optimizer: keras.optimizers.Optimizer) -> dict:
    """Return an optimizer's state variables by attribute name, such as "momentums".

    Values are single variables, or lists with a variable or `None` for each updated variable. Lists
    of all variables are left out. `optimizer.variables` has no such structure. Unnecessary if
    optimizers named their states like layers name their weights.
    """
    lists_of_all = ("_variables", "_trainable_variables", "_non_trainable_variables")
    states = {}
    for name, value in sorted(vars(optimizer).items()):
        variables = value if isinstance(value, list) else [value]
        if name not in lists_of_all and any(isinstance(v, keras.Variable) for v in variables):
            states[name.strip("_")] = value
    return states
