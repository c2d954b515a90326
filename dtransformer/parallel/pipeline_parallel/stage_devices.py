"""Executors of a pipeline stage: on a single device or on a mesh.

Both compile functions of model chunks and convert tensors between stages to this rank's shards.
"""

import functools
import types
from collections.abc import Callable

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.mesh.axis_rules import (
    activation_specs,
    relayout_with_gradient,
    replicate,
)
from dtransformer.parallel.mesh.batch import (
    local_value,
    put_batch,
    put_replicated,
    put_scalars,
    put_sharded,
)
from dtransformer.parallel.mesh.function import MeshFunction, wait
from dtransformer.parallel.mesh.variable import LocalShards, packed, sharding_specs, unpacked
from dtransformer.parallel.pipeline_parallel.dataflow import CrossStageTensor, Dataflow
from dtransformer.parallel.runtime import job
from dtransformer.parallel.runtime.devices import takes_gpu_branch
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.weights.weight import trained_value


def stage_devices() -> "LocalExecutor":
    """Return the executor of this rank's stage."""
    return LocalExecutor() if job.mesh() is None else MeshExecutor()


class LocalExecutor:
    """Executor on the single device of this rank. Tensors are not converted.

    Attributes:
        compiles_whole_graphs: Whether compilation time grows faster than the size of a function.
        measures: Whether functions wait for GPUs to finish, to measure true times. Otherwise they
            do not wait, because transfers follow in the order of the device.
    """

    compiles_whole_graphs = measures = False

    def compile(
        self, function: Callable, trained: list[keras.Variable], constants: list[keras.Variable]
    ):
        """Compile a function of a chunk.

        Args:
            function: Function to compile.
            trained: List of the trained weights that the function reads.
            constants: List of the other weights that the function reads.

        Returns:
            A function of `(weights, *args)`. `weights` is the result of its method `weights()`: the
            values for gradients.
        """
        return _Function(function, trained, self.wait)

    def cache_key(self, dataflow: Dataflow):
        """Return the names of a `Dataflow` as cache key of compiled functions. Shapes may vary."""
        return tuple((x.name, x.first_chunk, x.last_chunk) for x in dataflow.tensors)

    def put_batch(self, inputs, labels, sample_weight):
        """Convert a batch for compiled functions."""
        return inputs, labels, sample_weight

    # Convert nested inputs, or numbers that change between steps, for compiled functions.
    # `replicate` lays out nested results inside a function for `local`, which converts them to
    # local tensors.
    put_sharded = put_scalars = replicate = local = staticmethod(lambda value: value)
    # Lay out the value of a `CrossStageTensor` inside a function, split a list of values into this
    # rank's shards, and join shards to values.
    relayout = shards = from_shards = staticmethod(lambda tensors, value: value)

    def put_loss_gradient(self):
        """Return the gradient of a loss with respect to itself."""
        return tf.ones([])

    def unpack_scalars(self, put, shape):
        """Undo `put_scalars` inside a compiled function."""
        return put

    def shard_specs(self, tensors: list[CrossStageTensor]) -> list[tuple]:
        """Return the `(shape, dtype)` of this rank's shards of `CrossStageTensor` objects."""
        return [(tensor.shape, tensor.dtype) for tensor in tensors]

    def gradient_shards(self, weight: keras.Variable, gradient) -> list[tf.Tensor]:
        """Return this rank's shards of a gradient, in the order of the weight's shards."""
        return [tf.convert_to_tensor(gradient)]

    def wait(self, results):
        """Wait for nested results on GPUs if times are measured."""
        if self.measures and takes_gpu_branch():
            tf.test.experimental.sync_devices()


