"""Train a two-layer network with collectives placed by hand: data and model parallelism.

    python examples/hybrid_parallel.py
    dtransformer launch -np 2 -- python examples/hybrid_parallel.py --model-parallel 2
    dtransformer launch -np 4 -- python examples/hybrid_parallel.py --model-parallel 2

The losses are the same for every number of ranks.

There are dp = ranks / mp groups of mp ranks, and each group trains on a part of the batch.
Within a group, every rank holds a shard of the hidden layer (Shoeybi et al., 2019,
"Megatron-LM", arXiv 1909.08053, section 3):

    h = gelu(x @ w1 + b1)                 w1 and b1 are sharded by columns: no communication
    y = all_reduce_sum(h @ w2) + b2       w2 is sharded by rows, b2 is replicated
"""

import argparse

import dtransformer  # isort: skip  (before TensorFlow, to enable oneDNN)

import numpy as np
import tensorflow as tf

from dtransformer.parallel import collectives

INPUTS, HIDDEN, OUTPUTS, BATCH = 16, 64, 4, 32


def make_groups(mp):
    """Return this rank's model-parallel group and its data-parallel group.

    A model-parallel group consists of consecutive ranks. Every rank must create all groups in the
    same order.
    """
    rank, size = dtransformer.rank(), dtransformer.size()
    if mp < 1 or size % mp:
        raise SystemExit(f"--model-parallel {mp} does not divide the {size} ranks of this job")
    starts = range(0, size, mp)
    model_parallel_groups = [collectives.new_group(range(start, start + mp)) for start in starts]
    data_parallel_groups = [collectives.new_group(range(first, size, mp)) for first in range(mp)]
    return model_parallel_groups[rank // mp], data_parallel_groups[rank % mp]


def make_weights(model_parallel_group):
    """Return this rank's shards of the weights, which do not depend on the number of ranks."""
    rng = np.random.default_rng(0)
    w1 = rng.normal(0, INPUTS**-0.5, [INPUTS, HIDDEN])
    w2 = rng.normal(0, HIDDEN**-0.5, [HIDDEN, OUTPUTS])
    width = HIDDEN // model_parallel_group.size
    shard = slice(model_parallel_group.index * width, (model_parallel_group.index + 1) * width)
    values = {"w1": w1[:, shard], "b1": np.zeros(width), "w2": w2[shard], "b2": np.zeros(OUTPUTS)}
    return {name: tf.Variable(value, dtype="float32") for name, value in values.items()}


def batches(num_steps, data_parallel_group):
    """Yield the local rows of each global batch. Ranks of a model-parallel group get equal rows."""
    rng = np.random.default_rng(1)
    teacher = rng.normal(0, INPUTS**-0.5, [INPUTS, OUTPUTS])
    for _ in range(num_steps):
        x = rng.normal(size=[BATCH, INPUTS])
        y = np.tanh(x @ teacher)
        local = slice(data_parallel_group.index, None, data_parallel_group.size)
        yield tf.constant(x[local], "float32"), tf.constant(y[local], "float32")


def train(mp=1, num_steps=10, learning_rate=0.2):
    """Train and return the loss of every step."""
    model_parallel_group, data_parallel_group = make_groups(mp)
    weights = make_weights(model_parallel_group)

    @tf.function
    def step(x, target):
        with tf.GradientTape() as tape:
            h = tf.nn.gelu(x @ weights["w1"] + weights["b1"])
            y = collectives.all_reduce_sum(h @ weights["w2"], model_parallel_group) + weights["b2"]
            # Collectives differentiate the sum of the losses of all ranks. The mp ranks of a group
            # compute the same loss, so each counts 1 / mp of it, and the sum is the loss of the
            # batch. Without this factor, gradients would be mp times too large, because the
            # gradient of all_reduce_sum adds the gradients of the group.
            local_loss = tf.reduce_sum((y - target) ** 2) / (BATCH * OUTPUTS * mp)
        gradients = tape.gradient(local_loss, weights)
        for name, gradient in gradients.items():
            # Sum the gradient over all ranks with a copy of the weight: the data-parallel group
            # for shards, and all ranks for b2. The scaling of `local_loss` makes it a mean.
            copies = None if name == "b2" else data_parallel_group
            gradient = collectives.all_reduce_sum(gradient, copies)
            weights[name].assign_sub(learning_rate * gradient)
        return collectives.all_reduce_sum(local_loss)

    return [float(step(x, target)) for x, target in batches(num_steps, data_parallel_group)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(  # horovodrun reads --mp as its option --mpi. Use the long form there.
        "--model-parallel",
        "--mp",
        type=int,
        default=1,
        dest="mp",
        help="number of ranks per model-parallel group",
    )
    parser.add_argument("--steps", type=int, default=10, help="number of training steps")
    arguments = parser.parse_args()
    dtransformer.init()
    for step, loss in enumerate(train(arguments.mp, arguments.steps), 1):
        if dtransformer.is_chief():
            print(f"step {step:3d}   loss {loss:.6f}", flush=True)
    dtransformer.shutdown()


if __name__ == "__main__":
    main()
