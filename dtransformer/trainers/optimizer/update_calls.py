"""Division of an update into calls of shared functions; see `grouped_update.py`."""

import collections
import dataclasses
import math

import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.collectives.division import pack_consecutive
from dtransformer.trainers.optimizer.muon import Muon
from dtransformer.trainers.optimizer.parameter_proxy import ParameterProxy
from dtransformer.trainers.optimizer.stochastic_rounding import is_rounded

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
class GroupedUnit:
    """A unit and the variables of its update.

    Args:
        index: Integer. Index of the unit in the optimizer.
        proxy: `ParameterProxy` that the optimizer updates while a function is traced.
        variable: `tf.Variable` of the value, or `None` if each call passes the value.
        states: List of Keras variables. The optimizer's states of the unit.
        state_values: List of their `tf.Variable`s.
        group: `UpdateGroup` of the weight, or `None`.
        key: Tuple. Units of equal keys have equal updates.
        bits: `ElementBits` of the unit's bfloat16 states, or `None`.
        rounded: List of the states that the update rounds.
        rounds_value: Boolean. Whether the update also rounds the value.
    """

    index: int
    proxy: ParameterProxy
    variable: tf.Variable | None
    states: list
    state_values: list
    group: object
    key: tuple
    bits: object
    rounded: list
    rounds_value: bool

    @classmethod
    def create(cls, optimizer, index, parameter, states, group, bits, rounds_value):
        """Return the unit of a parameter: a Keras variable or a `ParameterProxy`."""
        proxy = parameter
        variable = None
        if not isinstance(parameter, ParameterProxy):
            variable = parameter.value
            proxy = ParameterProxy(parameter, parameter.shape, parameter.constraint)
        if rounds_value:
            proxy.compute_in(tf.float32)
        key = (
            variable is None,
            group,
            tuple(proxy.shape),
            proxy.dtype,
            # Keras also matches the name of the `tf.Variable`, which may end with ":0".
            _compat.uses_weight_decay(optimizer, proxy if variable is None else variable),
            id(proxy.constraint),
            optimizer.matrix_shape(parameter) if isinstance(optimizer, Muon) else None,
            None if bits is None else bits.key,
            *((name, tuple(state.shape), state.dtype) for name, state in states),
        )
        rounded = []
        if bits is not None:
            rounded = [state for name, state in states if is_rounded(name, state, parameter)]
        variables = [state for _, state in states]
        values = [state.value for state in variables]
        return cls(
            index, proxy, variable, variables, values, group, key, bits, rounded, rounds_value
        )


def plan_calls(units):
    """Return the calls of an update.

    Args:
        units: List of `GroupedUnit`s.

    Returns:
        A dict from devices to lists of calls. Each call is a list of units; see `grouped_calls`.
    """
    by_device = {}
    for unit in units:
        by_device.setdefault(unit.proxy.device, []).append(unit)
    calls = {}
    for device, local_units in by_device.items():
        keys = [unit.key for unit in local_units]
        sizes = [math.prod(unit.proxy.shape) for unit in local_units]
        calls[device] = []
        for call in grouped_calls(keys, sizes, _MAX_ELEMENTS):
            calls[device].append([local_units[i] for i in call])
    return calls
