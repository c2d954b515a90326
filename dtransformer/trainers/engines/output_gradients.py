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

from dtransformer import _compat
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.weights.sharded_variable import get_local_shards
from dtransformer.trainers.engines.accumulation import accumulate_gradients


class GivenGradients:
    """Objective of part 3: the loss Σ outputs · gradients, which has these gradients."""

    @staticmethod
    def sums(outputs, gradients, *_):
        """Return the local loss, with the arguments of `Objective.sums`.

        Engines receive the gradients as the labels of this objective.
        """
        pairs = zip(tf.nest.flatten(outputs), tf.nest.flatten(gradients))
        parts = [tf.reduce_sum(tf.cast(x, "float32") * gradient) for x, gradient in pairs]
        return {"loss": tf.add_n(parts)}


def training_objective(objective):
    """Return the objective of each forward and backward pass.

    This is `GivenGradients` if a step has several micro-batches and the loss compares their rows,
    otherwise `objective`.
    """
    if get_parallel_config().micro_batch_num == 1 or objective is None:
        return objective
    return GivenGradients() if objective.compares_rows else objective


def training_outputs(step, inputs, seed):
    """Return the outputs of a training step without storing activations.

    State changes are discarded.

    Args:
        step: The `ForwardStep`.
        inputs: Nested tensors [b, ...].
        seed: Int64 tensor [2]. Seed of the dropout masks.

    Raises:
        ValueError: If the outputs have masks.
    """
    with trace.with_gradients(False), trace.training_forward(seed):
        outputs = step.outputs(inputs, training=True)
    if _compat.get_keras_masks(outputs):
        raise ValueError(
            "The loss compares all rows of a batch, and the network's outputs have a mask, which "
            "does not work with several micro-batches. Pass sample weights instead of the mask, "
            "or set `micro_batch_num=1`."
        )
    return outputs


def compute_outputs_first(step, engine, num_micro_batches, reduce, compiler):
    """Return a forward–backward function that computes the outputs of all rows first.

    Args:
        step: The `ForwardStep`, with the training objective `GivenGradients`.
        engine: An `Engine`, built.
        num_micro_batches, reduce: See `accumulate_gradients`.
        compiler: The `StepCompiler`.

    Returns:
        A function with the arguments and results of `Engine.forward_backward`.
    """

    def first_outputs(inputs, labels, sample_weight, scalars):
        return [], engine.training_outputs(inputs, scalars.seed), {}

    def output_gradients(outputs, labels, sample_weight, counts):
        """Return the gradients of the loss for the outputs of all local rows, and its sums."""
        values = tf.nest.map_structure(lambda x: tf.cast(x, "float32"), outputs)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(values)
            is_full_batch = not step.layout.needs_reduce
            sums = step.objective.sums(values, labels, sample_weight, counts, is_full_batch)
        return tape.gradient(sums["loss"], values, unconnected_gradients="zero"), sums

    first_pass = accumulate_gradients(first_outputs, num_micro_batches, None)
    compute_gradients = compiler.compile_part(output_gradients)
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
        gradients, loss_sums = compute_gradients(outputs, labels, sample_weight, scalars.counts)
        weight_gradients, metric_outputs, sums = second_pass(inputs, gradients, None, scalars)
        return weight_gradients, metric_outputs, sums | loss_sums

    return forward_backward
