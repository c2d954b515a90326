"""Exchange of small values as JSON between ranks, from any thread."""

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
    """Return what every rank gives, in the order of ranks.

    Other threads may send and receive meanwhile: Horovod takes an operation's name from its
    graph, and eager ones of a kind have the same.

    Args:
        value: what JSON can say; tuples come back as lists.
        name: str, the same on every rank, and no other value's that is under way.
    """
    if job.size() == 1:
        return exchange_json(value, lambda own: own)
    with job.waiting(f"what ranks tell each other ({name})", range(job.size())):
        return exchange_json(value, _all_gather_named(name, job.current().groups))


@functools.lru_cache(maxsize=256)
def _all_gather_named(name, groups):
    """Return the compiled all-gather of a name, until the job is joined anew."""
    function = tf.function(
        lambda own: transport.concatenate(own, job.whole_job(), name),
        input_signature=[tf.TensorSpec([None], "uint8")],
        autograph=False,
    )
    return _compat.expect_many_traces(function)  # each name has its own


def broadcast_arrays(
    arrays: dict[str, np.ndarray], root: int, group: Group, name: str
) -> dict[str, np.ndarray]:
    """Return on every rank of a group the arrays that one of them has, of any types.

    Args:
        arrays: dict of names and NumPy arrays; not read elsewhere than on the root.
        root: number of the rank that has them.
        group: a `Group`.
        name: str, the same on every rank.
    """
    is_root = job.rank() == root
    own = {key: [list(x.shape), x.dtype.name] for key, x in arrays.items()} if is_root else None
    everyone = exchange_json(own, lambda x: transport.concatenate(x, group, f"{name}/shapes"))
    (described,) = [one for one in everyone if one is not None]
    found = {}
    for key, (shape, dtype) in described.items():
        # As bytes: Horovod does not have every type of NumPy's.
        num_bytes = int(np.prod(shape)) * tf.as_dtype(dtype).size
        data = np.zeros(num_bytes, "uint8")
        if is_root:
            data = np.frombuffer(np.ascontiguousarray(arrays[key]).tobytes(), "uint8")
        position = group.ranks.index(root)
        data = transport.broadcast(tf.constant(data), position, group, f"{name}/{key}").numpy()
        found[key] = np.frombuffer(data.tobytes(), tf.as_dtype(dtype).as_numpy_dtype).reshape(shape)
    return found


def from_all_stages(arrays: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """Return on every stage of a pipeline the arrays that the stages have, of different names.

    Args:
        arrays: dict of names and NumPy arrays, of this rank's stage.
        name: str, the same on every rank.
    """
    group, found = job.pipeline_group(), {}
    if group.size == 1:
        return arrays
    for root in group.ranks:
        found |= broadcast_arrays(arrays, root, group, f"{name}/{root}")
    return found


def from_chief(action: Callable, name: str):
    """Return on every rank what an action returns on rank 0, the only one that does it.

    Args:
        action: a function without arguments that returns what JSON can say.
        name: as of `all_gather_json`.

    Raises:
        InputError: on every rank, where rank 0 raised one, or an OSError.
        Exception: rank 0's; on the others it is a ValueError or a RuntimeError of its text.
    """
    own = error = None
    if job.is_chief():
        own, error = _done(lambda: _without_os_errors(action))
    first, *_ = all_gather_json(own, name)
    if error is not None:
        raise error
    return _value(0, first)


def on_all(action: Callable, name: str) -> list:
    """Return what an action returns on each rank, in the order of ranks.

    Args:
        action: a function without arguments that returns what JSON can say.
        name: as of `all_gather_json`.

    Raises:
        InputError, ValueError: the first rank's error, on every rank, is one.
        RuntimeError: it is another one.
    """
    own, error = _done(action)
    return [_value(rank, one, error) for rank, one in enumerate(all_gather_json(own, name))]


def together(action: Callable, name: str):
    """Return what an action returns on this rank, anything, once it is done on every rank.

    Arguments and errors are those of `on_all`.
    """
    own = []
    on_all(lambda: own.append(action()), name)
    return own[0]


def _without_os_errors(action):
    try:
        return action()
    except OSError as error:
        raise InputError(str(error)) from error


def _done(action):
    """Return a dict with an action's value, or with its error; and the error."""
    try:
        return {"value": action()}, None
    except Exception as error:
        kind = "InputError" if isinstance(error, InputError) else type(error).__name__
        return {"error": [kind, str(error)]}, error


def _value(rank, answer, own_error=None):
    """Return the value that a rank has told, or raise its error."""
    if "value" in answer:
        return answer["value"]
    kind, text = answer["error"]
    kinds = {"InputError": InputError, "ValueError": ValueError}
    if kind not in kinds:
        text = f"rank {rank}: {kind}: {text}" if job.size() > 1 else f"{kind}: {text}"
    raise kinds.get(kind, RuntimeError)(text) from own_error
