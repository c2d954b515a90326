"""Gradient accumulation: a batch is computed in micro-batches, one after the other.

A step then needs the activations of one micro-batch only, and its numbers are those of
the whole batch.
"""

import tensorflow as tf

from dtransformer.trainers.row_sharding import rows_of_shard

_CALLED = {"_noinline": True}


def in_micro_batches(forward_backward, number, reduce):
    """Return an engine's forward–backward that takes a batch in micro-batches.

    Args:
        forward_backward: as `Engine.forward_backward`.
        number: number m of micro-batches; rows are divided as evenly as they can be, some get none
            where there are fewer.
        reduce: a function of the gradients of a micro-batch, whose results are added up.

    Returns:
        A function alike. Gradients and sums are those of all micro-batches; outputs,
        where there are any, follow one another. Each micro-batch has dropout masks of
        its own.
    """

    def accumulated(inputs, labels, sample_weight, numbers):
        batch = inputs, labels, sample_weight

        def micro_batch(i):
            own = numbers._replace(seed=seed_of(numbers.seed, i, number))
            gradients, outputs, sums = forward_backward(*rows_of_shard(batch, i, number), own)
            return [tf.convert_to_tensor(x) for x in reduce(gradients)], outputs, sums

        compute = micro_batch
        if not tf.executing_eagerly():  # compiled once, and called for each
            compute = tf.function(micro_batch, autograph=False, experimental_attributes=_CALLED)
        before = [x for x in tf.nest.flatten(batch) if x is not None]
        gradients, all_outputs, sums = None, [], None
        for i in range(number):
            # What ranks send does not depend on the batch, and one is in memory at a time.
            with tf.control_dependencies(before):
                more, outputs, more_sums = compute(tf.constant(i))
            if gradients is not None:  # one after the other, so that the old ones are freed
                more = [gradients.pop(0) + more.pop(0) for _ in range(len(more))]
                more_sums = tf.nest.map_structure(tf.add, sums, more_sums)
            gradients, sums = more, more_sums
            all_outputs.append(outputs)
            before = gradients
        joined = lambda *xs: None if xs[0] is None else tf.concat(xs, 0)
        return gradients, tf.nest.map_structure(joined, *all_outputs), sums

    return accumulated


def seed_of(seed, i, number):
    """Return the seed of the dropout masks of the i-th of a number of micro-batches."""
    return tf.stack([seed[0], seed[1] * number + tf.cast(i, seed.dtype)])
