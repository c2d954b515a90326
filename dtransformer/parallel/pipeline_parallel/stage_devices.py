"""Executors of a pipeline stage: on this rank's device, or on its mesh.

Both compile functions of a model chunk, and know which shards of what passes between stages
this rank holds, sends and receives.
"""

import functools
import types
from collections.abc import Callable

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.mesh.axis_rules import activation_specs, laid_out, replicate
from dtransformer.parallel.mesh.batch import (
    local_value,
    put_batch,
    put_numbers,
    put_replicated,
    put_sharded,
)
from dtransformer.parallel.mesh.function import MeshFunction, wait
from dtransformer.parallel.mesh.variable import LocalShards, packed, sharding_specs, unpacked
from dtransformer.parallel.pipeline_parallel.dataflow import CrossStageTensor, Dataflow
from dtransformer.parallel.runtime import job
from dtransformer.parallel.runtime.devices import takes_gpu_branch
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.weights.sharded_variable import trained_value


def stage_devices() -> "LocalExecutor":
    """Return where this rank's stage computes."""
    return LocalExecutor() if job.mesh() is None else MeshExecutor()


class LocalExecutor:
    """The rank's only device: tensors are what they are.

    Attributes:
        compiles_whole_graphs: whether the time of compiling a function grows faster than its size.
        measures: whether functions wait on GPUs for what they compute, so that their times are
            true. Nothing else needs that: what a rank sends follows on the device.
    """

    compiles_whole_graphs = measures = False

    def compile(
        self, function: Callable, trained: list[keras.Variable], others: list[keras.Variable]
    ):
        """Return a function, compiled, of weights that are trained and of other arguments.

        Its first argument is what `weights()` of it returns: what gradients are taken of. The
        others are weights that it reads, too.
        """
        return _Function(function, trained, self.wait)

    def cache_key(self, dataflow: Dataflow):
        """Return what of a `Dataflow` a function is compiled for: names, as shapes may vary."""
        return tuple((x.name, x.first_chunk, x.last_chunk) for x in dataflow.tensors)

    def put_batch(self, inputs, labels, sample_weight):
        """Return a batch as compiled functions take it."""
        return inputs, labels, sample_weight

    # Nested inputs of a batch, or numbers that differ from step to step, as compiled functions take
    # them; nested results as `local` takes them, laid out in a function, and as tensors of this rank.
    put_sharded = put_numbers = replicate = local = staticmethod(lambda given: given)
    # Of `CrossStageTensor`s: a value as it passes, laid out in a function; this rank's shards of the
    # values of a list, and the values from shards.
    relayout = shards = from_shards = staticmethod(lambda tensors, given: given)

    def put_one(self):
        """Return the gradient of a loss."""
        return tf.ones([])

    def numbers(self, put, shape):
        """Return what `put_numbers` was given, inside of a compiled function."""
        return put

    def shard_specs(self, tensors: list[CrossStageTensor]) -> list[tuple]:
        """Return (shape, dtype) of each of this rank's shards of `CrossStageTensor`s."""
        return [(tensor.shape, tensor.dtype) for tensor in tensors]

    def gradient_shards(self, weight: keras.Variable, gradient) -> list[tf.Tensor]:
        """Return this rank's shards of a gradient, in the order of the weight's."""
        return [tf.convert_to_tensor(gradient)]

    def wait(self, results):
        """Wait until nested results are computed, where that is measured."""
        if self.measures and takes_gpu_branch():
            tf.test.experimental.sync_devices()


