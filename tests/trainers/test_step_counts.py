"""A training step executes few operations per block and per weight."""

import keras
import numpy as np
import pytest

from dtransformer.models import CausalLM
from dtransformer.trainers import Trainer
from harness.executed_operations import count_operations, counts_by_block, sums

IDS = np.random.default_rng(0).integers(1, 20, (2, 9))
# Operations of a block in a step, with its gradients, gradient norms and update.
LIMITS = {
    False: {"executed": 215, "kernels": 180, "programs": 0},
    True: {"executed": 4, "kernels": 1, "programs": 3},
}


def make_step(jit_compile, num_layers):
    """Return a function that trains on a batch, after the first two steps."""
    network = CausalLM(
        20, hidden_size=8, num_heads=2, num_layers=num_layers, dropout_rate=0.0, pad_id=None
    )
    trainer = Trainer(network)
    optimizer = keras.optimizers.AdamW(1e-3, global_clipnorm=1.0, name="update")
    trainer.compile(optimizer, jit_compile=jit_compile)

    def step():
        trainer.train_on_batch(IDS[:, :-1], IDS[:, 1:])

    step()
    step()
    return trainer, step


@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.long)])
def test_operations_per_block_stay_below_the_limits(jit_compile):
    def count(num_layers):
        _, step = make_step(jit_compile, num_layers)
        return count_operations(step)

    # With one block, no gradients are stacked to measure their norms.
    per_block, _ = counts_by_block(count, (2, 4))
    for name, number in sums(per_block).items():
        assert number <= LIMITS[jit_compile][name], (name, per_block)


def test_adamw_executes_at_most_five_operations_per_weight():
    trainer, step = make_step(False, 2)
    counts = count_operations(step, "update/")
    num_weights = len(trainer.trainable_variables)
    assert counts["ResourceApplyAdam"] == num_weights
    assert sum(counts.values()) <= 5 * num_weights
