"""The optimizer's update of its units, also compiled with XLA."""

import math

import keras
import tensorflow as tf

from dtransformer.parallel.zero.held_parameter import HeldParameter

# Elements of the weights that a function of XLA's updates, but for the last weight's.
_ELEMENTS_AT_ONCE = 2**22


def update_units(optimizer, units):
    """Return a function that lets an optimizer update its units.

    Args:
        optimizer: a Keras optimizer, built.
        units: list of what it updates: variables and `HeldParameter`s.

    Returns:
        A function of gradients and of the values of the `HeldParameter`s, lists of tensors,
        that returns the new values of the latter.
    """
    held = [unit for unit in units if isinstance(unit, HeldParameter)]

    def update(gradients, values):
        for unit, value in zip(held, values, strict=True):
            unit.hold(value)
        optimizer.apply(gradients, units)
        return [unit.release() for unit in held]

    return update


def compiled_update(optimizer, units, devices):
    """Return what `update_units` does, compiled with XLA where that can be done.

    A function of XLA's runs on one device, and has the old and the new values of all that
    it updates in memory. So there is one for each device and for every few weights.

    Args:
        optimizer, units: as of `update_units`.
        devices: for each unit the name of its device.
    """
    on_device = {}
    for number, device in enumerate(devices):
        calls = on_device.setdefault(device, [[]])
        if sum(math.prod(units[i].shape) for i in calls[-1]) > _ELEMENTS_AT_ONCE:
            calls.append([])
        calls[-1].append(number)
    if [len(calls) for calls in on_device.values()] == [1]:
        return tf.function(update_units(optimizer, units), jit_compile=True)
    if not _updates_units_alone(optimizer):
        return update_units(optimizer, units)
    return _update_in_calls(optimizer, units, on_device)


def _update_in_calls(optimizer, units, on_device):
    """Return the update as functions of XLA's, dict of device -> lists of numbers of units."""
    scalars = [optimizer.iterations, optimizer.learning_rate]
    scalars = [scalar for scalar in scalars if isinstance(scalar, keras.Variable)]
    held = [number for number, unit in enumerate(units) if isinstance(unit, HeldParameter)]

    def compiled(numbers):
        own_update = update_units(optimizer, [units[number] for number in numbers])

        def update(gradients, values, scalar_values):
            # The scalars lie on one device; each call counts the step for itself.
            with keras.StatelessScope(list(zip(scalars, scalar_values))):
                new = own_update(gradients, values)
            return new, tf.zeros([])  # what the next call waits for

        return tf.function(update, jit_compile=True)

    functions = {
        device: [(numbers, compiled(numbers)) for numbers in calls]
        for device, calls in on_device.items()
    }

    def update(gradients, values):
        given = dict(zip(held, values, strict=True))
        scalar_values = [tf.identity(scalar.value) for scalar in scalars]
        new = {}
        for device, calls in functions.items():
            done = []
            for numbers, function in calls:
                own = [number for number in numbers if number in given]
                with tf.device(device), tf.control_dependencies(done):
                    results, done = function(
                        [gradients[number] for number in numbers],
                        [given[number] for number in own],
                        scalar_values,
                    )
                done = [done]
                new.update(zip(own, results))
        optimizer.iterations.assign_add(1)
        return [new[number] for number in given]

    return update


def _updates_units_alone(optimizer):
    """Return whether all that an update changes belongs to one weight, but for the step."""
    scalars = [variable for variable in optimizer.variables if variable.shape == ()]
    known = [optimizer.iterations, optimizer.learning_rate]
    others = [s for s in scalars if not any(s is k for k in known)]
    return not others and not optimizer.use_ema and not optimizer.gradient_accumulation_steps
