"""Micro-batches for losses that compare all rows of the global batch, such as contrastive losses.

The loss needs the outputs of all rows, but the activations of all rows may not fit into memory. A
step therefore has three parts:

1. Forward passes of all micro-batches, without storing activations.
2. The loss of the global batch and its gradients with respect to all outputs.
3. Forward and backward pass of each micro-batch, with the loss Σ outputs · gradients.

Losses and gradients equal the results of the full batch. Both forward passes of a micro-batch draw
the same dropout masks.

Reference: [Gao et al., 2021](https://arxiv.org/abs/2101.06983), "Scaling deep contrastive learning
batch size under memory limited setup"
"""

import tensorflow as tf

from dtransformer.parallel.weights.sharded_variable import get_local_shards
from dtransformer.trainers.engines.accumulation import accumulate_gradients


def compute_outputs_first(step, engine, num_micro_batches, reduce, compiler):
    """Return a forward–backward function that computes the outputs of all rows first.

    Args:
        step: The `ForwardStep`, with `repeats_forward`.
        engine: An `Engine`, built.
        num_micro_batches, reduce: See `accumulate_gradients`.
        compiler: The `StepCompiler`.

    Returns:
        A function with the arguments and results of `Engine.forward_backward`.
    """

    def training_outputs(inputs, labels, sample_weight, scalars):
        return [], engine.training_outputs(inputs, scalars.dropout_seed), {}

    first_pass = accumulate_gradients(training_outputs, num_micro_batches, None)
    output_gradients = compiler.compile_part(step.output_gradients)
    second_pass = accumulate_gradients(
        engine.forward_backward, num_micro_batches, reduce, labels_on_host=False
    )
    weights = {id(weight) for weight in step.network.weights}
    states = [v for v in step.network.variables if id(v) not in weights]

    def forward_backward(inputs, labels, sample_weight, scalars):
        shards = get_local_shards(states)
        values = [tf.identity(shard.value) for shard in shards]
        _, outputs, _ = first_pass(inputs, None, None, scalars)
        # The second pass repeats the random numbers of Keras' layers and the metrics' updates.
        for shard, value in zip(shards, values):
            shard.assign(value)
        gradients, loss_sums = output_gradients(outputs, labels, sample_weight, scalars.counts)
        weight_gradients, metric_outputs, sums = second_pass(inputs, gradients, None, scalars)
        return weight_gradients, metric_outputs, sums | loss_sums

    return forward_backward
