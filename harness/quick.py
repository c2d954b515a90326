"""Settings that shorten compilation in tests without changing results."""

import functools
import gc
import os

XLA_FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
)


def compile_quickly():
    """Disable expensive optimizations of TensorFlow and XLA. Call this first.

    Tests use small graphs and run them only a few times. Operations get one thread, because the
    other core is used by another test process or rank. Long single-process tests and commands that
    tests start keep the default settings.
    """
    gc.set_threshold(50_000, 20, 50)  # Traced graphs are large and contain little garbage.
    # Idle ranks poll each other every 1 ms by default, which takes 28% of a core. 5 ms takes 10%.
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "5")
    os.environ.setdefault("XLA_FLAGS", " ".join(XLA_FLAGS))
    import tensorflow as tf

    import dtransformer.start  # noqa: F401

    tf.config.threading.set_intra_op_parallelism_threads(1)
    _disable_stack_traces()
    _skip_unneeded_checks()
    leave_graphs_as_they_are()


def calls_of_traces():
    """Return TensorFlow's functions that record the origin of operations, as (module, name) pairs."""
    from tensorflow.python.framework import ops

    return [(ops.tf_stack, "extract_stack"), (ops.pywrap_tf_session, "TF_SetOpStackTrace")]


def _disable_stack_traces():
    """Disable stack traces of graph operations, which take a tenth of the tracing time."""
    for module, name in calls_of_traces():
        setattr(module, name, functools.wraps(getattr(module, name))(lambda *_, **options: None))


def _skip_unneeded_checks():
    """Skip two checks of graph operations that have no effect. They take 4% of the tracing time."""
    from tensorflow.python.framework import auto_control_deps, dtypes, op_def_library

    resources = {dtype.as_datatype_enum for dtype in (dtypes.resource, dtypes.variant)}
    find_resources = auto_control_deps._get_resource_inputs
    check_type = op_def_library._SatisfiesTypeConstraint

    def find_resources_if_any(op):
        types = {tensor.dtype.as_datatype_enum for tensor in op.inputs}
        return () if types.isdisjoint(resources) else find_resources(op)

    def check_type_if_wrong(dtype, attr_def, param_name):
        # TensorFlow formats the error message even if the type is right.
        if dtype not in attr_def.allowed_values.list.type:
            check_type(dtype, attr_def, param_name)

    auto_control_deps._get_resource_inputs = find_resources_if_any
    op_def_library._SatisfiesTypeConstraint = check_type_if_wrong


def leave_graphs_as_they_are():
    """Disable graph optimization. Call it again after a mesh has restarted TensorFlow's context."""
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
