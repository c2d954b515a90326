"""Functions compiled for the mesh."""

import contextlib
import re
from collections.abc import Callable

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from dtransformer import _compat
from dtransformer.parallel.mesh.axis_rules import relayout, relayout_with_gradient
from dtransformer.parallel.mesh.batch import put_replicated
from dtransformer.parallel.mesh.variable import packed, sharding_specs, unpacked
from dtransformer.parallel.runtime import job
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.shared_blocks import recording_block_calls
from dtransformer.parallel.weights.sharded_variable import get_local_shards

_OPERATION_PATTERN = re.compile(r"""['"]tf\.(\w+)['"]|(\w+)Op SPMD""")
_UNEVEN_PATTERN = re.compile(r"dimension size=(\d+) is not divisible by .* dimension=(\d+)")
_COMPILER_PHRASES = "layout propagation", "SPMD", "dtensor_graph_to_mlir_pass"


class MeshFunction:
    """Function of a network's variables, compiled to run on the mesh.

    Args:
        function: Function of nested DTensors that returns nested DTensors. Inside of it, the values
            of the variables are DTensors.
        network_variables: List of the Keras variables that the function reads. Values that it
            assigns to them are written back after each call.
        gradients: Whether the function computes gradients. Defaults to `False`.

    Call arguments:
        *args: Nested DTensors. See `mesh.batch`.
    """

    def __init__(
        self, function: Callable, network_variables: list[keras.Variable], gradients: bool = False
    ):
        self._function = function
        self._gradients = gradients
        self._variables = network_variables
        # DTensor needs static shapes, so each shape of a batch is compiled.
        self._traced = _compat.cache_by_shapes(tf.function(self._trace, autograph=False))
        self._is_new = False
        self._graph = None
        self._constants = {}  # Maps the id of a captured tensor to the tensor and its DTensor.
        self.compiled = []  # Names of TensorFlow's functions from the last compilation.
        self.calls = {}  # See `recording_block_calls`. From the last compilation.
        self.adds_losses = False  # Whether layers added losses in the last compilation.

    def _trace(self, weights, args):
        self._is_new = True
        self.calls = {}
        self._graph = tf.compat.v1.get_default_graph()
        mapping = list(zip(self._variables, weights))
        ranks = job.model_parallel_group().ranks
        # Functions in the computation may wait for other ranks.
        waiting = job.record_wait("a computation on the mesh", ranks)
        captures = _compat.replace_captures(self._replicate_captured)
        scope = keras.StatelessScope(mapping, collect_losses=True)
        with scope, self._on_mesh(), waiting, captures:
            results = self._function(*args)
        self.adds_losses = bool(scope.losses)
        updates = {}
        for i, variable in enumerate(self._variables):
            value = scope.get_current_value(variable)
            if value is not None and value is not weights[i]:
                updates[str(i)] = relayout(value, sharding_specs(variable))
        return results, updates

    def _replicate_captured(self, tensor):
        """Replicate a tensor captured by a layer. Scalars and strings stay as they are.

        Raises:
            RuntimeError: If the tensor is the handle of a `tf.Variable`, a generator or a lookup
                table.
        """
        if id(tensor) in self._constants:
            return self._constants[id(tensor)][1]
        if _compat.in_symbolic_scope():  # Keras only asks for shapes here.
            return tensor
        if tensor.dtype == "resource":
            raise RuntimeError(  # TensorFlow would replace a ValueError with another error.
                "A layer reads a `tf.Variable`, a `tf.random.Generator` or a lookup table, and each "
                "device of a mesh would have a separate one. Use `add_weight(trainable=False)`, "
                "`keras.Variable` or `keras.random`, or use one device per rank."
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
        calls = recording_block_calls(self.calls)
        repairs = _compat.repaired_operations(_replicate_with_gradient)
        with trace.on_mesh(), gradients, calls, repairs:
            yield

    def __call__(self, *args):
        """Run the function and return its results once every device has finished."""
        return self.run(self.packed(), *args)

    def packed(self) -> list[tf.Tensor]:
        """Return the variables as DTensors."""
        return [packed(variable) for variable in self._variables]

    def run(self, weights: list[tf.Tensor], *args, variables: list[keras.Variable] | None = None):
        """Run the function with the values of its variables.

        Args:
            weights: List of DTensors from `packed`.
            *args: See Call arguments.
            variables: List of the Keras variables that assigned values are written to. They must
                match the function's variables, which are the default.

        Returns:
            The results of the function.

        Raises:
            ValueError: If DTensor cannot compute an operation. The message has the operation and
                its name.
        """
        variables = self._variables if variables is None else variables
        try:
            results, updates = self._traced(weights, args)
        except tf.errors.OpError as error:
            message = _unsupported_message(error.message, self._graph)
            if message is None:
                raise
            raise ValueError(message) from None
        # Release the references, because updates in place would otherwise copy the weights.
        del weights
        wait(results)
        if self._is_new:
            self.compiled = new_functions()
            self._is_new = False
        for i, value in updates.items():
            variable = variables[int(i)]
            shards = get_local_shards([variable])
            for shard, new_shard in zip(shards, unpacked(variable, value)):
                shard.assign(new_shard)
        return results


def _replicate_with_gradient(x):
    return relayout_with_gradient(x, (None,) * x.shape.rank)


def _unsupported_message(message, graph):
    """Return an error message for an operation that DTensor cannot compile, or `None`."""
    match = _OPERATION_PATTERN.search(message)
    if match is None or not any(phrase in message for phrase in _COMPILER_PHRASES):
        return None
    if uneven := _UNEVEN_PATTERN.search(message):
        size, shards = uneven.groups()
        return (
            f"A layer computes a tensor with a dimension of size {size}, which DTensor cannot split "
            f"into {shards} shards. Keep all rows of the batch in one tensor, or set "
            "`model_parallel=1` and use one device per rank."
        )
    kind = match[1] or match[2]
    names = [operation.name for operation in graph.get_operations() if operation.type == kind]
    name = names[0] if names else "A layer of the network"
    if "inconsistent with the provided layout" in message:
        fix = (
            "with these shards. Set `model_parallel` to a divisor of all sizes that the layer splits, "
            "such as its key and value heads"
        )
    else:
        fix = "on a mesh. Use another layer (an LSTM or GRU with `unroll=True` has no loop)"
    return (
        f"{name} computes {kind}, which DTensor cannot compute {fix}, or set `model_parallel=1` and "
        "use one device per rank."
    )


def wait(results):
    """Wait until every local device has computed nested DTensors.

    DTensor runs asynchronously. Updating weights before it has finished would change its inputs.
    All results of a function arrive together, so this reads an element of the smallest one.
    `unpack` also waits, but blocks all other Python threads, including the watchdog. Reading a
    scalar does not.
    """
    tensors = [result for result in tf.nest.flatten(results) if result is not None]
    smallest = min(tensors, key=lambda result: result.shape.num_elements())
    if not smallest.shape.rank:
        smallest.numpy()
    for on_device in dtensor.unpack(smallest):
        tf.reshape(on_device, [-1])[:1].numpy()


_known_functions = set()


def new_functions() -> list[str]:
    """Return the names of TensorFlow functions created since the last call."""
    names = set(_compat.function_names())
    new = sorted(names - _known_functions)
    _known_functions.clear()
    _known_functions.update(names)
    return new
