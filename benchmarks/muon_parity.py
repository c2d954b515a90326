"""Compare updates of `trainers.Muon` with `torch.optim.Muon`.

Matrices start equal and get the same random gradients in 20 updates. The difference of the matrices is
relative to their change. PyTorch computes Newton–Schulz in bfloat16. For the comparison in float32, its
conversion to bfloat16 is replaced.

    python benchmarks/muon_parity.py
"""

import argparse
import itertools
import json
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
import torch

from dtransformer.trainers import Muon

SHAPES = (128, 512), (512, 128), (128, 128)
STEPS = 20
# adjust_lr_fn of PyTorch, rms_rate of this library, learning rate.
SCALES = ("original", None, 0.02), ("match_rms_adamw", 0.2, 3e-3)


class TypedMuon(Muon):
    """Muon with products in a given type, also on CPUs."""

    products = "float32"

    def zeropower_via_newtonschulz5(self, x, steps, dtype="float32"):
        return super().zeropower_via_newtonschulz5(x, steps, self.products)


def train(shape, adjust_lr_fn, rms_rate, learning_rate, products):
    """Return the initial matrix and both results."""
    start = 0.02 * np.random.default_rng(0).normal(size=shape).astype("float32")
    weight = keras.Variable(start, name="kernel")
    # PyTorch stores kernels as [outputs, inputs].
    reference = torch.nn.Parameter(torch.tensor(start.T.copy()))
    optimizer = TypedMuon(learning_rate, weight_decay=0.1, rms_rate=rms_rate)
    optimizer.products = products
    torch_optimizer = torch.optim.Muon(
        [reference], lr=learning_rate, weight_decay=0.1, adjust_lr_fn=adjust_lr_fn
    )
    for step in range(STEPS):
        gradient = np.random.default_rng(step + 1).normal(size=shape).astype("float32")
        optimizer.apply([tf.constant(gradient)], [weight])
        reference.grad = torch.tensor(gradient.T.copy())
        torch_optimizer.step()
    return start, weight.numpy(), reference.detach().numpy().T


def main():
    """Print the largest difference for each type of products and each scale as JSON."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    rows = []
    for products, scale in itertools.product(("float32", "bfloat16"), SCALES):
        differences = []
        for shape in SHAPES:
            with mock.patch.object(torch.Tensor, "bfloat16", _conversion(products)):
                start, actual, expected = train(shape, *scale, products)
            change = np.linalg.norm(expected - start)
            differences.append(np.linalg.norm(actual - expected) / change)
        row = {"products": products, "adjust_lr_fn": scale[0], "rms_rate": scale[1]}
        rows.append({**row, "largest_difference": float(max(differences))})
    print(json.dumps(rows, indent=1))


def _conversion(products):
    return torch.Tensor.bfloat16 if products == "bfloat16" else torch.Tensor.clone


if __name__ == "__main__":
    main()
