"""Update in functions of a few units, traced and compiled once for all equal units."""

import collections
import dataclasses
import math
from collections.abc import Hashable
from functools import partial

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.collectives.division import pack_consecutive
from dtransformer.trainers.optimizer.adam_step import AdamStep, is_adam
from dtransformer.trainers.optimizer.muon import Muon
from dtransformer.trainers.optimizer.parameter_proxy import ParameterProxy
from dtransformer.trainers.optimizer.stochastic_rounding import (
    ElementBits,
    is_rounded,
    round_to_bfloat16,
)
from dtransformer.trainers.optimizer.update_group import UpdateGroup

# Maximum number of elements that a call updates, unless one unit has more. A compiled call keeps
# the old and the new values of all its units in memory.
_MAX_ELEMENTS = 2**24


def grouped_calls(keys, sizes, max_size):
    """Divide items into calls so that many calls have the same list of keys.

    Items of equal keys are distributed over equal calls. The number of equal calls minimizes the
    number of different items, so that each block of a network usually becomes one call. The
    remaining items come last.

    Args:
        keys: Key of each item. Equal keys can share a function.
        sizes: Size of each item.
        max_size: Maximum total size of a call. A larger item is alone in a call.

    Returns:
        A list of lists of item positions.

    Example:

    >>> grouped_calls(["kernel", "bias", "kernel", "bias", "head"], [8, 1, 8, 1, 8], 20)
    [[0, 1], [2, 3], [4]]
    """
    by_key = {}
    for position, key in enumerate(keys):
        by_key.setdefault(key, []).append(position)
    counts = [len(positions) for positions in by_key.values()]

    def num_different(num_calls):
        return sum(count // num_calls + count % num_calls for count in counts)

    num_calls = min(range(1, max(counts, default=0) + 1), key=num_different, default=0)
    calls = collections.defaultdict(list)
    for positions in by_key.values():
        per_call = len(positions) // num_calls
        for i in range(num_calls):
            calls[i] += positions[i * per_call : (i + 1) * per_call]
        calls[num_calls] += positions[num_calls * per_call :]
    limited = []
    for call in calls.values():
        for part in pack_consecutive([sizes[position] for position in call], max_size):
            limited.append([call[i] for i in part])
    return limited


@dataclasses.dataclass(frozen=True, eq=False)
class _Unit:
    """A unit and the variables of its update.

    Args:
        index: Integer. Index of the unit in the optimizer.
        proxy: `ParameterProxy` that the optimizer updates while a function is traced.
        variable: Keras variable of the value, or `None` if each call passes the value.
        states: List of Keras variables. The optimizer's states of the unit.
        group: `UpdateGroup` of the weight, or `None`.
        key: Hashable. Units of equal keys have equal updates.
        bits: `ElementBits` of the unit's bfloat16 states, or `None`.
        rounded: List of the states that the update rounds.
    """

    index: int
    proxy: ParameterProxy
    variable: keras.Variable | None
    states: list
    group: UpdateGroup | None
    key: Hashable
    bits: ElementBits | None
    rounded: list

    @classmethod
    def create(cls, optimizer, index, parameter, states, group, bits):
        """Return the unit of a parameter: a Keras variable or a `ParameterProxy`."""
        proxy = parameter
        variable = None
        if not isinstance(parameter, ParameterProxy):
            variable = parameter
            proxy = ParameterProxy(variable, variable.shape, variable.constraint)
        key = (
            variable is None,
            group,
            tuple(proxy.shape),
            proxy.dtype,
            # Keras also matches the name of the `tf.Variable`, which may end with ":0".
            _compat.uses_weight_decay(optimizer, proxy if variable is None else variable.value),
            id(proxy.constraint),
            optimizer.matrix_shape(parameter) if isinstance(optimizer, Muon) else None,
            None if bits is None else bits.key,
            *((name, tuple(state.shape), state.dtype) for name, state in states),
        )
        rounded = []
        if bits is not None:
            rounded = [state for name, state in states if is_rounded(name, state, parameter)]
        variables = [state for _, state in states]
        return cls(index, proxy, variable, variables, group, key, bits, rounded)

    def value(self, passed_values):
        """Return the `tf.Variable` of the value, or the next item of an iterator."""
        return next(passed_values) if self.variable is None else self.variable.value

    def state_values(self):
        """Return the `tf.Variable`s of the states."""
        return [state.value for state in self.states]

    def numbers(self):
        """Return the numbers of `bits`, a list of at most one tensor."""
        return [tf.constant(self.bits.numbers, "uint32")] if self.rounded else []


class GroupedUpdate:
    """Update of a Keras optimizer as calls of shared functions.

    A function receives the variables of its units. It is traced and compiled once for all calls
    whose units have equal shapes, dtypes, states and settings.

    Args:
        optimizer: Built Keras optimizer.
        parameters: List of its parameters: Keras variables and `ParameterProxy`s.
        states: List with the `(name, variable)` states of each parameter; see `unit_states`.
        groups: List with the `UpdateGroup` of each parameter, or `None`.
        jit_compile: Boolean. Whether XLA compiles the functions.
        rounding: `StateRounding` of bfloat16 states. Defaults to `None`.

    Call arguments:
        gradients: List of tensors, one per parameter.
        values: List of tensors. Current values of the `ParameterProxy`s.
        factor: Float32 scalar that multiplies the gradients. `None` means 1.

    Returns:
        List of tensors. New values of the `ParameterProxy`s.
    """

    def __init__(self, optimizer, parameters, states, groups, jit_compile, rounding=None):
        self._optimizer = optimizer
        self._jit_compile = jit_compile
        self._settings = None
        self._learning_rate = None
        self._scalars = []
        self._functions = {}
        self._rounding = rounding
        bits = [None] * len(parameters) if rounding is None else rounding.bits
        self._units = [
            _Unit.create(optimizer, index, *arguments)
            for index, arguments in enumerate(zip(parameters, states, groups, bits))
        ]
        by_device = {}
        for unit in self._units:
            by_device.setdefault(unit.proxy.device, []).append(unit)
        self._calls = []
        for device, units in by_device.items():
            keys = [unit.key for unit in units]
            sizes = [math.prod(unit.proxy.shape) for unit in units]
            for call in grouped_calls(keys, sizes, _MAX_ELEMENTS):
                self._calls.append((device, [units[i] for i in call]))

    def __call__(self, gradients, values, factor):
        self._drop_outdated_functions()
        passed_values = iter(values)
        values = [unit.value(passed_values) for unit in self._units]
        scalars = [tf.identity(scalar.value) for scalar in self._scalars]
        if self._rounding is not None:
            scalars.append(self._rounding.keys(scalars[0]))
        new_values = {}
        last = {}  # device -> control inputs of its next call, so that calls run one by one
        for device, units in self._calls:
            arguments = (
                [gradients[unit.index] for unit in units],
                [values[unit.index] for unit in units],
                [unit.state_values() for unit in units],
                [unit.numbers() for unit in units],
                scalars,
                factor,
            )
            function = self._function(units, arguments)
            with tf.device(device), tf.control_dependencies(last.get(device, [])):
                results, done = function(*arguments)
            last[device] = [done]
            passed = [unit.index for unit in units if unit.variable is None]
            new_values.update(zip(passed, results))
        self._optimizer.iterations.assign_add(1)
        return [new_values[i] for i in sorted(new_values)]

    def _drop_outdated_functions(self):
        """Trace again if the optimizer's settings have changed, such as its schedule."""
        simple = (bool, int, float, str, type(None))
        settings = {k: v for k, v in vars(self._optimizer).items() if isinstance(v, simple)}
        rate = _compat.get_learning_rate(self._optimizer)
        if settings != self._settings or rate is not self._learning_rate:
            self._settings = settings
            self._learning_rate = rate
            self._functions = {}
            scalars = [self._optimizer.iterations, rate]
            self._scalars = [scalar for scalar in scalars if isinstance(scalar, keras.Variable)]

    def _function(self, units, arguments):
        """Return the function of a call, traced and optimized for the first call with equal units.

        Args:
            units: List of the `_Unit`s of the call.
            arguments: Tuple. Arguments of the call.
        """
        key = tuple(unit.key for unit in units)
        if key not in self._functions:
            traced = tf.function(
                partial(self._update, units),
                jit_compile=self._jit_compile,
                autograph=False,
                # If TensorFlow inlined the function, Grappler would optimize every call.
                experimental_attributes={"_noinline": True},
            )
            specs = tf.nest.map_structure(
                lambda x: tf.TensorSpec(x.shape, x.dtype) if isinstance(x, tf.Tensor) else x,
                arguments,
            )
            # Leave the current device scope, because each call sets a device.
            with tf.init_scope():
                self._functions[key] = traced.get_concrete_function(*specs)
        return self._functions[key]

    def _update(self, units, gradients, values, states, numbers, scalars, factor):
        """Update values and states of units while a function is traced.

        Args:
            units: List of `_Unit`s. Later calls use the function for other units of equal keys.
            gradients: List of tensors.
            values: List with the variable of each unit, or the tensor of its `ParameterProxy`.
            states: List with the list of state variables of each unit.
            numbers: List with the numbers of each unit's random bits; see `_Unit.numbers`.
            scalars: List of tensors. Values of `self._scalars`, and the keys of random bits.
            factor: Scalar that multiplies the gradients, or `None`.

        Returns:
            A tuple: the new values of the `ParameterProxy`s, and a scalar that is computed last.
        """
        for unit, value in zip(units, values):
            unit.proxy.bind(value)
        bits = {}
        for unit, unit_numbers in zip(units, numbers):
            for tensor in unit_numbers:
                halves = unit.bits.halves(tensor, scalars[-1], len(unit.rounded))
                bits.update(zip(map(id, unit.rounded), halves))
        rows = list(zip(units, scaled(gradients, factor), states))
        for group in dict.fromkeys(unit.group for unit in units):
            group_rows = [row for row in rows if row[0].group == group]
            self._update_group(group, group_rows, scalars, bits)
        new_values = [unit.proxy.unbind() for unit in units]
        return [x for x in new_values if not isinstance(x, tf.Variable)], tf.zeros([])

    def _update_group(self, group, rows, scalars, bits):
        """Update the units of an `UpdateGroup`, given as `(unit, gradient, states)` tuples.

        `bits` is a dict from `id`s of rounded states to their random bits.
        """
        indices = [unit.index for unit, _, _ in rows]
        proxies = [unit.proxy for unit, _, _ in rows]
        scope = keras.StatelessScope(list(zip(self._scalars, scalars)))
        pairs = [pair for unit, _, variables in rows for pair in zip(unit.states, variables)]
        rounded = [state for state, _ in pairs if id(state) in bits]
        for state, variable in pairs:
            value = variable
            if id(state) in bits:
                value = ParameterProxy(state, state.shape, dtype=tf.float32)
                value.bind(tf.cast(variable, "float32"))
            scope.add_update((state, value))
        settings = _compat.average_only(self._optimizer, indices, proxies)
        settings |= _group_settings(self._optimizer, group)
        settings |= _compat.shared_weight_decay(self._optimizer)
        with (
            scope,
            _compat.patched(self._optimizer, **settings),
            _compat.declared_dtype(rounded, "float32"),
        ):
            step = {"update_step": AdamStep(self._optimizer)} if is_adam(self._optimizer) else {}
            with _compat.patched(self._optimizer, **step):
                self._optimizer.apply([gradient for _, gradient, _ in rows], proxies)
        for state, variable in pairs:
            value = scope.get_current_value(state)
            if id(state) in bits:
                variable.assign(round_to_bfloat16(value.unbind(), bits[id(state)]))
            # Keras assigns averages to the scope instead of the variable.
            elif value is not variable:
                variable.assign(value)


def scaled(gradients, factor):
    """Return gradients multiplied by a scalar. `None` means 1."""
    if factor is None:
        return gradients
    return [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]


def _group_settings(optimizer, group):
    """Return the optimizer's attributes while it updates an `UpdateGroup`."""
    if group is None:
        return {}
    settings = _compat.learning_rate_times(optimizer, group.rate_factor)
    if group.weight_decay is not None:
        settings["weight_decay"] = group.weight_decay
        if hasattr(optimizer, "adam_weight_decay"):
            # Muon multiplies it by the learning rate of matrices.
            settings["adam_weight_decay"] = group.weight_decay * optimizer.adam_lr_ratio
    return settings
