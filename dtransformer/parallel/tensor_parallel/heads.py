"""Projections into attention heads: one product for all of the same input."""

import keras
import tensorflow as tf

from dtransformer.parallel import trace
from dtransformer.parallel.deferred_gradients import is_deferred
from dtransformer.parallel.features import add_bias
from dtransformer.parallel.shapes import static_or_dynamic_shape
from dtransformer.parallel.sharded_variable import is_unsharded_for_use
from dtransformer.parallel.tensor_parallel.linear import column_parallel, matmul

Weight = tf.Tensor | keras.Variable


def project_to_heads(x: tf.Tensor, kernels: list[Weight], biases: list[Weight]) -> list[tf.Tensor]:
    """Return x · kernel + bias of each kernel, by heads.

    On one device the kernels are multiplied as one, but for the few rows of decoding: a product is
    faster the wider it is.

    Args:
        x: tensor [b, s, h].
        kernels: list of m tensors or variables [h, n, d].
        biases: list of m tensors or variables [n, d].

    Returns:
        A list of m tensors [b, n, s, d].
    """
    one_by_one = (is_unsharded_for_use(kernel) or is_deferred(kernel) for kernel in kernels)
    decodes = trace.current().around_loop is not None
    if trace.is_on_mesh() or decodes or any(one_by_one):
        products = column_parallel(x, kernels, ("heads", "head_dim"))
        return [_heads_first(add_bias(y, bias)) for y, bias in zip(products, biases)]
    kernel = tf.stack([tf.cast(kernel, x.dtype) for kernel in kernels], axis=1)
    bias = tf.stack([tf.cast(bias, x.dtype) for bias in biases])
    # [b, s, m, n, d] -> [m, b, n, s, d]
    heads = tf.transpose(add_bias(matmul(x, kernel), bias), [2, 0, 3, 1, 4])
    return tf.unstack(heads)


def _heads_first(x):
    """[b, s, n, d] -> [b, n, s, d]"""
    if x.shape[1] == 1 and not trace.is_on_mesh():
        b, s, n, d = static_or_dynamic_shape(x)
        return tf.reshape(x, [b, n, s, d])
    return tf.transpose(x, [0, 2, 1, 3])
