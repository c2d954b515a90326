"""Where a pipeline stage computes: on this rank's device, or on its island's mesh.

Both compile functions of a part of the network, and turn what passes between stages into
tensors that messages carry.
"""

import contextlib

import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from dtransformer.parallel import job, trace
from dtransformer.parallel.axis_rules import activation_specs
from dtransformer.parallel.devices import device_type
from dtransformer.parallel.dtensor.batch import (
    local_value,
    put_batch,
    put_numbers,
    put_replicated,
    put_sharded,
)
from dtransformer.parallel.dtensor.function import MeshFunction, wait
from dtransformer.parallel.dtensor.layouts import relayout, replicate
from dtransformer.parallel.dtensor.variable import LocalShards, specs_of, unpacked
from dtransformer.parallel.pipeline import placement
from dtransformer.parallel.same_batch import check_mesh_batch
from dtransformer.parallel.sharded_variable import trained_value


def stage_devices():
    """Return where this rank's stage computes."""
    return OneDevice() if job.mesh() is None else Mesh()


class OneDevice:
    """The rank's only device: tensors are what they are."""

    def compile(self, function, network, part):
        """Return the function, compiled, of a part's weights and other arguments.

        Its first argument is what `weights()` of it returns: what gradients are taken of.
        """
        return _Function(function, placement.weights_of(network, part))

    def shapes(self, plan):
        """Return what of a `StagePlan` a function is compiled for: names, as shapes may vary."""
        return tuple((value.name, value.first, value.last) for value in plan.values)

    def check(self, batch):
        """Check nested tensors of a batch that is about to be computed."""

    def put_batch(self, inputs, labels, sample_weight):
        """Return a batch as compiled functions take it."""
        return inputs, labels, sample_weight

    def put_rows(self, batch):
        """Return nested tensors of rows as compiled functions take them."""
        return batch

    def put_numbers(self, numbers):
        """Return numbers that differ from step to step as compiled functions take them."""
        return numbers

    def put_one(self):
        """Return the gradient of a loss."""
        return tf.ones([])

    def numbers(self, put, shape):
        """Return what `put_numbers` was given, inside of a compiled function."""
        return put

    def pin(self, value, x):
        """Lay a tensor out as messages of a `Value` have it, inside of a compiled function."""
        return x

    def pin_whole(self, tensors):
        """Lay nested results out as `result` takes them, inside of a compiled function."""
        return tensors

    def message_specs(self, values):
        """Return (shape, dtype) of each tensor of the message of a list of `Value`s."""
        return [(value.shape, value.dtype) for value in values]

    def to_message(self, values, tensors):
        """Return the tensors of the message of a list of `Value`s."""
        return tensors

    def from_message(self, values, parts):
        """Return the tensors that the message of a list of `Value`s stands for."""
        return parts

    def shards_of(self, weight, gradient):
        """Return this rank's part of a gradient, in the order of the weight's shards."""
        return [tf.convert_to_tensor(gradient)]

    def result(self, tensors):
        """Return nested results, which every device has, as tensors of this rank; None is None."""
        return tensors

    def wait(self, results):
        """Wait until nested results are computed."""
        _wait_for_gpus()


class _Function:
    is_new, compiled = False, ()  # as a MeshFunction's

    def __init__(self, function, trained):
        self.trained = trained
        self._function = tf.function(function, reduce_retracing=True, autograph=False)

    def weights(self):
        """Return what gradients are taken of: sources of the weights."""
        return [trained_value(weight) for weight in self.trained]

    def __call__(self, weights, *args):
        results = self._function(*args)
        _wait_for_gpus()
        return results


def _wait_for_gpus():
    if device_type() == "GPU":
        tf.test.experimental.sync_devices()


class Mesh(OneDevice):
    """The island's mesh: a rank sends, and adds up, the slices that its own devices hold."""

    def compile(self, function, network, part):
        return _FunctionOnMesh(function, placement.weights_of(network, part))

    def shapes(self, plan):
        return plan.values, repr(plan.outputs)

    def check(self, batch):
        check_mesh_batch(batch)

    def put_batch(self, inputs, labels, sample_weight):
        return put_batch(inputs, labels, sample_weight)

    def put_rows(self, batch):
        return put_sharded(batch)

    def put_numbers(self, numbers):
        return put_numbers(numbers)

    def put_one(self):
        return put_replicated(tf.ones([]))

    def numbers(self, put, shape):
        return tf.reshape(put[: tf.TensorShape(shape).num_elements()], shape)

    def pin(self, value, x):
        return relayout(x, self._specs(value))  # the gradient is laid out alike

    def pin_whole(self, tensors):
        return replicate(tensors)

    def message_specs(self, values):
        return [(shape, value.dtype) for value in values for shape in self._slices(value).shapes]

    def to_message(self, values, tensors):
        pairs = zip(values, tensors, strict=True)
        return [part for value, x in pairs for part in self._slices(value).unpack(x)]

    def from_message(self, values, parts):
        parts, all_slices = iter(parts), [self._slices(value) for value in values]
        return [slices.pack([next(parts) for _ in slices.distinct]) for slices in all_slices]

    def shards_of(self, weight, gradient):
        return unpacked(weight, gradient)

    def result(self, tensors):
        return tf.nest.map_structure(lambda x: None if x is None else local_value(x), tensors)

    def wait(self, results):
        wait(results)

    @staticmethod
    def _specs(value):
        """Rows are cut as those of a batch, the second dimension as a sequence."""
        axes = ("batch", "length", *[None] * len(value.shape))[: len(value.shape)]
        return activation_specs(axes, value.shape)

    def _slices(self, value):
        return LocalShards(value.shape, self._specs(value))


class _FunctionOnMesh(MeshFunction):
    """A function on the mesh whose gradients are taken outside of it."""

    is_new = False

    def __init__(self, function, trained):
        super().__init__(function, trained, gradients=True)
        self.trained = trained

    def weights(self):
        """Return the weights as DTensors."""
        return self.packed()

    def __call__(self, weights, *args):
        # Gradients are traced when the function is called.
        with trace.scope(on_mesh=True), _constants_are_copied():
            return self.run(weights, *args)

    def _trace(self, weights, args):
        self.is_new = True
        # The gradient of a pinned weight is laid out alike.
        weights = [relayout(w, specs_of(v)) for w, v in zip(weights, self.trained)]
        return super()._trace(weights, args)


@contextlib.contextmanager
def _constants_are_copied():
    """Functions of gradients that are traced in the `with` block have constants of their own.

    TensorFlow hands the forward pass' constants to them, such as the order of the dimensions
    of a transpose, and DTensor has to know them when it compiles.
    """
    capture = FuncGraph.capture

    def copied(graph, tensor, name=None, shape=None):
        if tf.is_symbolic_tensor(tensor) and tensor.graph is not graph:
            if tensor.op.type == "Const":
                with graph.as_default(), tf.control_dependencies(None):
                    return tf.constant(tf.get_static_value(tensor), tensor.dtype)
        return capture(graph, tensor, name, shape)

    FuncGraph.capture = copied
    try:
        yield
    finally:
        FuncGraph.capture = capture
