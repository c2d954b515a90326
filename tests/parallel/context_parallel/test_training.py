"""Sharded sequences train with recompute, dropout and 16 bits, and bad lengths raise."""

import keras
import numpy as np
import pytest

import dtransformer
from dtransformer.layers import MultiHeadAttention
from dtransformer.models import CausalLM
from tests.on_mesh import (
    losses,
    make_trainer,
    network,
    on_mesh,
    raises,
    start,
    stop,
)
from tests.tolerances import TRAINING_16_BIT


def train(options=None, **fields):
    start(model_parallel=1, context_parallel=2, **fields)
    step_losses = losses(make_trainer(network(**(options or {}))), s=16)
    stop()
    return step_losses


@on_mesh
def test_recompute_repeats_the_dropout_masks():
    options = {"dropout_rate": 0.2, "encoder_layers": 1}
    without_recompute = train(options, context_parallel_mode="all_gather")
    with_recompute = train(options, context_parallel_mode="all_gather", recompute=True)
    np.testing.assert_allclose(with_recompute, without_recompute, rtol=1e-6)
    (loss_without_dropout,) = losses(make_trainer(network()), steps=1, s=16)
    assert abs(without_recompute[0] / loss_without_dropout - 1) > 1e-4


@pytest.mark.long
@on_mesh
def test_16_bit_losses_match_float32():
    expected = losses(make_trainer(network()), s=16)
    keras.config.set_dtype_policy("mixed_bfloat16")
    actual = train(context_parallel_mode="ring")
    keras.config.set_dtype_policy("float32")
    np.testing.assert_allclose(actual, expected, rtol=TRAINING_16_BIT["mixed_bfloat16"])


@on_mesh
def test_rejects_a_length_that_shards_do_not_divide_before_a_step():
    start(model_parallel=1, context_parallel=2)
    model = CausalLM(30, hidden_size=16, num_heads=2, num_layers=1)
    ids = np.ones((2, 15), "int32")
    words = ["context_parallel=2", "15", "Pad", "16"]
    raises(ValueError, words, lambda: make_trainer(model).train_on_batch(ids, ids))


@pytest.mark.parametrize(
    "fields, options, words",
    [
        (
            {"context_parallel_mode": "ulysses"},
            {},
            "divides heads over `context_parallel=4`.*6 heads",
        ),
        ({}, {"implementation": "reference"}, "'reference'` does not support .*context_parallel=4"),
    ],
)
def test_constructor_rejects_layers_that_cannot_be_sharded(fields, options, words):
    with dtransformer.parallel_config(context_parallel=4, **fields):
        with pytest.raises(ValueError, match=words):
            MultiHeadAttention(48, 6, **options)
