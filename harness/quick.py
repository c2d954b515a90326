"""What tests leave out to compile quickly: numbers do not depend on it."""

import functools
import gc
import os

XLA_FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
)


def compile_quickly():
    """Let TensorFlow optimize no graphs, as they are small and run a few times; call it first.

    Operations get one thread, as another process of tests, or another rank, has the other core.
    Long tests of one process compile as users do, as do the commands that tests start.
    """
    gc.set_threshold(50_000, 20, 50)  # what is traced is large, and little of it is garbage
    # Idle ranks ask each other for work each 1 ms by default, which takes 28 % of a core; this, 10 %.
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "5")  # ms
    os.environ.setdefault("XLA_FLAGS", " ".join(XLA_FLAGS))
    import tensorflow as tf

    import dtransformer.start  # noqa: F401

    tf.config.threading.set_intra_op_parallelism_threads(1)
    _keep_no_traces()
    leave_graphs_as_they_are()


def calls_of_traces():
    """Return TensorFlow's functions that note where an operation was made: pairs of module and name."""
    from tensorflow.python.framework import ops

    return [(ops.tf_stack, "extract_stack"), (ops.pywrap_tf_session, "TF_SetOpStackTrace")]


def _keep_no_traces():
    """Let operations of graphs know no trace of Python's calls, a tenth of the time of tracing."""
    for module, name in calls_of_traces():
        setattr(module, name, functools.wraps(getattr(module, name))(lambda *_, **options: None))


def leave_graphs_as_they_are():
    """Let TensorFlow optimize no graphs; once more where a mesh has begun its context anew."""
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
