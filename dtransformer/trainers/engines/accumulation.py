"""Gradient accumulation over micro-batches.

A step stores the activations of only one micro-batch at a time. Gradients and sums equal the
results of the full batch.
"""

import tensorflow as tf

from dtransformer.trainers.row_sharding import concat_rows, take_shard

_NOT_INLINED = {"_noinline": True}


def accumulate_gradients(forward_backward, num_micro_batches, reduce, labels_on_host=True):
    """Return a forward–backward function that divides each batch into micro-batches.

    Args:
        forward_backward: Function like `Engine.forward_backward`.
        num_micro_batches: Number of micro-batches. Rows are divided as evenly as possible. With
            fewer rows, some micro-batches are empty.
        reduce: Function that is applied to the gradients of each micro-batch before they are added,
            or `None`.
        labels_on_host: Whether labels are in host memory, like the rest of the batch.

    Returns:
        A function with the same arguments and results. Gradients and sums are added over the
        micro-batches, outputs are concatenated. Dropout masks equal the masks of the full batch.
    """

    def accumulated(inputs, labels, sample_weight, scalars):
        batch = inputs, labels, sample_weight

        def micro_batch(i):
            shard = i, num_micro_batches
            gradients, outputs, sums = forward_backward(
                take_shard(inputs, *shard),
                take_shard(labels, *shard, on_host=labels_on_host),
                take_shard(sample_weight, *shard),
                scalars.of_micro_batch(i),
            )
            if reduce is not None:
                gradients = reduce(gradients)
            return [tf.convert_to_tensor(x) for x in gradients], outputs, sums

        compute = micro_batch
        # Compile one function and call it for each micro-batch.
        if not tf.executing_eagerly():
            compute = tf.function(
                micro_batch, autograph=False, experimental_attributes=_NOT_INLINED
            )
        dependencies = _tensors(batch)
        gradients = None
        sums = None
        all_outputs = []
        for i in range(num_micro_batches):
            # Gathers of weights do not depend on the batch and could run early. Order them, so
            # that only one micro-batch is in memory at a time.
            with tf.control_dependencies(dependencies):
                new_gradients, outputs, new_sums = compute(tf.constant(i))
            # Add the gradients one by one to free each old one immediately.
            if gradients is not None:
                new_gradients = [
                    gradients.pop(0) + new_gradients.pop(0) for _ in range(len(new_gradients))
                ]
                new_sums = tf.nest.map_structure(tf.add, sums, new_sums)
            gradients = new_gradients
            sums = new_sums
            all_outputs.append(outputs)
            dependencies = _tensors((gradients, outputs))
        return gradients, tf.nest.map_structure(concat_rows, *all_outputs), sums

    return accumulated


def _tensors(nested):
    return [x for x in tf.nest.flatten(nested) if x is not None]
