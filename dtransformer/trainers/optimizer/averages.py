"""Moving averages of weights (`use_ema`)."""

import tensorflow as tf

from dtransformer import _compat


def assign_averages(optimizer, units, store, exchange):
    """Assign the weights' moving averages to the weights. All ranks must call.

    Without `use_ema` and before the first step, no averages exist and nothing changes.

    Args:
        optimizer: Built Keras optimizer.
        units: Its `UpdateUnits`.
        store: Function that stores new values of the units' `ParameterProxy`s.
        exchange: Boolean. Whether to assign the weights' values to the averages. A second call
            then restores both.
    """
    averages = _compat.get_moving_averages(optimizer)
    if not averages or not int(optimizer.iterations):
        return
    values = dict(zip(units.proxies, units.proxy_values()))
    new_values = []
    for unit, average in zip(units.units, averages, strict=True):
        new_value = tf.identity(average.value)
        if unit.is_proxy:
            value = values[unit]
            new_values.append(new_value)
        else:
            value = tf.identity(unit.parameter.value)
            unit.parameter.assign(new_value)
        if exchange:
            average.assign(tf.reshape(value, average.shape))
    store(new_values)
