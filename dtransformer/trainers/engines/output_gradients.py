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
from dtransformer.trainers.engines.accumulation import compile_once, micro_batch_seed
from dtransformer.trainers.row_sharding import concat_rows, take_shard

_SEED_DTYPE = "uint32"  # Only seeds of Keras' random layers have this dtype.


def compute_outputs_first(step, engine, accumulated, num_micro_batches, compiler):
    """Return a forward–backward function that computes the outputs of all rows first.

    Args:
        step: The `ForwardStep`, with `repeats_forward`.
        engine: An `Engine`, built.
        accumulated: Result of `accumulate_gradients` for the engine. Its labels are the gradients
            of the outputs.
        num_micro_batches: Number of micro-batches.
        compiler: The `StepCompiler`.

    Returns:
        A function with the arguments and results of `Engine.forward_backward`.
    """
    output_gradients = compiler.compile_part(step.output_gradients)
    seeds = [v for v in step.network.non_trainable_variables if v.dtype == _SEED_DTYPE]

    def forward_backward(inputs, labels, sample_weight, scalars):
        shards = get_local_shards(seeds)
        states = [tf.identity(shard.value) for shard in shards]
        outputs = _training_outputs(engine, inputs, scalars.seed, num_micro_batches)
        for shard, state in zip(shards, states):
            shard.assign(state)  # Keras' layers repeat their masks in the second pass.
        gradients, loss_sums = output_gradients(outputs, labels, sample_weight, scalars.counts)
        weight_gradients, metric_outputs, sums = accumulated(inputs, gradients, None, scalars)
        return weight_gradients, metric_outputs, sums | loss_sums

    return forward_backward


def _training_outputs(engine, inputs, seed, num_micro_batches):
    """Return the outputs of all rows, computed in micro-batches one after the other."""

    def micro_batch(i):
        rows = take_shard(inputs, i, num_micro_batches)
        return engine.training_outputs(rows, micro_batch_seed(seed, i, num_micro_batches))

    compute = compile_once(micro_batch)
    dependencies = tf.nest.flatten(inputs)
    all_outputs = []
    for i in range(num_micro_batches):
        with tf.control_dependencies(dependencies):
            outputs = compute(tf.constant(i))
        all_outputs.append(outputs)
        dependencies = tf.nest.flatten(outputs)
    return tf.nest.map_structure(concat_rows, *all_outputs)
