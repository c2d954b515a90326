"""Train with a parameter server: rank 0 stores and updates the weights for all ranks.

    python examples/collectives/parameter_server.py
    dtransformer launch -np 2 -- python examples/collectives/parameter_server.py

In every step rank 0 broadcasts the weights. Each rank computes the gradients of its rows, which
are summed on rank 0. Only rank 0 has an optimizer and its states.
"""

import argparse

import dtransformer  # isort: skip  (before TensorFlow, to enable oneDNN)

import keras
import numpy as np
import tensorflow as tf

from dtransformer.parallel import collectives

INPUTS, HIDDEN, BATCH = 16, 64, 32
SERVER = 0  # Position of the parameter server in its group.


def make_weights():
    """Return the initial weights."""
    rng = np.random.default_rng(0)
    shapes = {"w1": [INPUTS, HIDDEN], "b1": [HIDDEN], "w2": [HIDDEN, 1]}
    return {name: tf.Variable(rng.normal(0, 0.2, s), dtype="float32") for name, s in shapes.items()}


def local_loss(weights, x, target):
    """Return this rank's part of the mean squared error of the global batch."""
    hidden = tf.nn.gelu(x @ weights["w1"] + weights["b1"])
    return tf.reduce_sum((hidden @ weights["w2"] - target) ** 2) / BATCH


def train(group, num_steps=10):
    """Train on the ranks of a group and return the loss of every step."""
    is_server = group.index == SERVER
    weights = make_weights()  # Workers use these tensors for their shapes only.
    optimizer = keras.optimizers.Adam(1e-2) if is_server else None
    if is_server:
        optimizer.build(list(weights.values()))

    @tf.function
    def step(x, target):
        local = {name: collectives.broadcast(w, SERVER, group) for name, w in weights.items()}
        with tf.GradientTape() as tape:
            tape.watch(local)
            loss = local_loss(local, x, target)
        gradients = tape.gradient(loss, local)
        sums = [collectives.reduce_sum(gradients[name], SERVER, group) for name in weights]
        if is_server:
            optimizer.apply_gradients(zip(sums, weights.values()))
        return collectives.all_reduce_sum(loss, group)

    rng = np.random.default_rng(1)
    losses = []
    for _ in range(num_steps):
        x = rng.normal(size=[BATCH, INPUTS]).astype("float32")
        target = np.tanh(x[:, :1] - x[:, 1:2])
        rows = slice(group.index, None, group.size)
        losses.append(float(step(tf.constant(x[rows]), tf.constant(target[rows]))))
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="number of training steps")
    num_steps = parser.parse_args().steps
    dtransformer.init()
    server_only = collectives.new_group([SERVER])  # All ranks create all groups.
    losses = train(collectives.new_group(range(dtransformer.size())), num_steps)
    if dtransformer.is_chief():
        expected = train(server_only, num_steps)
        difference = np.abs(np.divide(losses, expected) - 1).max()
        print(f"Ranks: {dtransformer.size()}. Loss: {losses[0]:.6f} to {losses[-1]:.6f}.")
        print(f"Maximum relative difference from one process: {difference:.1e}.", flush=True)
    dtransformer.shutdown()


if __name__ == "__main__":
    main()
