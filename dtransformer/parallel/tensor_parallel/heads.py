"""Projections into attention heads: one product for all of the same input."""

import keras
import tensorflow as tf

from dtransformer.parallel import trace
from dtransformer.parallel.deferred_gradients import is_deferred
from dtransformer.parallel.features import add_bias
from dtransformer.parallel.loop_constants import computed_once
from dtransformer.parallel.low_rank import low_rank_of
from dtransformer.parallel.shapes import static_or_dynamic_shape
from dtransformer.parallel.sharded_variable import is_unsharded_for_use
from dtransformer.parallel.tensor_parallel.linear import column_parallel, matmul

Weight = tf.Tensor | keras.Variable


def project_to_heads(
    x: tf.Tensor, kernels: list[Weight], biases: list[Weight | None]
) -> list[tf.Tensor]:
    """Return x · kernel + bias of each kernel, by heads.

    On one device the kernels are multiplied as one: a product is faster the wider it is. A loop
    that decodes joins them before it begins.

    Args:
        x: tensor [b, s, h].
        kernels: list of tensors or variables [h, n, d]; n may be another for each.
        biases: list of tensors or variables [n, d], or of None: all have one, or none.

    Returns:
        A list of tensors [b, n, s, d].
    """
    one_by_one = (
        is_unsharded_for_use(kernel) or is_deferred(kernel) or low_rank_of(kernel) is not None
        for kernel in kernels
    )
    if trace.is_on_mesh() or any(one_by_one):
        products = column_parallel(x, kernels, ("heads", "head_dim"))
        return [
            _heads_first(y if bias is None else add_bias(y, bias))
            for y, bias in zip(products, biases)
        ]
    if len(kernels) == 1:
        y = matmul(x, kernels[0])
        return [_heads_first(y if biases[0] is None else add_bias(y, biases[0]))]
    num_heads = [kernel.shape[1] for kernel in kernels]
    are_alike = len(set(num_heads)) == 1

    def joined(weights, axis):
        join = tf.stack if are_alike else tf.concat
        return computed_once(lambda *x: join(x, axis), *(tf.cast(w, x.dtype) for w in weights))

    y = matmul(x, joined(kernels, axis=1))
    if biases[0] is not None:
        y = add_bias(y, joined(biases, axis=0))
    if not are_alike:
        return tf.split(_heads_first(y), num_heads, axis=1)
    # [b, s, kernels, n, d] -> [kernels, b, n, s, d]
    if x.shape[1] == 1:
        return [_heads_first(part) for part in tf.unstack(y, axis=2)]
    return tf.unstack(tf.transpose(y, [2, 0, 3, 1, 4]))


def _heads_first(x):
    """[b, s, n, d] -> [b, n, s, d]"""
    if x.shape[1] == 1 and not trace.is_on_mesh():
        b, s, n, d = static_or_dynamic_shape(x)
        return tf.reshape(x, [b, n, s, d])
    return tf.transpose(x, [0, 2, 1, 3])
