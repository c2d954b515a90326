"""Gradient accumulation: a batch is computed in micro-batches, one after the other.

A step then needs the activations of one micro-batch only, and its numbers are those of
the whole batch.
"""

import tensorflow as tf

from dtransformer.parallel.tracing.tensor_specs import number_of_rows


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
        num_rows = number_of_rows(tf.nest.flatten(inputs)[0])

        def micro_batch(i):
            own = numbers._replace(seed=seed_of(numbers.seed, i, number))
            gradients, outputs, sums = forward_backward(*rows_of(batch, i, number, num_rows), own)
            return [tf.convert_to_tensor(x) for x in reduce(gradients)], outputs, sums

        add_up = _add_up_eagerly if tf.executing_eagerly() else _add_up_in_a_loop
        there = [x for x in tf.nest.flatten(batch) if x is not None]
        with tf.control_dependencies(there):  # what ranks send does not depend on it
            return add_up(micro_batch, number)

    return accumulated


def rows_of(batch, i, number, num_rows):
    """Return the i-th of a number of micro-batches of a nested batch, where None stays None."""
    return _map(lambda x: x[num_rows * i // number : num_rows * (i + 1) // number], batch)


def seed_of(seed, i, number):
    """Return the seed of the dropout masks of the i-th of a number of micro-batches."""
    return tf.stack([seed[0], seed[1] * number + tf.cast(i, seed.dtype)])


def _map(function, *structures):
    """As `tf.nest.map_structure`; None stays None."""
    return tf.nest.map_structure(lambda *xs: None if xs[0] is None else function(*xs), *structures)


def _add(total, more):
    return tf.nest.map_structure(tf.add, total, more)


def _add_up_eagerly(compute, number):
    gradients, outputs, sums = compute(0)
    outputs = [outputs]
    for i in range(1, number):
        more, output, more_sums = compute(i)
        gradients, sums = _add(gradients, more), _add(sums, more_sums)
        outputs.append(output)
    return gradients, _map(lambda *xs: tf.concat(xs, 0), *outputs), sums


def _add_up_in_a_loop(compute, number):
    """The loop's body, and what comes before it, are one function: it is compiled once."""
    compute = tf.function(compute, autograph=False)
    gradients, outputs, sums = compute(tf.constant(0))
    flatten = lambda outputs: [] if outputs is None else tf.nest.flatten(outputs)
    arrays = [
        tf.TensorArray(x.dtype, number, infer_shape=False, element_shape=[None, *x.shape[1:]])
        for x in flatten(outputs)
    ]
    arrays = [array.write(0, x) for array, x in zip(arrays, flatten(outputs))]

    def body(i, gradients, sums, arrays):
        more, output, more_sums = compute(i)
        arrays = [array.write(i, x) for array, x in zip(arrays, flatten(output))]
        return i + 1, _add(gradients, more), _add(sums, more_sums), arrays

    _, gradients, sums, arrays = tf.while_loop(
        lambda i, *_: i < number,
        body,
        (tf.constant(1), gradients, sums, arrays),
        parallel_iterations=1,
        maximum_iterations=number,
    )
    if outputs is not None:
        outputs = tf.nest.pack_sequence_as(outputs, [array.concat() for array in arrays])
    return gradients, outputs, sums
