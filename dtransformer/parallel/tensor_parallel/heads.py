"""Projections into attention heads: one product for all projections of an input."""

import tensorflow as tf

from dtransformer.parallel.ops.feature_reductions import add_bias
from dtransformer.parallel.ops.low_rank import get_low_rank
from dtransformer.parallel.ops.split_backward import is_split
from dtransformer.parallel.tensor_parallel.linear import Weight, column_parallel, matmul
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape


def project_to_heads(
    x: tf.Tensor, kernels: list[Weight], biases: list[Weight | None]
) -> list[tf.Tensor]:
    """Return x · kernel + bias for each kernel, in heads.

    On one device, all kernels are multiplied in one product, since wide products are faster.
    Kernels are multiplied separately in decoding, which has few rows, on a mesh, and if a kernel has
    an adapter or a deferred gradient.

    Args:
        x: Tensor of shape `[b, s, h]`.
        kernels: List of tensors or variables of shape `[h, n, d]`. n may differ.
        biases: List of tensors or variables of shape `[n, d]`, or a list of `None`.

    Returns:
        A list of tensors of shape `[b, n, s, d]`.
    """
    needs_separate_products = (
        is_split(kernel) or get_low_rank(kernel) is not None for kernel in kernels
    )
    decodes = trace.is_decoding_loop()
    if trace.is_on_mesh() or decodes or any(needs_separate_products):
        products = column_parallel(x, kernels, ("heads", "head_dim"))
        return [
            _heads_first(y if bias is None else add_bias(y, bias))
            for y, bias in zip(products, biases)
        ]
    y = matmul(x, tf.concat([tf.cast(kernel, x.dtype) for kernel in kernels], axis=1))
    if biases[0] is not None:
        y = add_bias(y, tf.concat([tf.cast(bias, x.dtype) for bias in biases], axis=0))
    heads = [kernel.shape[1] for kernel in kernels]
    if len(set(heads)) > 1:
        return tf.split(_heads_first(y), heads, axis=1)
    b, s, _, d = static_or_dynamic_shape(y)
    y = tf.reshape(y, [b, s, len(heads), heads[0], d])
    return tf.unstack(tf.transpose(y, [2, 0, 3, 1, 4]))  # Unstacking makes no further copy.


def _heads_first(x):
    """Transpose `[b, s, n, d]` to `[b, n, s, d]`."""
    return tf.transpose(x, [0, 2, 1, 3])
