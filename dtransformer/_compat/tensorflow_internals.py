"""Private names of TensorFlow, including DTensor."""

import collections
import contextlib
import faulthandler
import functools
import gc
import os
import pathlib
import re
import threading
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

# Python's frames are in these files while TensorFlow runs a function or waits for its result.
_RUNS_FUNCTIONS = ("tensorflow/python/eager/", "tensorflow/python/framework/ops.py")
_LIBRARIES = tuple(str(pathlib.Path(package.__file__).parent) for package in (tf, keras))


def with_cardinality(dataset: tf.data.Dataset, count: int) -> tf.data.Dataset:
    """Return a dataset with a given cardinality that may still end earlier.

    Keras counts an epoch's steps by it. Without it, the count of the first epoch would apply to
    all. `assert_cardinality` fails for an epoch that resumes in the middle. Unnecessary if Keras
    took the number of steps from each epoch.
    """

    def cardinality():
        return tf.constant(count, tf.int64)

    dataset.cardinality = cardinality
    return dataset


def expect_many_traces(function):
    """Disable the retracing warning of a `tf.function` and return it.

    Each name of a collective and each shape on the mesh needs a trace. Unnecessary if `tf.function`
    had an option for this.
    """
    function._omit_frequent_tracing_warning = True
    return function


def is_on_a_tape(tensors: list) -> bool:
    """Return whether a `tf.GradientTape` watches one of the tensors.

    All ranks of a collective must agree on this. Unnecessary if a tape could report it.
    """
    return record.should_record_backprop(tensors)


def without_tapes() -> contextlib.AbstractContextManager:
    """Record nothing on gradient tapes in the `with` block.

    Nested tapes would add outputs to called functions. Unnecessary if a tape's `stop_recording`
    applied to all tapes.
    """
    return record.stop_recording()


def is_compiled_by_xla() -> bool:
    """Return whether XLA compiles the code being traced. Unnecessary if a graph reported it."""
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def cache_by_shapes(function) -> Callable:
    """Return a `tf.function` with much faster calls after the first one.

    Calls select the trace by shapes and dtypes only. `tf.function` binds and compares every
    argument twice. Unnecessary if TensorFlow were faster.

    Args:
        function: A `tf.function`. Its first argument is a list of tensors with the same shapes and
            dtypes in every call. Other arguments are nested tensors and Nones. Retracing warnings
            are disabled, see `expect_many_traces`.
    """
    concrete = {}  # Concrete functions by the shapes and dtypes of the other arguments.
    expect_many_traces(function)  # It receives only first calls, so every call is a trace.

    def call(same, *args):
        if tf.config.functions_run_eagerly():
            return function(same, *args)
        key = repr(tf.nest.map_structure(lambda x: x if x is None else (x.shape, x.dtype), args))
        if key in concrete:
            flat = [x for x in tf.nest.flatten([same, args]) if x is not None]
            return concrete[key]._call_flat(flat, concrete[key].captured_inputs)
        results = function(same, *args)
        concrete[key] = function.get_concrete_function(same, *args)  # It was traced just now.
        return results

    return call


def current_function_call(thread: threading.Thread) -> tuple | None:
    """Return a key and the location of a thread's current call of a TensorFlow function.

    The key differs between calls, because a thread that runs between them waits again.
    `faulthandler` writes the stacks as text in one step. Frame objects of another thread could
    change while they are read. Unnecessary if a function could report that it waits.

    Args:
        thread: Another thread than the current one.

    Returns:
        A `(key, location)` tuple, or `None` if the thread is not in such a call.
    """
    with open(os.memfd_create("stacks"), "w+", encoding="ascii") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        stacks = file.read()
    stack = stacks.partition(f"Thread 0x{thread.ident:016x} ")[2].partition("\n\n")[0]
    places = re.findall(r'File "(.*)", line (\d+)', stack)
    if not places or not any(part in places[0][0] for part in _RUNS_FUNCTIONS):
        return None
    status = pathlib.Path(f"/proc/self/task/{thread.native_id}/status").read_text("ascii")
    num_waits = re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", status, re.MULTILINE)
    for path, line in places:
        if not path.startswith(_LIBRARIES):
            return num_waits, f"{'/'.join(pathlib.Path(path).parts[-2:])}, line {line}"
    return num_waits, "nowhere"


def function_names() -> list:
    """Return the names of all existing TensorFlow functions.

    The functions that DTensor lowered for the devices contain its actual collectives. Unnecessary
    if DTensor reported them.
    """
    return context.context().list_function_names()


