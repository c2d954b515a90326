"""What tests leave out to compile quickly: numbers do not depend on it."""

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
    `make test-all` compiles as users do.
    """
    gc.set_threshold(50_000, 20, 50)  # what is traced is large, and little of it is garbage
    # Ranks ask each other for work 1,000 times a second, which takes a third of their processor time.
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "5")  # milliseconds
    os.environ.setdefault("XLA_FLAGS", " ".join(XLA_FLAGS))
    import tensorflow as tf

    import dtransformer.start  # noqa: F401

    tf.config.threading.set_intra_op_parallelism_threads(1)
    _keep_no_places_of_operations()
    leave_graphs_as_they_are()


def _keep_no_places_of_operations():
    """Let operations of graphs know no trace of Python's calls, which takes some 60 frames' lines."""
    from tensorflow.python.framework import ops

    ops.tf_stack.extract_stack = lambda stacklevel=1: None
    ops.pywrap_tf_session.TF_SetOpStackTrace = lambda operation, trace: None


def leave_graphs_as_they_are():
    """Let TensorFlow optimize no graphs; once more where a mesh has begun its context anew."""
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
