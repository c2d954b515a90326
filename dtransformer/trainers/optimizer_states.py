"""What an optimizer keeps, and for what."""

import keras

from dtransformer import _compat


def optimizer_states(
    optimizer: keras.optimizers.Optimizer, num_units: int
) -> list[tuple[str, int | None, keras.Variable]]:
    """Return (name, number of the unit or None, variable) of all that an optimizer keeps.

    Args:
        optimizer: a built Keras optimizer.
        num_units: how many variables it updates.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    found = [] if inner is None else optimizer_states(inner, num_units)
    prefix = "" if inner is None else "loss_scale/"
    for name, value in _compat.optimizer_states(optimizer).items():
        if isinstance(value, keras.Variable):
            found.append((prefix + name, None, value))
        elif len(value) == num_units:
            found += [
                (prefix + name, number, variable)
                for number, variable in enumerate(value)
                if isinstance(variable, keras.Variable)
            ]
    return found
