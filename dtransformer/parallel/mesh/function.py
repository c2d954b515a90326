"""Functions on the mesh: values are put there, computed with, and taken back."""

import contextlib
import re
from collections.abc import Callable

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from dtransformer import _compat
from dtransformer.parallel.mesh.axis_rules import relayout
from dtransformer.parallel.mesh.batch import put_replicated
from dtransformer.parallel.mesh.variable import packed, sharding_specs, unpacked
from dtransformer.parallel.runtime import job
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.shared_blocks import recording_block_calls
from dtransformer.parallel.weights.sharded_variable import own_shards

_OPERATION = re.compile(r"""['"]tf\.(\w+)['"]|(\w+)Op SPMD""")
_BY_THE_COMPILER = "layout propagation", "SPMD", "dtensor_graph_to_mlir_pass"


class MeshFunction:
    """A function of a network's variables, compiled to run on the mesh.

    Args:
        function: a function of nested DTensors that returns nested DTensors. Inside of
            it the variables' values are DTensors.
        network_variables: list of the Keras variables that it reads. What it assigns
            to them is written back afterwards.
        gradients: whether it computes gradients.

    Call arguments:
        *args: nested DTensors, as `batch` puts them on the mesh.
    """

    def __init__(
        self, function: Callable, network_variables: list[keras.Variable], gradients: bool = False
    ):
        self._function, self._gradients = function, gradients
        self._variables = network_variables
        # Each shape of a batch is compiled: DTensor has to know it.
        self._traced = _compat.called_by_shapes(tf.function(self._trace, autograph=False))
        self._is_new, self._graph = False, None
        self._constants = {}  # tensors that layers keep, by their ids: each, and as a DTensor
        self.compiled = []  # names of functions, of the last compilation
        self.calls = {}  # of the last compilation, see `recording_block_calls`
        self.adds_losses = False  # whether layers did, in the last compilation

    def _trace(self, weights, args):
        self._is_new, self.calls = True, {}
        self._graph = tf.compat.v1.get_default_graph()
        mapping = list(zip(self._variables, weights))
        ranks = job.model_parallel_group().ranks
        waiting = job.waiting("a computation on the mesh", ranks)  # which its functions may do
        kept = _compat.captures_replaced(self._on_every_device)
        scope = keras.StatelessScope(mapping, collect_losses=True)
        with scope, self._on_mesh(), waiting, kept:
            results = self._function(*args)
        self.adds_losses = bool(scope.losses)
        updates = {}
        for number, variable in enumerate(self._variables):
            new = scope.get_current_value(variable)
            if new is not None and new is not weights[number]:
                updates[str(number)] = relayout(new, sharding_specs(variable))
        return results, updates

    def _on_every_device(self, tensor):
        """Return a tensor that a layer keeps as a DTensor; scalars DTensor takes as they are.

        Raises:
            RuntimeError: it is a `tf.Variable`, a generator or a table of look-ups.
        """
        if id(tensor) in self._constants:
            return self._constants[id(tensor)][1]
        if _compat.in_symbolic_scope():  # shapes alone are asked for
            return tensor
        if tensor.dtype == "resource":
            raise RuntimeError(  # of a ValueError TensorFlow would make another one
                "a layer reads a tf.Variable, a tf.random.Generator or a table, and devices of a mesh "
                "would each have their own: use add_weight (trainable=False), keras.Variable or "
                "keras.random, or one device a rank"
            )
        if not tensor.shape.rank or tensor.dtype == "string":
            return tensor
        with tf.init_scope():
            value = tensor if dtensor.is_dtensor(tensor) else put_replicated(tensor)
        self._constants |= {id(tensor): (tensor, value), id(value): (value, value)}
        return value

    @contextlib.contextmanager
    def _on_mesh(self):
        gradients = trace.with_gradients(self._gradients)
        with trace.on_mesh(), gradients, recording_block_calls(self.calls):
            yield

    def __call__(self, *args):
        """Return what the function returns; every device is done with it."""
        return self.run(self.packed(), *args)

    def packed(self) -> list[tf.Tensor]:
        """Return the variables as DTensors."""
        return [packed(variable) for variable in self._variables]

    def run(self, weights: list[tf.Tensor], *args, variables: list[keras.Variable] | None = None):
        """As a call, with the variables that `packed` has returned.

        Args:
            weights: list of DTensors.
            *args: as a call's.
            variables: what they are the values of, and what it assigns is written to: variables
                like those of the function, which they are by default.

        Raises:
            ValueError: DTensor cannot compute an operation; says which, and where.
        """
        variables = self._variables if variables is None else variables
        try:
            results, updates = self._traced(weights, args)
        except tf.errors.OpError as error:
            message = _refused(error.message, self._graph)
            if message is None:
                raise
            raise ValueError(message) from None
        del weights  # or an update in place would have to copy them
        wait(results)
        if self._is_new:
            self.compiled, self._is_new = new_functions(), False
        for number, value in updates.items():
            variable = variables[int(number)]
            shards = own_shards([variable])
            for shard, new in zip(shards, unpacked(variable, value)):
                shard.assign(new)
        return results


def _refused(message, graph):
    """Return what to say of an operation that DTensor cannot compile; None of other errors."""
    found = _OPERATION.search(message)
    if found is None or not any(words in message for words in _BY_THE_COMPILER):
        return None
    kind = found[1] or found[2]
    names = [operation.name for operation in graph.get_operations() if operation.type == kind]
    return (
        f"{names[0] if names else 'a layer of the network'} computes {kind}, which DTensor cannot "
        "compute on a mesh: use another layer (an LSTM or GRU with unroll=True has no loop), or "
        "model_parallel=1 and one device a rank"
    )


def wait(results):
    """Wait until every local device has computed nested DTensors.

    DTensor runs asynchronously; an update of the weights before it is done would change
    what it still reads. All results of a function come at once, so that a number of the smallest
    tells. `unpack` waits, too, but lets no other thread of Python run meanwhile, the watchdog's
    among them; to read a scalar does.
    """
    some = [result for result in tf.nest.flatten(results) if result is not None]
    smallest = min(some, key=lambda result: result.shape.num_elements())
    if not smallest.shape.rank:
        smallest.numpy()
    for on_device in dtensor.unpack(smallest):
        tf.reshape(on_device, [-1])[:1].numpy()


_seen = set()


def new_functions() -> list[str]:
    """Return the names of TensorFlow's functions that came since the last call."""
    names = set(_compat.function_names())
    new = sorted(names - _seen)
    _seen.clear()
    _seen.update(names)
    return new
