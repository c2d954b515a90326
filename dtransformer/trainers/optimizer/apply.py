"""The optimizer's update of its units, as functions: what is alike is traced and compiled once."""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.collectives.division import filled
from dtransformer.trainers.optimizer.parameter_proxy import ParameterProxy

# Call grouping: work items of equal signatures share calls of few functions, traced once.


def traced_apart(function: Callable, *args, jit_compile: bool | None = None) -> Callable:
    """Return a function that TensorFlow traces, and optimizes, once for all of its calls.

    Args:
        function: a function of nested tensors.
        *args: arguments of it; others that it is called with are of their shapes and types.
        jit_compile: whether it is compiled with XLA.
    """
    traced = tf.function(
        function,
        jit_compile=jit_compile,
        autograph=False,
        experimental_attributes={"_noinline": True},  # Grappler, too, sees it once
    )
    specs = tf.nest.map_structure(
        lambda x: tf.TensorSpec(x.shape, x.dtype) if isinstance(x, tf.Tensor) else x, args
    )
    with tf.init_scope():  # no device: it runs on that of each call
        return traced.get_concrete_function(*specs)


def grouped_calls(keys: Sequence[Hashable], sizes: Sequence[int], most: int) -> list[list[int]]:
    """Return calls, lists of the items' positions; many of them have the same list of keys.

    Items that are alike are dealt out to as many equal calls as make the fewest different
    items in all: those of a block, where blocks are alike. What is left over comes last.

    Args:
        keys: of the items, equal where they are alike.
        sizes: of the items.
        most: size of a call, unless its one item is larger.

    Example:

    >>> grouped_calls(["kernel", "bias", "kernel", "bias", "head"], [8, 1, 8, 1, 8], 20)
    [[0, 1], [2, 3], [4]]
    """
    alike = {}
    for position, key in enumerate(keys):
        alike.setdefault(key, []).append(position)
    counts = [len(positions) for positions in alike.values()]
    number = min(
        range(1, max(counts, default=0) + 1),
        key=lambda number: sum(count // number + count % number for count in counts),
        default=0,
    )
    equal, left = [[] for _ in range(number)], []
    for positions in alike.values():
        share = len(positions) // number
        for i, call in enumerate(equal):
            call += positions[i * share : (i + 1) * share]
        left += positions[number * share :]
    return [
        [call[i] for i in some]
        for call in [*equal, left]
        for some in filled([sizes[position] for position in call], most)
    ]


# Elements of the weights that a function updates, but of one that has more: it has the old and the
# new values of all of them in memory.
_ELEMENTS_AT_ONCE = 2**22


@dataclasses.dataclass(frozen=True)
class UpdateGroup:
    """How weights are updated that have it as their attribute `update_group`.

    Args:
        rate_factor: what the learning rate is multiplied with.
        weight_decay: in place of the optimizer's; None for that one.
    """

    rate_factor: float = 1.0
    weight_decay: float | None = None


def _as_group(optimizer, group):
    """Return attributes with which an optimizer updates as an `UpdateGroup` says."""
    if group is None:
        return {}
    decay = {} if group.weight_decay is None else {"weight_decay": group.weight_decay}
    return decay | _compat.learning_rate_times(optimizer, group.rate_factor)


class OptimizerUpdate:
    """How an optimizer updates its units.

    Args:
        optimizer: a Keras optimizer, built.
        units: list of what it updates: variables and `ParameterProxy`s.
        devices: for each unit the name of its device.
        run_eagerly: whether nothing is compiled, to debug.
        jit_compile: whether the update is compiled with XLA, where that can be done.
        groups: for each unit its `UpdateGroup`, or None.

    Call arguments:
        gradients: list of tensors, one for each unit.
        values: list of tensors, the values of the `ParameterProxy`s.

    Returns:
        The new values of the `ParameterProxy`s, a list of tensors.
    """

    def __init__(self, optimizer, units, devices, run_eagerly, jit_compile, groups):
        self._optimizer, self._units, self._in_calls = optimizer, units, None
        if type(optimizer).__module__.startswith("keras.") and not run_eagerly:
            # Of others nobody knows what they ask of a weight, and how they change their states.
            states = states_of_units(optimizer, len(units))
            if states is not None:
                self._in_calls = _UpdateInCalls(
                    optimizer, units, states, devices, jit_compile, groups
                )
        self._has_groups = any(group is not None for group in groups)
        if self._has_groups and self._in_calls is None:
            raise ValueError(
                "groups of weights need one of Keras' optimizers that keeps states of weights alone, "
                "without ema_overwrite_frequency, gradient accumulation or run_eagerly: "
                f"{type(optimizer).__name__}"
            )

    def __call__(self, gradients, values):
        if self._in_calls is None or (tf.config.functions_run_eagerly() and not self._has_groups):
            return self._apply_at_once(gradients, values)
        return self._in_calls(gradients, values)

    def _apply_at_once(self, gradients, values):
        held = [unit for unit in self._units if isinstance(unit, ParameterProxy)]
        for unit, value in zip(held, values, strict=True):
            unit.hold(value)
        if self._units:
            self._optimizer.apply(gradients, self._units)
        else:  # all weights of a stage are frozen: Keras would not count the step
            self._optimizer.iterations.assign_add(1)
        return [unit.release() for unit in held]


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


def states_of_units(optimizer, num_units):
    """Return for each unit the list of (name, variable) that the optimizer keeps for it alone.

    None where it keeps something else that changes, but for the number of the step.
    """
    states, others = [[] for _ in range(num_units)], []
    for name, index, variable in optimizer_states(optimizer, num_units):
        others.append(variable) if index is None else states[index].append((name, variable))
    known = [optimizer.iterations, optimizer.learning_rate]
    is_known = all(any(one is k for k in known) for one in others)
    number = sum(map(len, states)) + len(others)
    writes_weights = optimizer.use_ema and optimizer.ema_overwrite_frequency
    if writes_weights or optimizer.gradient_accumulation_steps or not is_known:
        return None
    return states if number == len(optimizer.variables) else None


class _UpdateInCalls:
    """The update as calls of functions, of a few units each.

    A function is traced, and compiled, once for all calls whose units are alike: it is given
    their variables.
    """

    def __init__(self, optimizer, units, states, devices, jit_compile, groups):
        self._optimizer, self._jit_compile = optimizer, jit_compile
        self._settings = self._learning_rate = self._scalars = None
        self._units = [_held(unit) for unit in units]
        self._variables = [None if unit is held else unit for unit, held in zip(units, self._units)]
        self._states, self._groups = [[variable for _, variable in own] for own in states], groups
        self._keys = [self._key(i, unit, states[i]) for i, unit in enumerate(units)]
        sizes = [math.prod(unit.shape) for unit in units]
        self._calls = []  # of a device, and numbers of units
        for device in dict.fromkeys(devices):
            here = [i for i, other in enumerate(devices) if other == device]
            own = [self._keys[i] for i in here], [sizes[i] for i in here]
            calls = grouped_calls(*own, _ELEMENTS_AT_ONCE)
            self._calls += [(device, [here[i] for i in call]) for call in calls]
        self._functions = {}  # keys of the units of a call -> function

    def _key(self, number, unit, states):
        """Return what the optimizer treats units by: those of equal keys alike."""
        kept = tuple((name, tuple(variable.shape), variable.dtype) for name, variable in states)
        is_held = isinstance(unit, ParameterProxy)
        decays = _compat.uses_weight_decay(self._optimizer, unit if is_held else unit.value)
        alike = (tuple(unit.shape), unit.dtype, decays, id(unit.constraint), kept)
        return is_held, self._groups[number], *alike

    def _forget_old_settings(self):
        """Trace anew what was traced for other settings, such as another schedule."""
        settings = _settings(self._optimizer)
        rate = _compat.learning_rate_of(self._optimizer)
        if settings != self._settings or rate is not self._learning_rate:
            self._settings, self._learning_rate, self._functions = settings, rate, {}
            scalars = [self._optimizer.iterations, rate]
            self._scalars = [scalar for scalar in scalars if isinstance(scalar, keras.Variable)]

    def __call__(self, gradients, held_values):
        self._forget_old_settings()
        held = iter(held_values)
        values = [next(held) if own is None else own.value for own in self._variables]
        scalars = [tf.identity(scalar.value) for scalar in self._scalars]
        new, done = {}, {}  # device -> what its next call waits for
        for device, numbers in self._calls:
            given = (
                [gradients[i] for i in numbers],
                [values[i] for i in numbers],
                [[state.value for state in self._states[i]] for i in numbers],
                scalars,
            )
            function = self._function(numbers, given)
            with tf.device(device), tf.control_dependencies(done.get(device, [])):
                results, is_done = function(*given)
            new.update(zip([i for i in numbers if self._variables[i] is None], results))
            done[device] = [is_done]
        self._optimizer.iterations.assign_add(1)
        return [new[i] for i, variable in enumerate(self._variables) if variable is None]

    def _function(self, numbers, given):
        """Return the function of the call of some units, of what it is given."""
        key = tuple(self._keys[i] for i in numbers)
        if key not in self._functions:
            update = functools.partial(self._update, numbers)
            self._functions[key] = traced_apart(update, *given, jit_compile=self._jit_compile)
        return self._functions[key]

    def _update(self, numbers, gradients, values, states, scalars):
        """Update variables that stand for units; return the new values of `ParameterProxy`s.

        Args:
            numbers: of the units that were traced.
            gradients: list of tensors.
            values: for each unit a variable, or the tensor that a `ParameterProxy` has.
            states: for each unit the list of the variables that the optimizer keeps for it.
            scalars: list of the values of `self._scalars`.

        Returns:
            The new values; and a scalar, which comes last.
        """
        units = [self._units[i] for i in numbers]
        for group in dict.fromkeys(self._groups[i] for i in numbers):
            scope = keras.StatelessScope(list(zip(self._scalars, scalars)))
            own = [x for x, i in enumerate(numbers) if self._groups[i] == group]
            for x in own:
                units[x].hold(values[x])
                for state, variable in zip(self._states[numbers[x]], states[x]):
                    scope.add_update((state, variable))
            some = [units[x] for x in own]
            settings = _compat.averaging_alone(self._optimizer, [numbers[x] for x in own], some)
            settings |= _as_group(self._optimizer, group)
            with scope, _compat.meanwhile(self._optimizer, **settings):
                self._optimizer.apply([gradients[x] for x in own], some)
            for x in own:
                for state, variable in zip(self._states[numbers[x]], states[x]):
                    value = scope.get_current_value(state)
                    if value is not variable:  # an average, which Keras assigns by its name
                        variable.assign(value)
        new = [unit.release() for unit in units]
        return [value for value in new if not isinstance(value, tf.Variable)], tf.zeros([])


def _settings(optimizer):
    """Return the numbers and names that a user may change between two traces, to compare."""
    simple = (bool, int, float, str, type(None))
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, simple)}


def _held(variable):
    """Return a `ParameterProxy` of a variable, or the one that it is."""
    if isinstance(variable, ParameterProxy):
        return variable
    return ParameterProxy(variable, variable.shape, variable.constraint)
