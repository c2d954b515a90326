"""Recompute reduces a step's memory and does not change a bit of its results."""

import keras
import numpy as np
import pytest

from dtransformer import TransformerRecomputeConfig, parallel_config
from dtransformer.layers import CrossEntropyLoss
from dtransformer.layers.block import TransformerBlock, spread_evenly
from dtransformer.models import TranslationTransformer
from dtransformer.trainers import Trainer
from tests.peak_memory import peak_of_a_second_step
from tests.trainers.small import VOCAB, sentences

SIZES = {"hidden_size": 16, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 2}


def train(recompute=False, **options):
    """Return losses, gradient norms and weights after three steps with dropout."""
    with parallel_config(recompute=recompute):
        trainer = Trainer(TranslationTransformer(VOCAB, **SIZES, **options))
        trainer.compile(keras.optimizers.SGD(0.1, momentum=0.9), CrossEntropyLoss(0.1, ignore_id=0))
        inputs, labels = sentences()
        logs = [trainer.train_on_batch(inputs, labels, return_dict=True) for _ in range(3)]
        numbers = [[float(log[name]) for name in ("step_loss", "gradient_norm")] for log in logs]
        return numbers, trainer.network.get_weights(), trainer


@pytest.fixture(scope="module")
def without_recompute():
    return train()


@pytest.fixture(scope="module")
def with_recompute():
    return train(True)


def assert_same(actual, expected):
    """Assert bitwise equality of losses, norms and weights."""
    assert actual[0] == expected[0]
    for weight, expected_weight in zip(actual[1], expected[1], strict=True):
        np.testing.assert_array_equal(weight, expected_weight)


def test_full_recompute_is_bitwise_equal(with_recompute, without_recompute):
    assert_same(with_recompute, without_recompute)


@pytest.mark.parametrize(
    "recompute",
    [
        TransformerRecomputeConfig(recompute=True, mp_comm_recompute=False),
        TransformerRecomputeConfig(select=("attention",)),
        TransformerRecomputeConfig(select=("feed_forward", "norm")),
    ],
    ids=["without_sums", "attention", "feed_forward_and_norm"],
)
def test_selective_recompute_is_bitwise_equal(recompute, without_recompute):
    assert_same(train(recompute), without_recompute)


@pytest.mark.long
def test_recompute_in_16_bits_is_bitwise_equal():
    assert_same(train(True, dtype="mixed_float16"), train(dtype="mixed_float16"))


def test_recompute_of_single_blocks(without_recompute):
    def every_second(network, layer_id, **others):
        spread_evenly(network, layer_id, **others)
        network.recompute(layer_id % 2 == 1)

    numbers, _, trainer = train(lambda_func=every_second)
    assert numbers == without_recompute[0]
    layers = trainer.network._flatten_layers()
    blocks = [layer for layer in layers if isinstance(layer, TransformerBlock)]
    assert {block.path[-15:]: block.is_recomputed for block in blocks} == {
        "encoder/block_0": False,
        "decoder/block_0": False,
        "decoder/block_1": True,
    }


def test_predict_and_evaluate_are_unchanged(without_recompute, with_recompute):
    inputs, labels = sentences()
    expected, trainer = without_recompute[2], with_recompute[2]
    outputs, sums = (
        expected.predict(inputs, verbose=0),
        expected.evaluate(inputs, labels, verbose=0),
    )
    with parallel_config(recompute=True):
        np.testing.assert_array_equal(trainer.predict(inputs, verbose=0), outputs)
        assert trainer.evaluate(inputs, labels, verbose=0) == sums


@pytest.mark.long
def test_recompute_with_micro_batches_is_bitwise_equal():
    with parallel_config(micro_batch_num=2):
        expected, actual = train(), train(True)
    assert actual[0] == expected[0]


def peak_of_a_step(recompute):
    """Return a step's peak memory in bytes above the persistent memory."""
    with parallel_config(recompute=recompute):
        sizes = {"encoder_layers": 4, "decoder_layers": 4, "hidden_size": 64, "num_heads": 4}
        trainer = Trainer(TranslationTransformer(VOCAB, **sizes))
        trainer.compile(keras.optimizers.SGD(), CrossEntropyLoss(ignore_id=0))
        ids = np.ones([32, 64], "int32")

        def step():
            trainer.train_on_batch({"source": ids, "target": ids}, ids)

        return peak_of_a_second_step(step)


@pytest.mark.long
def test_recompute_reduces_peak_memory():
    peak = peak_of_a_step(False)
    assert peak_of_a_step(True) < 0.3 * peak  # An eighth, plus the block being recomputed.
    attention = TransformerRecomputeConfig(select=("attention",))
    # Scores, probabilities and the dropout mask: 2 · 4 + 1 bytes per score.
    squares = 12 * 32 * 4 * 64 * 64
    assert peak_of_a_step(attention) < peak - 0.75 * 9 * squares
