"""Switch between data and model parallelism inside a network by all-to-all.

    python examples/collectives/switch_parallelism.py
    dtransformer launch -np 2 -- python examples/collectives/switch_parallelism.py

The first and the last layer are small: every rank has their weights and computes its rows. The
grouped layer between them is large: every rank has the weights of some groups of features and
computes them for all rows. An all-to-all changes activations from rows to features:

    [rows / n, features]  --all_to_all-->  [rows, features / n]  --all_to_all-->  back
"""

import argparse

import dtransformer  # isort: skip  (before TensorFlow, to enable oneDNN)

import numpy as np
import tensorflow as tf

from dtransformer.parallel import collectives

INPUTS, GROUPS, WIDTH, BATCH = 16, 8, 32, 32
ROWS_AXIS, FEATURES_AXIS = 0, 1


def make_weights(group):
    """Return this rank's weights, with the local groups of the grouped layer."""
    rng = np.random.default_rng(0)
    features = GROUPS * WIDTH
    first = rng.normal(0, INPUTS**-0.5, [INPUTS, features])
    grouped = rng.normal(0, WIDTH**-0.5, [GROUPS, WIDTH, WIDTH])
    last = rng.normal(0, features**-0.5, [features, 1])
    local_groups = np.split(grouped, group.size)[group.index]
    values = {"first": first, "grouped": local_groups, "last": last}
    return {name: tf.Variable(value, dtype="float32") for name, value in values.items()}


def predict(weights, x, group):
    """Return the outputs of the local rows."""
    hidden = tf.nn.gelu(x @ weights["first"])  # [b / n, f]: all features of the local rows
    hidden = collectives.all_to_all(hidden, FEATURES_AXIS, ROWS_AXIS, group)  # [b, f / n]
    by_group = tf.reshape(hidden, [BATCH, GROUPS // group.size, WIDTH])
    by_group = tf.nn.gelu(tf.einsum("bgi,gij->bgj", by_group, weights["grouped"]))
    hidden = tf.reshape(by_group, [BATCH, -1])  # [b, f / n]: the local features of all rows
    hidden = collectives.all_to_all(hidden, ROWS_AXIS, FEATURES_AXIS, group)  # [b / n, f]
    return hidden @ weights["last"]


def train(group, num_steps=10, learning_rate=0.1):
    """Train on the ranks of a group and return the loss of every step."""
    weights = make_weights(group)

    @tf.function
    def step(x, target):
        with tf.GradientTape() as tape:
            local_loss = tf.reduce_sum((predict(weights, x, group) - target) ** 2) / BATCH
        gradients = tape.gradient(local_loss, weights)
        for name, gradient in gradients.items():
            if name != "grouped":  # The gradient of the grouped layer has all rows already.
                gradient = collectives.all_reduce_sum(gradient, group)
            weights[name].assign_sub(learning_rate * gradient)
        return collectives.all_reduce_sum(local_loss, group)

    rng = np.random.default_rng(1)
    losses = []
    for _ in range(num_steps):
        x = rng.normal(size=[BATCH, INPUTS]).astype("float32")
        target = np.tanh(x[:, :1] - x[:, 1:2])
        x, target = (np.split(array, group.size)[group.index] for array in (x, target))
        losses.append(float(step(tf.constant(x), tf.constant(target))))
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="number of training steps")
    num_steps = parser.parse_args().steps
    dtransformer.init()
    chief_only = collectives.new_group([0])  # All ranks create all groups.
    losses = train(collectives.new_group(range(dtransformer.size())), num_steps)
    if dtransformer.is_chief():
        expected = train(chief_only, num_steps)
        difference = np.abs(np.divide(losses, expected) - 1).max()
        print(f"Ranks: {dtransformer.size()}. Loss: {losses[0]:.6f} to {losses[-1]:.6f}.")
        print(f"Maximum relative difference from one process: {difference:.1e}.", flush=True)
    dtransformer.shutdown()


if __name__ == "__main__":
    main()
