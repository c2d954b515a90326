"""Exchange of small JSON values and arrays between ranks, from any thread."""

import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from dtransformer import _compat
from dtransformer.errors import InputError
from dtransformer.parallel.collectives import transport
from dtransformer.parallel.runtime import job
from dtransformer.parallel.runtime.process_groups import Group, exchange_json


def all_gather_json(value, name: str) -> list:
    """Return the values of all ranks, ordered by rank.

    Other threads may communicate at the same time. The exchange runs in a compiled function,
    because Horovod takes an operation's name from its graph, and all eager operations of a kind
    share a name.

    Args:
        value: JSON value. Tuples come back as lists.
        name: String, identical on all ranks and different from the names of pending exchanges.
    """
    if job.size() == 1:
        return exchange_json(value, lambda data: data)
    with job.record_wait(f"an exchange between ranks ({name})", range(job.size())):
        return exchange_json(value, _all_gather_named(name, job.current().groups))


@functools.lru_cache(maxsize=256)
def _all_gather_named(name, groups):
    """Return a compiled all-gather with this name. `groups` is a cache key of the current job."""
    function = tf.function(
        lambda data: transport.concatenate(data, job.world_group(), name),
        input_signature=[tf.TensorSpec([None], "uint8")],
        autograph=False,
    )
    return _compat.expect_many_traces(function)  # Each name has a separate function.


def broadcast_arrays(
    arrays: dict[str, np.ndarray], root: int, group: Group, name: str
) -> dict[str, np.ndarray]:
    """Return the root's arrays on every rank of a group.

    Args:
        arrays: Dict of NumPy arrays of any dtype, by name. Ignored on the other ranks.
        root: Integer. Rank in the job that has the arrays.
        group: `Group`.
        name: String, identical on all ranks.
    """
    is_root = job.rank() == root
    local_specs = (
        {key: [list(x.shape), x.dtype.name] for key, x in arrays.items()} if is_root else None
    )
    gathered = exchange_json(
        local_specs, lambda x: transport.concatenate(x, group, f"{name}/shapes")
    )
    (root_specs,) = [specs for specs in gathered if specs is not None]
    results = {}
    for key, (shape, dtype) in root_specs.items():
        # Horovod does not support every NumPy dtype, so send bytes.
        num_bytes = int(np.prod(shape)) * tf.as_dtype(dtype).size
        data = np.zeros(num_bytes, "uint8")
        if is_root:
            data = np.frombuffer(np.ascontiguousarray(arrays[key]).tobytes(), "uint8")
        position = group.ranks.index(root)
        data = transport.broadcast(tf.constant(data), position, group, f"{name}/{key}").numpy()
        results[key] = np.frombuffer(data.tobytes(), tf.as_dtype(dtype).as_numpy_dtype).reshape(
            shape
        )
    return results


def from_all_stages(arrays: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """Return the arrays of all pipeline stages on every stage.

    Args:
        arrays: Dict of NumPy arrays of this rank's stage. The stages' keys must differ.
        name: String, identical on all ranks.
    """
    group = job.pipeline_group()
    results = {}
    if group.size == 1:
        return arrays
    for root in group.ranks:
        results |= broadcast_arrays(arrays, root, group, f"{name}/{root}")
    return results


def from_chief(action: Callable, name: str):
    """Run an action on rank 0 only and return its result on every rank.

    Args:
        action: Function without arguments that returns a JSON value.
        name: See `all_gather_json`.

    Raises:
        InputError: If the action raised an `InputError` or an `OSError`, on every rank.
        Exception: If the action raised another error. The other ranks raise a ValueError or a
            RuntimeError with the same text.
    """
    answer = error = None
    if job.is_chief():
        answer, error = _run_action(lambda: _without_os_errors(action))
    first, *_ = all_gather_json(answer, name)
    if error is not None:
        raise error
    return _get_value(0, first)


def on_all(action: Callable, name: str) -> list:
    """Run an action on every rank and return the results, ordered by rank.

    Args:
        action: Function without arguments that returns a JSON value.
        name: See `all_gather_json`.

    Raises:
        InputError: If the first error is an `InputError`, on every rank.
        ValueError: If the first error is a ValueError, on every rank.
        RuntimeError: If the first error is another one, on every rank.
    """
    answer, error = _run_action(action)
    return [
        _get_value(rank, reply, error) for rank, reply in enumerate(all_gather_json(answer, name))
    ]


def call_on_all(action: Callable, name: str):
    """Run an action on every rank and return this rank's result when all ranks are done.

    The result may be of any type. See `on_all` for the arguments and errors.
    """
    results = []
    on_all(lambda: results.append(action()), name)
    return results[0]


def _without_os_errors(action):
    try:
        return action()
    except OSError as error:
        raise InputError(str(error)) from error


def _run_action(action):
    """Return an `(answer, error)` tuple. The answer is a dict with the value or the error."""
    try:
        return {"value": action()}, None
    except Exception as error:
        kind = "InputError" if isinstance(error, InputError) else type(error).__name__
        return {"error": [kind, str(error)]}, error


def _get_value(rank, answer, local_error=None):
    """Return the value in a rank's answer, or raise its error."""
    if "value" in answer:
        return answer["value"]
    kind, text = answer["error"]
    kinds = {"InputError": InputError, "ValueError": ValueError}
    if kind not in kinds:
        text = f"rank {rank}: {kind}: {text}" if job.size() > 1 else f"{kind}: {text}"
    raise kinds.get(kind, RuntimeError)(text) from local_error
