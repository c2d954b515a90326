"""Gradient accumulation over micro-batches.

A step stores the activations of only one micro-batch at a time. Gradients and sums equal the
results of the full batch.
"""

import tensorflow as tf

from dtransformer.trainers.row_sharding import rows_of_shard

_CALLED = {"_noinline": True}


def in_micro_batches(forward_backward, number, reduce):
    """Return a forward–backward function that divides each batch into micro-batches.

    Args:
        forward_backward: Function like `Engine.forward_backward`.
        number: Number m of micro-batches. Rows are divided as evenly as possible. With
            fewer rows, some micro-batches are empty.
        reduce: Function that is applied to the gradients of each micro-batch before they are added.

    Returns:
        A function with the same arguments and results. Gradients and sums are added over the
        micro-batches, outputs are concatenated. Each micro-batch has different dropout masks.
    """

    def accumulated(inputs, labels, sample_weight, numbers):
        batch = inputs, labels, sample_weight

        def micro_batch(i):
            own = numbers._replace(seed=seed_of(numbers.seed, i, number))
            gradients, outputs, sums = forward_backward(*rows_of_shard(batch, i, number), own)
            return [tf.convert_to_tensor(x) for x in reduce(gradients)], outputs, sums

        compute = micro_batch
        # Compile one function and call it for each micro-batch.
        if not tf.executing_eagerly():
            compute = tf.function(micro_batch, autograph=False, experimental_attributes=_CALLED)
        before = [x for x in tf.nest.flatten(batch) if x is not None]
        gradients, all_outputs, sums = None, [], None
        for i in range(number):
            # Gathers of weights do not depend on the batch and could run early. Order them, so
            # that only one micro-batch is in memory at a time.
            with tf.control_dependencies(before):
                more, outputs, more_sums = compute(tf.constant(i))
            # Add the gradients one by one to free each old one immediately.
            if gradients is not None:
                more = [gradients.pop(0) + more.pop(0) for _ in range(len(more))]
                more_sums = tf.nest.map_structure(tf.add, sums, more_sums)
            gradients, sums = more, more_sums
            all_outputs.append(outputs)
            before = gradients
        joined = lambda *xs: None if xs[0] is None else tf.concat(xs, 0)
        return gradients, tf.nest.map_structure(joined, *all_outputs), sums

    return accumulated


def seed_of(seed, i, number):
    """Return the dropout seed of micro-batch `i` of `number`."""
    return tf.stack([seed[0], seed[1] * number + tf.cast(i, seed.dtype)])
