"""Parts of a training step: buckets of gradients, norms, sums over ranks and correct predictions."""

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers.loss import correct_predictions
from dtransformer.trainers.optimizer.buckets import buckets
from dtransformer.trainers.optimizer.optimizer_step import square_norms
from dtransformer.trainers.optimizer.reduction import reduce_sum
from tests.tolerances import TRAINING


@pytest.mark.parametrize(
    "ids, num_buckets, expected",
    [
        # Without block ids, gradients are split evenly, in order, into at most `num_buckets`.
        ([None] * 6, 3, [[0, 1], [2, 3], [4, 5]]),
        ([None] * 5, 2, [[0, 1, 2], [3, 4]]),
        ([None] * 3, 1, [[0, 1, 2]]),
        ([None] * 2, 8, [[0], [1]]),
        ([], 4, []),
        # With block ids, each block has a bucket, and the other gradients share one.
        ([None, 1, 1, 2, None], 4, [[0, 4], [1, 2], [3]]),
        ([1, 1, 2, 2, 3], 1, [[0, 1], [2, 3], [4]]),
        ([2, 1, 2, 1], 4, [[0, 2], [1, 3]]),
        ([7], 4, [[0]]),
        ([None, 0, None], 2, [[0, 2], [1]]),
    ],
)
def test_buckets_split_gradients_at_blocks(ids, num_buckets, expected):
    assert buckets(ids, num_buckets) == expected


@pytest.mark.parametrize("num_buckets", range(1, 9))
@pytest.mark.parametrize("count", [1, 7, 8, 100])
def test_each_gradient_belongs_to_one_bucket(count, num_buckets):
    rng = np.random.default_rng(count)
    block_ids = [None, *range(5)]
    for ids in ([None] * count, [block_ids[i] for i in rng.integers(0, 6, count)]):
        result = buckets(ids, num_buckets)
        assert sorted(sum(result, [])) == list(range(count))
        assert all(bucket == sorted(bucket) and bucket for bucket in result)
        if set(ids) == {None}:
            assert len(result) <= num_buckets


def test_square_norms_match_numpy():
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape) for shape in ((3, 4), (5,), (2, 2, 2), ())]
    tensors = [tf.constant(array, "float32") for array in arrays]
    squares = square_norms(tensors, ["CPU:0"] * len(tensors))
    assert squares.dtype == tf.float32
    expected = [(array**2).sum() for array in arrays]
    np.testing.assert_allclose(squares, expected, rtol=TRAINING)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_norm_of_16_bit_gradients_does_not_overflow(dtype):
    (square,) = square_norms([tf.fill([100], tf.constant(1000.0, dtype))], ["CPU:0"])
    assert float(square) == pytest.approx(1e8, rel=2e-2)


def test_one_process_reduces_nothing():
    sums = {"loss": tf.constant(2.0), "count": tf.constant(3.0)}
    assert reduce_sum(sums, name="sums") == sums


@pytest.mark.parametrize(
    "logits, labels, expected",
    [
        ([[0.0, 2.0, 1.0], [5.0, 2.0, 1.0]], [1, 2], [1, 0]),
        ([[[0.0, 2.0], [3.0, 2.0]], [[0.0, 2.0], [3.0, 2.0]]], [[1, 1], [0, 0]], [[1, 0], [0, 1]]),
        ([[0.0, -2.0, -1.0]], [0], [1]),
        ([[0.0, 1.0]], [-100], [0]),  # An ignored label is never correct.
    ],
)
@pytest.mark.parametrize("label_type", ["int32", "int64"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_correct_predictions_match_the_labels(logits, labels, expected, label_type, dtype):
    result = correct_predictions(tf.constant(logits, dtype), tf.constant(labels, label_type))
    assert result.dtype == tf.float32
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    "outputs, labels",
    [
        (np.zeros((2, 3)), np.zeros((2, 3))),  # Regression.
        (np.zeros((2, 3)), np.zeros((2, 3), "int32")),
        (np.zeros((2, 3)), np.zeros((2,))),
        (np.zeros((2, 3, 4)), np.zeros((2,), "int32")),
    ],
)
def test_hits_are_none_without_class_labels(outputs, labels):
    assert correct_predictions(tf.constant(outputs), tf.constant(labels)) is None
