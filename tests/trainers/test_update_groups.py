"""Update groups have separate rates and weight decay, as parameter groups in PyTorch."""

import keras
import numpy as np
import pytest

from dtransformer.trainers import Trainer
from dtransformer.trainers.optimizer.update_group import UpdateGroup

FIRST, SECOND = UpdateGroup(0.1, 0.5), UpdateGroup(2.0)


def make_trainer(optimizer, **options):
    """Return a trainer of three dense layers. The first two kernels belong to update groups."""
    network = keras.Sequential([keras.layers.Dense(4, name=f"d{i}") for i in range(3)])
    network.build((None, 4))
    rng = np.random.default_rng(0)
    network.set_weights([rng.normal(size=w.shape) for w in network.get_weights()])
    for layer, group in zip(network.layers, (FIRST, SECOND)):
        layer.kernel.update_group = group
    trainer = Trainer(network)
    trainer.compile(optimizer, "mse", **options)
    return trainer


# SGD has no schedule here, because momentum includes the rate in Keras but not in PyTorch.
@pytest.mark.parametrize("name, scheduled", [("AdamW", True), ("AdamW", False), ("SGD", False)])
def test_group_updates_match_torch(name, scheduled):
    torch = pytest.importorskip("torch", reason="the reference environment has PyTorch")
    rng = np.random.default_rng(1)
    batches = rng.normal(size=(4, 8, 4)).astype("float32"), rng.normal(size=(4, 8, 4))
    rates = [0.1, 0.05, 0.05, 0.05] if scheduled else [0.1] * 4
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.1, 0.05])
    options = {"momentum": 0.9} if name == "SGD" else {"weight_decay": 0.01, "epsilon": 1e-8}
    trainer = make_trainer(getattr(keras.optimizers, name)(rate if scheduled else 0.1, **options))
    weights = [torch.nn.Parameter(torch.tensor(w)) for w in trainer.network.get_weights()]
    decay = 0.0 if name == "SGD" else 0.01
    groups = [
        {"params": weights[:1], "factor": 0.1, "weight_decay": decay and 0.5},
        {"params": weights[2:3], "factor": 2.0, "weight_decay": decay},
        {"params": [weights[i] for i in (1, 3, 4, 5)], "factor": 1.0, "weight_decay": decay},
    ]
    if name == "SGD":
        for layer in trainer.network.layers[:1]:
            layer.kernel.update_group = UpdateGroup(0.1)
    optimizer_class = getattr(torch.optim, name)
    torch_optimizer = optimizer_class(
        groups, lr=0.1, **({"momentum": 0.9} if name == "SGD" else {})
    )
    for x, y, rate in zip(*batches, rates):
        trainer.train_on_batch(x, y)
        for group in torch_optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        outputs = torch.tensor(x)
        for kernel, bias in zip(weights[::2], weights[1::2]):
            outputs = outputs @ kernel + bias
        torch_optimizer.zero_grad()
        torch.nn.functional.mse_loss(outputs, torch.tensor(y, dtype=torch.float32)).backward()
        torch_optimizer.step()
    for actual, expected in zip(trainer.network.get_weights(), weights):
        np.testing.assert_allclose(actual, expected.detach().numpy(), rtol=2e-5, atol=1e-5)


def test_optimizers_without_group_support_raise_an_error():
    optimizer = keras.optimizers.Adam(gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="Adam cannot update groups of weights"):
        make_trainer(optimizer).train_on_batch(np.ones((2, 4)), np.ones((2, 4)))