def function_def(name: str):
    """Return the `FunctionDef` of a function from `function_names`, or `None` if it was deleted."""
    try:
        return context.context().get_function_def(name)
    except (tf.errors.NotFoundError, ValueError):
        return None


@contextlib.contextmanager
def collect_graphs():
    """Context manager that yields a list and fills it with optimized graphs on exit.

    These are the graphs of functions that first run inside. Only they contain XLA's clusters.
    Unnecessary if TensorFlow reported its clusters.
    """
    graphs = []
    context.context().enable_graph_collection()
    try:
        yield graphs
        functions = context.context().export_run_metadata().function_graphs
        graphs += [metadata.post_optimization_graph for metadata in functions]
    finally:
        context.context().disable_graph_collection()


def get_function_graph(graph: tf.Graph, name: str) -> tf.Graph | None:
    """Return the graph of a function that a graph calls, or `None` if it is unknown.

    The functions in `as_graph_def` lack the shapes of their results. Unnecessary if they had them.
    """
    return getattr(graph._get_function(name), "graph", None)


def with_gradient(compute: Callable, args: list[tf.Tensor]):
    """Return the result of `tf.custom_gradient(compute)(*args)` in a graph, with less memory.

    `tf.custom_gradient` creates an operation that also returns its arguments. TensorFlow computes
    zeros for their gradients, so a function keeps all arguments until the backward pass. This
    version returns only the results. Unnecessary if `tf.custom_gradient` made no zeros.

    Args:
        compute: Function of the arguments that returns nested tensors and a function from their
            gradients to the arguments' gradients.
        args: List of tensors.

    Raises:
        TypeError: If `compute` reads a trainable variable, because its gradient would be lost.
    """
    with record.VariableWatcher() as watcher:
        result, gradient = compute(*args)
    if watcher.watched_variables():
        names = ", ".join(variable.name for variable in watcher.watched_variables())
        raise TypeError(
            f"A function with a custom gradient reads the variables {names}, so their gradients "
            "would be lost. Pass their values as arguments."
        )
    results = tf.nest.flatten(result)
    tensors = [*results, *args]

    def backward(*upstream):
        return [*[None] * len(results), *tf.nest.flatten(gradient(*upstream))]

    graph = tf.compat.v1.get_default_graph()

    def of_operation(_, *dys):
        return backward(*dys)

    # A registered gradient would never be freed, and neither would its graph.
    with graph._override_gradient_function({"PartitionedCall": of_operation}):
        with record.stop_recording():
            first = tf.raw_ops.PartitionedCall(
                args=tensors,
                Tout=[x.dtype for x in results],
                f=_first_arguments(len(results), tuple((x.shape, x.dtype) for x in tensors)),
            )
    for x, like in zip(first, results):
        x.set_shape(like.shape)
    record.record_operation("with_gradient", first, tensors, backward)
    return tf.nest.pack_sequence_as(result, first)


@functools.cache
def _first_arguments(count, specs):
    """Return a concrete function that returns the first `count` of its arguments."""
    with tf.init_scope():
        function = tf.function(lambda *tensors: list(tensors[:count]), autograph=False)
        return function.get_concrete_function(*(tf.TensorSpec(*spec) for spec in specs))


def call_stablehlo(module: str, operands: list, results: list, target: str) -> list[tf.Tensor]:
    """Return the results of a StableHLO module, inside a function that XLA compiles.

    Unnecessary if TensorFlow supported XLA's custom calls, or had an operation for cuDNN's
    attention.

    Args:
        module: Text of the module. The first argument of its main function is the platform index.
        operands: List of tensors, the other arguments.
        results: List of the results' `(shape, dtype)` tuples. Dimensions may be `None` on a mesh,
            where TensorFlow must not infer the results' global shapes from the module.
        target: Name of the custom call in the module.
    """
    shapes, types = zip(*results)
    if any(None in shape for shape in shapes):
        # With an argument of unknown size, TensorFlow infers the results' shapes from the operands.
        # This fails for global shapes, so the results' shapes stay unknown.
        module = module.replace("{", "attributes {jax.uses_shape_polymorphism = true} {", 1)
        module = module.replace("tensor<i32>,", "tensor<i32>, %unused: tensor<?xi32>,", 1)
        operands = [tf.zeros([1], "int32"), *operands]
    return xla.call_module(
        operands,
        version=9,
        module=module.encode(),
        Tout=list(types),
        Sout=[list(shape) for shape in shapes],
        platforms=["CPU", "CUDA"],
        # The check would reject custom calls without a stability guarantee.
        disabled_checks=[f"custom_call:{target}"],
    )


