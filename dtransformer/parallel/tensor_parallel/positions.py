"""Selection of positions of a sequence that may be sharded."""

import tensorflow as tf

from dtransformer.parallel.mesh.axis_rules import constrain, constrain_both
from dtransformer.parallel.tracing import trace


def gather_positions(inputs: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
    """Return the vectors at some positions of each sequence.

    Off the mesh this is `tf.gather`. On a mesh it is a product with one-hot rows: if the sequence
    is sharded, every device multiplies its shard, and the results are summed.

    Args:
        inputs: Tensor of shape `[b, s, h]`.
        positions: Integer tensor of shape `[b, P]` with values in [0, s). Positions count from the
            start of the full sequence and may repeat.

    Returns:
        A tensor of shape `[b, P, h]`.

    Example:

    >>> gather_positions(tf.reshape(tf.range(6.0), (1, 3, 2)), tf.constant([[2, 0]])).numpy().tolist()
    [[[4.0, 5.0], [0.0, 1.0]]]
    """
    if not trace.is_on_mesh():
        return tf.gather(inputs, positions, batch_dims=1)
    one_hot = tf.one_hot(positions, inputs.shape[1], dtype=inputs.dtype)
    one_hot = constrain(one_hot, ("batch", None, "length"))
    inputs = constrain_both(inputs, ("batch", "length", None))
    # [b, P, s], [b, s, h] -> [b, P, h]
    return constrain_both(tf.matmul(one_hot, inputs), ("batch", None, None))
