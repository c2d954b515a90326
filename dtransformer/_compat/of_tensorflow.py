"""Private names of TensorFlow, DTensor's among them."""

import collections
import contextlib
import functools
import gc
import pathlib
import re
import sys
from collections.abc import Callable

import keras
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla
from tensorflow.dtensor.python import api
from tensorflow.python import _pywrap_dtensor_device
from tensorflow.python.eager import context, core, record
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import error_interpolation
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops import control_flow_util

# Where Python is while TensorFlow runs a function, or waits for what one computes.
_RUNS_FUNCTIONS = ("tensorflow/python/eager/", "tensorflow/python/framework/ops.py")
_LIBRARIES = tuple(str(pathlib.Path(package.__file__).parent) for package in (tf, keras))


def with_cardinality(dataset: tf.data.Dataset, number: int) -> tf.data.Dataset:
    """Return a dataset that says it has a number of batches, and may end before.

    Keras counts an epoch by it; without it the first epoch's number would hold for all, and
    `assert_cardinality` stops an epoch that begins in its midst. Unnecessary if Keras took the
    number of steps from each epoch.
    """
    dataset.cardinality = lambda: tf.constant(number, tf.int64)
    return dataset


def expect_many_traces(function):
    """Return a `tf.function` that may be traced often without a warning.

    Each name of a collective, and each shape on the mesh, is a trace that is meant. Unnecessary if
    `tf.function` had an option for it.
    """
    function._omit_frequent_tracing_warning = True
    return function


def is_on_a_tape(tensors: list) -> bool:
    """Return whether a `tf.GradientTape` watches one of the tensors.

    The ranks of a collective have to agree on it. Unnecessary if a tape said what it watches.
    """
    return record.should_record_backprop(tensors)


def is_compiled_by_xla() -> bool:
    """Return whether what is traced here is compiled with XLA. Unnecessary if a graph said so."""
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def called_by_shapes(function) -> Callable:
    """Return a `tf.function` that is called in a fraction of the time once it is.

    Arguments are not compared with what it was traced for, but for shapes and types. Unnecessary if
    TensorFlow bound them without a look at each of them, and at each twice.

    Args:
        function: a `tf.function` of a list of tensors, whose shapes and types are the same in every
            call, and of other arguments: nested tensors and Nones. It may be traced often, as
            `expect_many_traces` has it.
    """
    concrete = {}  # shapes and types of the others -> a function
    expect_many_traces(function)  # of calls it sees the first ones alone

    def call(same, *args):
        if tf.config.functions_run_eagerly():
            return function(same, *args)
        key = repr(tf.nest.map_structure(lambda x: x if x is None else (x.shape, x.dtype), args))
        if key in concrete:
            flat = [x for x in tf.nest.flatten([same, args]) if x is not None]
            return concrete[key]._call_flat(flat, concrete[key].captured_inputs)
        results = function(same, *args)
        concrete[key] = function.get_concrete_function(same, *args)  # as just called
        return results

    return call


def call_of_function(thread: int) -> tuple | None:
    """Return what tells a thread's call of a TensorFlow function from others, and where it is.

    None where it is in no such call. Unnecessary if a function could say that it waits.

    Args:
        thread: its number.
    """
    frame = sys._current_frames().get(thread)
    if frame is None or not any(part in frame.f_code.co_filename for part in _RUNS_FUNCTIONS):
        return None
    key = id(frame), frame.f_lasti
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    if frame is None:
        return key, "nowhere"
    path = "/".join(pathlib.Path(frame.f_code.co_filename).parts[-2:])
    return key, f"{path}, line {frame.f_lineno}"


def function_names() -> list:
    """Return the names of all functions that TensorFlow has at present.

    Those that DTensor has lowered for the devices hold what it really sends. Unnecessary if
    DTensor told its collectives.
    """
    return context.context().list_function_names()


def function_def(name: str):
    """Return the `FunctionDef` of one of `function_names`.

    Raises:
        ValueError or tf.errors.NotFoundError: there is none any more.
    """
    return context.context().get_function_def(name)


