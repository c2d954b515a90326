"""The way that steps go on GPUs, on CPU ranks: XLA's clusters, and what else a GPU is told."""

import os

BRANCH = "DTRANSFORMER_GPU_BRANCH"
# For TF_XLA_FLAGS, which TensorFlow reads once: clusters on CPUs, where they are asked for. Constants
# that TensorFlow folds in a cluster, and where a `Slice` of it begins, are put on the host's first CPU:
# beside a GPU that is no second device, beside another CPU it is, and XLA takes one. So nothing is
# folded, and a rank of a mesh has one device.
FLAGS_OF_XLA = "--tf_xla_cpu_global_jit", "--tf_xla_disable_constant_folding"


def take_gpu_branch(takes):
    """Let what is made and compiled from now on go the way of GPUs, or that of CPUs again."""
    import tensorflow as tf

    if takes:
        os.environ[BRANCH] = "1"
    elif os.environ.pop(BRANCH, None):
        tf.config.optimizer.set_jit(False)  # which `Trainer.compile` has set
