"""Variables that a loop reads are read once, before it."""

import contextlib
from collections.abc import Iterable, Iterator

import keras
import tensorflow as tf

from dtransformer.parallel import trace
from dtransformer.parallel.sharded_variable import ShardedVariable


@contextlib.contextmanager
def around_loop(variables: Iterable[keras.Variable]) -> Iterator[None]:
    """Trace loops inside of the `with` block whose rounds do not read variables again.

    Args:
        variables: those that the loops read. Ones that are sharded are left as they are.
    """
    plain = [v for v in variables if not isinstance(v, ShardedVariable)]
    values = [(v, tf.convert_to_tensor(v.value)) for v in plain]
    graph = values[0][1].graph if values else tf.constant(0).graph
    with trace.scope(around_loop=graph), keras.StatelessScope(state_mapping=values):
        yield