@contextlib.contextmanager
def graphs_collected():
    """Give a list that has, after the `with` block, the graphs of functions first run in it, optimized.

    XLA's clusters are in these alone. Unnecessary if TensorFlow told what it has put into clusters.
    """
    graphs = []
    context.context().enable_graph_collection()
    try:
        yield graphs
        functions = context.context().export_run_metadata().function_graphs
        graphs += [one.post_optimization_graph for one in functions]
    finally:
        context.context().disable_graph_collection()


def graph_of_function(graph: tf.Graph, name: str) -> tf.Graph | None:
    """Return the graph of a function that a graph calls, with shapes; None if it is not known.

    `as_graph_def` has the functions without the shapes of what they compute. Unnecessary if
    it had them.
    """
    return getattr(graph._get_function(name), "graph", None)


def with_gradient(compute: Callable, args: list[tf.Tensor]):
    """Return what `tf.custom_gradient(compute)(*args)` does, in a graph.

    There `tf.custom_gradient` makes an operation of which the arguments are results, too.
    TensorFlow wants a gradient of each, zeros like it: a function whose gradient is taken outside
    of it keeps all arguments until then. This one has the results alone. Unnecessary if
    `tf.custom_gradient` made no zeros.

    Args:
        compute: a function of the arguments that returns nested tensors, and a function of their
            gradients that returns those of the arguments.
        args: list of tensors.

    Raises:
        TypeError: it reads a variable that is trained: its gradient would be lost.
    """
    with record.VariableWatcher() as watcher:
        result, gradient = compute(*args)
    if watcher.watched_variables():
        names = ", ".join(variable.name for variable in watcher.watched_variables())
        raise TypeError(
            f"a function with a gradient of its own reads {names}, whose gradient would be lost: "
            "give it the value as an argument"
        )
    results = tf.nest.flatten(result)
    tensors = [*results, *args]

    def backward(*upstream):
        return [*[None] * len(results), *tf.nest.flatten(gradient(*upstream))]

    graph, of_operation = tf.compat.v1.get_default_graph(), lambda _, *dys: backward(*dys)
    # Not by a registered name: all that is registered stays, with its graph.
    with graph._override_gradient_function({"PartitionedCall": of_operation}):
        with record.stop_recording():
            first = tf.raw_ops.PartitionedCall(
                args=tensors,
                Tout=[x.dtype for x in results],
                f=_first_of(len(results), tuple((x.shape, x.dtype) for x in tensors)),
            )
    for x, like in zip(first, results):
        x.set_shape(like.shape)
    record.record_operation("with_gradient", first, tensors, backward)
    return tf.nest.pack_sequence_as(result, first)


@functools.cache
def _first_of(number, specs):
    """Return TensorFlow's function that returns the first ones of its arguments."""
    with tf.init_scope():
        function = tf.function(lambda *tensors: list(tensors[:number]), autograph=False)
        return function.get_concrete_function(*(tf.TensorSpec(*spec) for spec in specs))


def call_stablehlo(module: str, operands: list, results: list, target: str) -> list[tf.Tensor]:
    """Return the results of a StableHLO module, in a function that XLA compiles.

    Unnecessary if TensorFlow took custom calls of XLA's, or had an operation of cuDNN's attention.

    Args:
        module: its text; the first argument of its main function is a platform's number.
        operands: list of tensors, the others.
        results: list of (shape, type) of each result.
        target: name of the custom call in it.
    """
    shapes, types = zip(*results)
    return xla.call_module(
        operands,
        version=9,
        module=module.encode(),
        Tout=list(types),
        Sout=[list(shape) for shape in shapes],
        platforms=["CPU", "CUDA"],
        disabled_checks=[f"custom_call:{target}"],  # that old programs can be run by new versions
    )


