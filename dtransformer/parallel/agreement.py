"""What ranks tell each other besides tensors: small values, from any thread."""

import json

import numpy as np
import tensorflow as tf

from dtransformer.errors import InputError
from dtransformer.parallel import runtime

_functions, _joined = {}, None
_END = b"\0"  # of a text: JSON has none


def all_gather_json(value, name):
    """Return what every rank gives, in the order of ranks.

    Other threads may send and receive meanwhile: Horovod takes an operation's name from its
    graph, and eager ones of a kind have the same.

    Args:
        value: what JSON can say.
        name: str, the same on every rank, and no other message's that is under way.
    """
    global _joined
    text = json.dumps(value)
    if runtime.size() == 1:
        return [json.loads(text)]
    if _joined is not runtime.joined():
        _functions.clear()
        _joined = runtime.joined()
    if name not in _functions:
        _functions[name] = tf.function(
            lambda own: runtime.horovod().allgather(own, name=name),
            input_signature=[tf.TensorSpec([None], "uint8")],
            autograph=False,
        )
        _functions[name]._omit_frequent_tracing_warning = True  # each name has its own
    own = tf.constant(np.frombuffer(text.encode() + _END, "uint8"))
    texts = _functions[name](own).numpy().tobytes().split(_END)
    return [json.loads(text) for text in texts[:-1]]


def from_chief(action, name):
    """Return on every rank what an action returns on rank 0, where alone it is done.

    Args:
        action: a function that returns what JSON can say.
        name: as of `all_gather_json`.

    Raises:
        InputError: on every rank, where rank 0 raised one, or an OSError.
    """
    own = caught = None
    if runtime.is_chief():
        try:
            own = {"value": action()}
        except (InputError, OSError) as error:
            own, caught = {"error": str(error)}, error
    first = all_gather_json(own, name)[0]
    if "error" in first:
        raise InputError(first["error"]) from caught
    return first["value"]


def together(action, name):
    """Return what an action returns on this rank, once it is done on every rank.

    Args:
        action: a function without arguments.
        name: as of `all_gather_json`.

    Raises:
        The first rank's error, on every rank: an `InputError` or `ValueError` as such, others as
        a RuntimeError.
    """
    value = error = None
    try:
        value = action()
    except Exception as caught:
        error = caught
    kinds = {"InputError": InputError, "ValueError": ValueError}
    own = None if error is None else [type(error).__name__, str(error)]
    for rank, theirs in enumerate(all_gather_json(own, name)):
        if theirs is not None:
            kind, text = theirs
            if kind not in kinds:
                text = f"rank {rank}: {kind}: {text}" if runtime.size() > 1 else f"{kind}: {text}"
            raise kinds.get(kind, RuntimeError)(text) from error
    return value
