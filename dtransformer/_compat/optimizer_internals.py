"""Private names of Keras' optimizers: weights and states."""

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
