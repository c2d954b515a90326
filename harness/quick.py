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
    os.environ.setdefault("XLA_FLAGS", " ".join(XLA_FLAGS))
    import tensorflow as tf

    import dtransformer.start  # noqa: F401

    tf.config.threading.set_intra_op_parallelism_threads(1)
    leave_graphs_as_they_are()


def leave_graphs_as_they_are():
    """Let TensorFlow optimize no graphs; once more where a mesh has begun its context anew."""
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
