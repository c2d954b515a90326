"""Promise: sharded sequences train with recompute, dropout, 16 bits; wrong ones are told at once."""

import keras
import numpy as np
import pytest

import dtransformer
from dtransformer.layers import MultiHeadAttention
from dtransformer.models import CausalLM
from tests.on_mesh import (
    losses,
    network,
    on_mesh,
    raises,
    start,
    stop,
    trainer_of,
)
from tests.tolerances import TRAINING_16_BIT


def trained(options=None, **fields):
    start(model_parallel=1, context_parallel=2, **fields)
    found = losses(trainer_of(network(**(options or {}))), s=16)
    stop()
    return found


@on_mesh
def test_what_is_recomputed_drops_the_same():
    options = {"dropout_rate": 0.2, "encoder_layers": 1}
    kept = trained(options, context_parallel_mode="all_gather")
    again = trained(options, context_parallel_mode="all_gather", recompute=True)
    np.testing.assert_allclose(again, kept, rtol=1e-6)
    (undropped,) = losses(trainer_of(network()), steps=1, s=16)
    assert abs(kept[0] / undropped - 1) > 1e-4


@pytest.mark.long
@on_mesh
def test_in_16_bits():
    expected = losses(trainer_of(network()), s=16)
    keras.config.set_dtype_policy("mixed_bfloat16")
    found = trained(context_parallel_mode="ring")
    keras.config.set_dtype_policy("float32")
    np.testing.assert_allclose(found, expected, rtol=TRAINING_16_BIT["mixed_bfloat16"])


@on_mesh
def test_a_batch_that_shards_do_not_divide_is_refused_before_a_step():
    start(model_parallel=1, context_parallel=2)
    model = CausalLM(30, hidden_size=16, num_heads=2, num_layers=1)
    ids = np.ones((2, 15), "int32")
    words = ["context_parallel=2", "15", "pad", "16"]
    raises(ValueError, words, lambda: trainer_of(model).train_on_batch(ids, ids))


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
def test_a_layer_that_cannot_be_sharded_is_refused_when_it_is_made(fields, options, words):
    with dtransformer.parallel_config(context_parallel=4, **fields):
        with pytest.raises(ValueError, match=words):
            MultiHeadAttention(48, 6, **options)
