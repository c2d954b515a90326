"""Run the code path for GPUs on CPU ranks: XLA's clusters and GPU-only settings."""

import os

BRANCH = "DTRANSFORMER_GPU_BRANCH"
# Flags for TF_XLA_FLAGS, which TensorFlow reads once. The first one enables clusters on CPUs.
# TensorFlow places folded constants and the offsets of a `Slice` on the host's first CPU. XLA
# accepts one device per cluster, and on another CPU this would be a second one. So constants are
# not folded, and a rank of a mesh has one device.
FLAGS_OF_XLA = "--tf_xla_cpu_global_jit", "--tf_xla_disable_constant_folding"


def take_gpu_branch(takes):
    """Select the code path for GPUs, or the one for CPUs, for everything compiled from now on."""
    import tensorflow as tf

    if takes:
        os.environ[BRANCH] = "1"
    elif os.environ.pop(BRANCH, None):
        tf.config.optimizer.set_jit(False)  # `Trainer.compile` has enabled it.
