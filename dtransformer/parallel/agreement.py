"""What ranks tell each other besides tensors: small values, from any thread."""

import json

import numpy as np
import tensorflow as tf

from dtransformer.errors import InputError
from dtransformer.parallel import runtime

_functions, _joined = {}, None


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
            lambda own: _all_gather(own, name),
            input_signature=[tf.TensorSpec([None], "uint8")],
            autograph=False,
        )
        _functions[name]._omit_frequent_tracing_warning = True  # each name has its own
    own = tf.constant(np.frombuffer(text.encode(), "uint8"))
    together, sizes = _functions[name](own)
    texts = tf.split(together, sizes)
    return [json.loads(bytes(text.numpy())) for text in texts]


def _all_gather(own, name):
    hvd = runtime.horovod()
    sizes = hvd.allgather(tf.shape(own), name=f"{name}/sizes")
    return hvd.allgather(own, name=name), sizes


def raise_together(error, name):
    """Raise on every rank what some rank has caught.

    Args:
        error: this rank's exception; None where it has none.
        name: as of `all_gather_json`.

    Raises:
        The first rank's error: an `InputError` as such, others as a RuntimeError.
    """
    own = None if error is None else [isinstance(error, InputError), _text_of(error)]
    for rank, theirs in enumerate(all_gather_json(own, name)):
        if theirs is not None:
            is_input, text = theirs
            place = f"rank {rank}: " if runtime.size() > 1 and not is_input else ""
            raise (InputError if is_input else RuntimeError)(place + text) from error


def _text_of(error):
    return str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