def barrier(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Return the same tensors, available in compiled code only when all of them are computed.

    XLA moves no operation across the barrier and reuses no results that were computed from the
    original tensors. Unnecessary if XLA respected control dependencies.
    """
    return xla.optimization_barrier(*tensors)


def copy_constants() -> contextlib.AbstractContextManager:
    """Return a context manager that makes traced gradient functions copy their constants.

    TensorFlow passes the forward pass's constants, such as a transpose's permutation, as arguments.
    DTensor needs their values when it compiles. Unnecessary if DTensor knew the values of constant
    arguments.
    """

    def copied(capture, graph, tensor, name=None, shape=None):
        if tf.is_symbolic_tensor(tensor) and tensor.graph is not graph:
            if tensor.op.type == "Const":
                with graph.as_default(), tf.control_dependencies(None):
                    return tf.constant(tf.get_static_value(tensor), tensor.dtype)
        return capture(graph, tensor, name, shape)

    return _patched_captures(copied)


def replace_captures(replace: Callable) -> contextlib.AbstractContextManager:
    """Return a context manager that makes traced functions capture `replace(tensor)`.

    Only eager tensors are replaced. DTensor requires captured tensors on the mesh, except scalars.
    Unnecessary if it copied them.
    """

    def replaced(capture, graph, tensor, name=None, shape=None):
        tensor = tensor if tf.is_symbolic_tensor(tensor) else replace(tensor)
        return capture(graph, tensor, name, shape)

    return _patched_captures(replaced)


@contextlib.contextmanager
def _patched_captures(function):
    """Context manager that replaces how graphs capture tensors.

    `function` receives the original capture method and its arguments.
    """
    capture = FuncGraph.capture

    def patched(*args, **kwargs):
        return function(capture, *args, **kwargs)

    FuncGraph.capture = patched
    try:
        yield
    finally:
        FuncGraph.capture = capture


def packer(layout) -> Callable:
    """Return a fast eager function that packs a list of dense tensors like `dtensor.pack`.

    A step packs every weight. In each call `dtensor.pack` looks up the mesh and converts the layout
    to text, which takes four times as long as the rest. Unnecessary if DTensor cached both.

    Args:
        layout: A `dtensor.Layout`.
    """
    text = layout.to_string()
    is_sparse = False
    api._dtensor_device()._register_mesh(layout.mesh)

    def pack(tensors):
        handle = context.context()._handle
        device = api._dtensor_device()._device_info
        try:
            return _pywrap_dtensor_device.Pack(handle, tensors, text, device, is_sparse)
        except core._NotOkStatusException as error:
            raise core._status_to_exception(error) from None

    return pack


def read_long_errors() -> None:
    """Make TensorFlow parse error messages in linear instead of quadratic time.

    DTensor's errors contain a full function, which would take many minutes. Unnecessary if the
    pattern started each match at the end of the last one.
    """
    pattern = error_interpolation._INTERPOLATION_REGEX
    pattern = pattern.replace("(?P<sep>", r"(?P<sep>(?:\A|(?<=}}))", 1)
    error_interpolation._INTERPOLATION_PATTERN = re.compile(pattern, re.DOTALL)


def forget_context() -> None:
    """Clear TensorFlow's caches of devices and functions of a context that has ended.

    Functions of the old context can then be deleted later without errors. Unnecessary if
    `initialize_accelerator_system(experimental_reset_context=True)` did this.
    """
    context._device_parsing_cache.clear()
    _first_arguments.cache_clear()
    gc.collect()
    counts = atomic_function.RUNTIME_FUNCTION_REFS

    def never_zero():
        return 1 << 40

    atomic_function.RUNTIME_FUNCTION_REFS = collections.defaultdict(never_zero, counts)


def end_context() -> None:
    """End TensorFlow's context and everything in it, so that the next one may have other devices.

    Settings of devices and threads persist until they are changed. Unnecessary if devices could be
    configured after the first operation.
    """
    forget_context()
    context.context().ensure_uninitialized()


def forget_dtensor_device() -> None:
    """Drop DTensor's device, which would outlive its context.

    Unnecessary if `shutdown_accelerator_system` did this.
    """
    api._reset()


def captured(tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor in the current function's graph, also for resources and eager tensors.

    Unnecessary if `tf.identity` kept the resource of a handle.
    """
    graph = tf.compat.v1.get_default_graph()
    return graph.capture(tensor) if isinstance(graph, FuncGraph) else tensor


def copy_functions(source: tf.Graph) -> None:
    """Make the functions that another graph calls known to the current graph, and keep them.

    Unnecessary if `tf.graph_util.import_graph_def` kept the functions of a graph's library.
    """
    graph = tf.compat.v1.get_default_graph()
    for function in source._functions.values():
        graph._add_function_recursive(function)