class _Function:
    """A compiled function that reads its weights by itself.

    Attributes:
        trained: list of the Keras variables that gradients are taken of.
        compilation: what has the following attributes: itself, or of a chunk that shares another's
            function that one.
        is_new: whether it was compiled since this was last set to False; on a mesh alone.
        compiled: names of TensorFlow's functions, of the last compilation; on a mesh alone.
        calls: of the last compilation, see `recording_block_calls`; on a mesh alone.
    """

    is_new, compiled, calls = False, (), types.MappingProxyType({})

    def __init__(self, function, trained, wait):
        self.trained, self._wait, self.compilation = trained, wait, self
        self._function = tf.function(function, reduce_retracing=True, autograph=False)
        # TensorFlow would count the traces of all chunks as those of one function.
        _compat.expect_many_traces(self._function)

    def weights(self):
        """Return what gradients are taken of."""
        return [trained_value(weight) for weight in self.trained]

    def __call__(self, weights, *args):
        results = self._function(*args)
        self._wait(results)
        return results


class MeshExecutor(LocalExecutor):
    """The stage's mesh: a rank sends, and adds up, the shards that its own devices hold."""

    compiles_whole_graphs = True

    def __init__(self):
        # What this rank holds of a `CrossStageTensor`, found out once.
        self._held = functools.cache(lambda x: LocalShards(x.shape, self._specs(x)))

    def compile(self, function, trained, others):
        return _FunctionOnMesh(function, trained, others)

    def cache_key(self, dataflow):
        return dataflow.tensors, repr(dataflow.outputs)

    put_batch, put_sharded = staticmethod(put_batch), staticmethod(put_sharded)
    put_numbers, replicate = staticmethod(put_numbers), staticmethod(replicate)
    gradient_shards, wait = staticmethod(unpacked), staticmethod(wait)

    def put_one(self):
        return put_replicated(tf.ones([]))

    def numbers(self, put, shape):
        return tf.reshape(put[: tf.TensorShape(shape).num_elements()], shape)

    def relayout(self, tensor, x):
        return laid_out(x, self._specs(tensor))

    def shard_specs(self, tensors):
        return [(shape, x.dtype) for x in tensors for shape in self._held(x).shapes]

    def shards(self, tensors, values):
        pairs = zip(tensors, values, strict=True)
        return [shard for tensor, x in pairs for shard in self._held(tensor).unpack(x)]

    def from_shards(self, tensors, shards):
        shards, all_held = iter(shards), [self._held(tensor) for tensor in tensors]
        return [held.pack([next(shards) for _ in held.distinct]) for held in all_held]

    def local(self, results):
        return tf.nest.map_structure(lambda x: None if x is None else local_value(x), results)

    @staticmethod
    def _specs(tensor):
        """Rows are sharded as those of a batch, the second dimension as a sequence."""
        axes = ("batch", "length", *[None] * len(tensor.shape))[: len(tensor.shape)]
        return activation_specs(axes, tensor.shape)


class _FunctionOnMesh(MeshFunction):
    """A function on the mesh whose gradients are taken outside of it; called as `_Function`."""

    is_new = False

    def __init__(self, function, trained, others):
        super().__init__(function, [*trained, *others], gradients=True)
        self.trained, self._others, self.compilation = trained, others, self

    @staticmethod
    def layer_name(name: str) -> str:
        """Return a name in the compiled function as it is told."""
        return name

    def weights(self, trained=None):
        """Return the trained weights as DTensors, or others that are like them."""
        return [packed(weight) for weight in (self.trained if trained is None else trained)]

    def __call__(self, weights, *args):
        return self.call(weights, self.trained, self._others, *args)

    def call(self, weights, trained, others, *args):
        """As a call, with values of other variables that are like its own, see `shared_chunks`."""
        # Gradients are traced when the function is called.
        with trace.on_mesh(), _compat.constants_are_copied():
            variables = [*trained, *others]
            return self.run([*weights, *map(packed, others)], *args, variables=variables)

    def put(self, numbers):
        """Return a list of ints as an argument."""
        return put_numbers(tf.constant(numbers or [0], "int32"))

    def _trace(self, weights, args):
        self.is_new = True
        # The gradient of a weight is laid out as the weight is here.
        trained = [laid_out(w, sharding_specs(v)) for w, v in zip(weights, self.trained)]
        return super()._trace([*trained, *weights[len(trained) :]], args)