def barrier(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Return the same tensors, of which none is used before all are known, in what XLA compiles.

    It computes nothing across, nor takes what was computed from the tensors themselves. Unnecessary
    if it respected control dependencies.
    """
    return xla.optimization_barrier(*tensors)


def constants_are_copied() -> contextlib.AbstractContextManager:
    """Inside the `with` block functions of gradients that are traced have constants of their own.

    TensorFlow hands the forward pass' constants to them, such as the order of the dimensions
    of a transpose, and DTensor has to know them when it compiles. Unnecessary if DTensor knew
    the constants that a function is given.
    """

    def copied(capture, graph, tensor, name=None, shape=None):
        if tf.is_symbolic_tensor(tensor) and tensor.graph is not graph:
            if tensor.op.type == "Const":
                with graph.as_default(), tf.control_dependencies(None):
                    return tf.constant(tf.get_static_value(tensor), tensor.dtype)
        return capture(graph, tensor, name, shape)

    return _captures_by(copied)


def captures_replaced(replace: Callable) -> contextlib.AbstractContextManager:
    """Inside the `with` block what traced functions read of eager tensors is replace(tensor).

    DTensor wants all of them on the mesh, but for scalars. Unnecessary if it put them there.
    """

    def replaced(capture, graph, tensor, name=None, shape=None):
        tensor = tensor if tf.is_symbolic_tensor(tensor) else replace(tensor)
        return capture(graph, tensor, name, shape)

    return _captures_by(replaced)


@contextlib.contextmanager
def _captures_by(function):
    """Inside the `with` block functions capture by another function, of their own way and arguments."""
    capture = FuncGraph.capture
    FuncGraph.capture = lambda *args, **kwargs: function(capture, *args, **kwargs)
    try:
        yield
    finally:
        FuncGraph.capture = capture


def packer(layout) -> Callable:
    """Return a function that packs a list of dense tensors as `dtensor.pack` does, eagerly.

    A step packs every weight, and `dtensor.pack` looks the mesh up and writes the layout as text each
    time, which takes four times as long as the rest. Unnecessary if it remembered them.

    Args:
        layout: a `dtensor.Layout`.
    """
    text, is_sparse = layout.to_string(), False
    api._dtensor_device()._register_mesh(layout.mesh)

    def pack(tensors):
        handle, device = context.context()._handle, api._dtensor_device()._device_info
        try:
            return _pywrap_dtensor_device.Pack(handle, tensors, text, device, is_sparse)
        except core._NotOkStatusException as error:
            raise core._status_to_exception(error) from None

    return pack


# TensorFlow: its context, which DTensor starts anew, and its errors.


def read_long_errors() -> None:
    """Let TensorFlow read an error in a time that grows with its length, not with the square.

    DTensor's errors hold a whole function, which would take it many minutes. Unnecessary if its
    pattern looked for what is before a tag where the last one ends alone.
    """
    pattern = error_interpolation._INTERPOLATION_REGEX
    pattern = pattern.replace("(?P<sep>", r"(?P<sep>(?:\A|(?<=}}))", 1)
    error_interpolation._INTERPOLATION_PATTERN = re.compile(pattern, re.DOTALL)


def forget_context() -> None:
    """Drop what TensorFlow remembers of a context beyond its end: devices and functions.

    Functions of the old context that are deleted later do so without a complaint. Unnecessary
    if `initialize_accelerator_system(experimental_reset_context=True)` did so.
    """
    context._device_parsing_cache.clear()
    _first_of.cache_clear()
    gc.collect()
    counts = atomic_function.RUNTIME_FUNCTION_REFS
    never_zero = lambda: 1 << 40
    atomic_function.RUNTIME_FUNCTION_REFS = collections.defaultdict(never_zero, counts)


def end_context() -> None:
    """End TensorFlow's context, and what was made in it; the next one may have other devices.

    What was set of devices and threads stays until it is set anew. Unnecessary if devices could be
    set after the first operation.
    """
    forget_context()
    context.context().ensure_uninitialized()


def forget_dtensor_device() -> None:
    """Drop DTensor's device, which outlives the context that it belongs to.

    Unnecessary if `shutdown_accelerator_system` did so.
    """
    api._reset()
