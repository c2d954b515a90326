"""Variables that a Keras optimizer stores for its parameters and for itself."""

import keras

from dtransformer import _compat


def optimizer_states(
    optimizer: keras.optimizers.Optimizer, num_units: int
) -> list[tuple[str, int | None, keras.Variable]]:
    """Return all variables of an optimizer.

    Args:
        optimizer: Built Keras optimizer.
        num_units: Integer. Number of variables that the optimizer updates.

    Returns:
        A list of `(name, unit, variable)` tuples. `unit` is the index of the updated variable,
        or `None` for a state of the optimizer itself. Names of a `LossScaleOptimizer` begin with
        `"loss_scale/"`.
    """
    states = []
    prefix = ""
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        states = optimizer_states(inner, num_units)
        prefix = "loss_scale/"
    for name, value in _compat.optimizer_states(optimizer).items():
        if isinstance(value, keras.Variable):
            states.append((prefix + name, None, value))
        elif len(value) == num_units:
            states += [
                (prefix + name, index, variable)
                for index, variable in enumerate(value)
                if isinstance(variable, keras.Variable)
            ]
    return states


def unit_states(optimizer, num_units):
    """Return the states of each unit, if the units can be updated separately.

    Args:
        optimizer: Built Keras optimizer.
        num_units: Integer. Number of variables that the optimizer updates.

    Returns:
        A list with a list of `(name, variable)` tuples per unit. `None` if the optimizer has
        other states than these, its step counter and its learning rate, or accumulates gradients.
    """
    if optimizer.gradient_accumulation_steps:
        return None
    states = optimizer_states(optimizer, num_units)
    by_unit = [[] for _ in range(num_units)]
    for name, index, variable in states:
        if index is not None:
            by_unit[index].append((name, variable))
        elif variable is not optimizer.iterations and variable is not optimizer.learning_rate:
            return None
    return by_unit if len(states) == len(optimizer.variables) else None