class _Function:
    """Compiled function that reads its weights itself.

    Attributes:
        trained: List of the trained Keras variables.
        compilation: Object with the following attributes: this one, or the function of an equal
            chunk.
        is_new: Whether it was compiled since this was last set to False. Only on a mesh.
        compiled: Names of TensorFlow's functions from the last compilation. Only on a mesh.
        calls: See `recording_block_calls`, from the last compilation. Only on a mesh.
    """

    is_new = False
    compiled = ()
    calls = types.MappingProxyType({})

    def __init__(self, function, trained, wait):
        self.trained = trained
        self._wait = wait
        self.compilation = self
        self._function = tf.function(function, reduce_retracing=True, autograph=False)
        # TensorFlow would add up the traces of all chunks and warn about one function.
        _compat.expect_many_traces(self._function)

    def weights(self):
        """Return the values of the trained weights, for gradients."""
        return [trained_value(weight) for weight in self.trained]

    def __call__(self, weights, *args):
        results = self._function(*args)
        self._wait(results)
        return results


class MeshExecutor(LocalExecutor):
    """Executor on the mesh of a stage. A rank sends and reduces the shards on its devices."""

    compiles_whole_graphs = True

    def __init__(self):
        # Cache the local shards of a `CrossStageTensor`.
        self._local_shards = functools.cache(lambda x: LocalShards(x.shape, self._specs(x)))

    def compile(self, function, trained, constants):
        return _FunctionOnMesh(function, trained, constants)

    def cache_key(self, dataflow):
        return dataflow.tensors, repr(dataflow.outputs)

    put_batch = staticmethod(put_batch)
    put_sharded = staticmethod(put_sharded)
    put_scalars = staticmethod(put_scalars)
    replicate = staticmethod(replicate)
    gradient_shards = staticmethod(unpacked)
    wait = staticmethod(wait)

    def put_loss_gradient(self):
        return put_replicated(tf.ones([]))

    def unpack_scalars(self, put, shape):
        return tf.reshape(put[: tf.TensorShape(shape).num_elements()], shape)

    def relayout(self, tensor, x):
        return relayout_with_gradient(x, self._specs(tensor))

    def shard_specs(self, tensors):
        return [(shape, x.dtype) for x in tensors for shape in self._local_shards(x).shapes]

    def shards(self, tensors, values):
        pairs = zip(tensors, values, strict=True)
        return [shard for tensor, x in pairs for shard in self._local_shards(tensor).unpack(x)]

    def from_shards(self, tensors, shards):
        remaining = iter(shards)
        packed = []
        for tensor in tensors:
            local_shards = self._local_shards(tensor)
            values = [next(remaining) for _ in local_shards.distinct]
            packed.append(local_shards.pack(values))
        return packed

    def local(self, results):
        return tf.nest.map_structure(lambda x: None if x is None else local_value(x), results)

    @staticmethod
    def _specs(tensor):
        """Shard rows as in a batch, and the second dimension as a sequence."""
        axes = ("batch", "length", *[None] * len(tensor.shape))[: len(tensor.shape)]
        return activation_specs(axes, tensor.shape)


class _FunctionOnMesh(MeshFunction):
    """Function on the mesh whose gradients are computed outside.

    Called in the same way as `_Function`.
    """

    is_new = False

    def __init__(self, function, trained, constants):
        super().__init__(function, [*trained, *constants], gradients=True)
        self.trained = trained
        self._other_weights = constants
        self.compilation = self

    @staticmethod
    def layer_name(name: str) -> str:
        """Return an operation name of the compiled function for reports."""
        return name

    def weights(self, trained=None):
        """Return the trained weights, or equally shaped ones, as DTensors."""
        return [packed(weight) for weight in (self.trained if trained is None else trained)]

    def __call__(self, weights, *args):
        return self.call(weights, self.trained, self._other_weights, *args)

    def call(self, weights, trained, constants, *args):
        """Call the function with other variables of the same shapes. See `shared_chunks`."""
        # Gradients are traced when the function is called.
        with trace.on_mesh(), _compat.copy_constants():
            variables = [*trained, *constants]
            return self.run([*weights, *map(packed, constants)], *args, variables=variables)

    def put(self, numbers):
        """Convert a list of integers to an argument."""
        return put_scalars(tf.constant(numbers or [0], "int32"))

    def _trace(self, weights, args):
        self.is_new = True
        # This gives the gradient of a weight the layout of the weight.
        trained = [
            relayout_with_gradient(w, sharding_specs(v)) for w, v in zip(weights, self.trained)
        ]
        return super()._trace([*trained, *weights[len(trained) :]], args)
