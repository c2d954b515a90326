"""Update in functions of a few units, traced and compiled once for all equal units."""

from functools import partial

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.trainers.optimizer.optimizer_step import scaled
from dtransformer.trainers.optimizer.parameter_proxy import ParameterProxy
from dtransformer.trainers.optimizer.stochastic_rounding import round_to_bfloat16
from dtransformer.trainers.optimizer.update_calls import GroupedUnit, plan_calls


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
        attributes: Dict of the optimizer's attributes during an update.
        rounding: `StateRounding` of bfloat16 states and weights. Defaults to `None`.

    Call arguments:
        gradients: List of tensors, one per parameter.
        values: List of tensors. Current values of the `ParameterProxy`s.
        factor: Float32 scalar that multiplies the gradients. `None` means 1.

    Returns:
        List of tensors. New values of the `ParameterProxy`s.
    """

    def __init__(
        self, optimizer, parameters, states, groups, jit_compile, attributes, rounding=None
    ):
        self._optimizer = optimizer
        self._jit_compile = jit_compile
        self._attributes = attributes
        self._settings = None
        self._learning_rate = None
        self._scalars = []
        self._functions = {}
        self._rounding = rounding
        bits = [None] * len(parameters)
        rounds_values = [False] * len(parameters)
        if rounding is not None:
            bits = rounding.bits
            rounds_values = rounding.rounds_values
        self._units = [
            GroupedUnit.create(optimizer, index, *arguments)
            for index, arguments in enumerate(zip(parameters, states, groups, bits, rounds_values))
        ]
        self._calls = plan_calls(self._units)

    def __call__(self, gradients, values, factor):
        self._drop_outdated_functions()
        passed_values = iter(values)
        values = [
            next(passed_values) if unit.variable is None else unit.variable for unit in self._units
        ]
        scalars = [tf.identity(scalar.value) for scalar in self._scalars]
        if self._rounding is not None:
            scalars.append(self._rounding.keys(scalars[0]))
        new_values = {}
        for device, calls in self._calls.items():
            last = []  # Control inputs of the next call, so that calls run one by one.
            for units in calls:
                arguments = (
                    [gradients[unit.index] for unit in units],
                    [values[unit.index] for unit in units],
                    [unit.state_values for unit in units],
                    [_random_numbers(unit) for unit in units],
                    scalars,
                    factor,
                )
                function = self._function(units, arguments)
                with tf.device(device), tf.control_dependencies(last):
                    results, done = function(*arguments)
                last = [done]
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
            units: List of the `GroupedUnit`s of the call.
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
            units: List of `GroupedUnit`s. Later calls use the function for other units of equal keys.
            gradients: List of tensors.
            values: List with the variable of each unit, or the tensor of its `ParameterProxy`.
            states: List with the list of state variables of each unit.
            numbers: List with the numbers of each unit's random bits; see `_random_numbers`.
            scalars: List of tensors. Values of `self._scalars`, and the keys of random bits.
            factor: Scalar that multiplies the gradients, or `None`.

        Returns:
            A tuple: the new values of the `ParameterProxy`s, and a scalar that is computed last.
        """
        for unit, value in zip(units, values):
            unit.proxy.bind(tf.cast(value, "float32") if unit.rounds_value else value)
        bits = {}
        for unit, unit_numbers in zip(units, numbers):
            rounded = [*unit.rounded, unit] if unit.rounds_value else unit.rounded
            for tensor in unit_numbers:
                halves = unit.bits.halves(tensor, scalars[-1], len(rounded))
                bits.update(zip(map(id, rounded), halves))
        rows = list(zip(units, scaled(gradients, factor), states))
        for group in dict.fromkeys(unit.group for unit in units):
            group_rows = [row for row in rows if row[0].group == group]
            self._update_group(group, group_rows, scalars, bits)
        new_values = []
        for unit, variable in zip(units, values):
            value = unit.proxy.unbind()
            if unit.rounds_value:
                value = round_to_bfloat16(value, bits[id(unit)])
                if unit.variable is not None:
                    value = variable.assign(value)
            if unit.variable is None:
                new_values.append(value)
        return new_values, tf.zeros([])

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
        settings = self._attributes | _compat.average_only(self._optimizer, indices, proxies)
        settings |= _group_settings(self._optimizer, group)
        settings |= _compat.shared_weight_decay(self._optimizer)
        with (
            scope,
            _compat.patched(self._optimizer, **settings),
            _compat.declared_dtype(rounded, "float32"),
        ):
            step = _compat.shared_adam_step(self._optimizer)
            with _compat.patched(self._optimizer, **step):
                self._optimizer.apply([gradient for _, gradient, _ in rows], proxies)
        for state, variable in pairs:
            value = scope.get_current_value(state)
            if id(state) in bits:
                variable.assign(round_to_bfloat16(value.unbind(), bits[id(state)]))
            # Keras assigns averages to the scope instead of the variable.
            elif value is not variable:
                variable.assign(value)


def _random_numbers(unit):
    """Return the numbers of the unit's `bits`, a list of at most one tensor."""
    is_used = unit.rounded or unit.rounds_value
    return [tf.constant(unit.bits.numbers, "uint32")] if is_used else []


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
