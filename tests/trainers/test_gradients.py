"""The parts of a step: how gradients are grouped, scaled and measured; losses and hits."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import CrossEntropyLoss
from dtransformer.trainers import gradients as grads
from dtransformer.trainers.buckets import buckets
from dtransformer.trainers.token_loss import KerasTokenLoss, as_token_loss, hits
from tests.tolerances import TRAINING


@pytest.mark.parametrize(
    "ids, num_buckets, expected",
    [
        # No block speaks: evenly, in order, in at most as many buckets.
        ([None] * 6, 3, [[0, 1], [2, 3], [4, 5]]),
        ([None] * 5, 2, [[0, 1, 2], [3, 4]]),
        ([None] * 3, 1, [[0, 1, 2]]),
        ([None] * 2, 8, [[0], [1]]),
        ([], 4, []),
        # Blocks speak: each bucket together, the others in one of their own.
        ([None, 1, 1, 2, None], 4, [[0, 4], [1, 2], [3]]),
        ([1, 1, 2, 2, 3], 1, [[0, 1], [2, 3], [4]]),
        ([2, 1, 2, 1], 4, [[0, 2], [1, 3]]),
        ([7], 4, [[0]]),
        ([None, 0, None], 2, [[0, 2], [1]]),
    ],
)
def test_buckets(ids, num_buckets, expected):
    assert buckets(ids, num_buckets) == expected


@pytest.mark.parametrize("num_buckets", range(1, 9))
@pytest.mark.parametrize("number", [1, 7, 8, 100])
def test_every_gradient_is_in_one_bucket(number, num_buckets):
    rng = np.random.default_rng(number)
    asked = [None, *range(5)]
    for ids in ([None] * number, [asked[i] for i in rng.integers(0, 6, number)]):
        found = buckets(ids, num_buckets)
        assert sorted(sum(found, [])) == list(range(number))
        assert all(bucket == sorted(bucket) and bucket for bucket in found)
        if set(ids) == {None}:
            assert len(found) <= num_buckets


def rows(values, indices, num_rows):
    values = tf.constant(values)
    return tf.IndexedSlices(values, tf.constant(indices), tf.constant([num_rows, values.shape[1]]))


def test_square_norms_are_those_of_every_gradient():
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape) for shape in ((3, 4), (5,), (2, 2, 2), ())]
    squares = grads.square_norms([tf.constant(array, "float32") for array in arrays])
    for square, array in zip(squares, arrays, strict=True):
        assert square.dtype == tf.float32
        assert float(square) == pytest.approx((array**2).sum(), TRAINING)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_norm_of_16_bit_gradients_does_not_overflow(dtype):
    (square,) = grads.square_norms([tf.fill([100], tf.constant(1000.0, dtype))])
    assert float(square) == pytest.approx(1e8, rel=2e-2)


def test_scale_keeps_rows_as_rows():
    dense, sparse = tf.constant([1.0, -2.0]), rows([[1.0, 2.0], [3.0, 4.0]], [4, 1], 6)
    scaled_dense, scaled_sparse = grads.scale([dense, sparse], tf.constant(0.5))
    np.testing.assert_array_equal(scaled_dense, [0.5, -1.0])
    assert isinstance(scaled_sparse, tf.IndexedSlices)
    expected = 0.5 * tf.convert_to_tensor(sparse).numpy()
    np.testing.assert_array_equal(tf.convert_to_tensor(scaled_sparse), expected)


def test_alone_nothing_is_reduced_and_rows_are_summed():
    dense, sparse = tf.constant([1.0, -2.0]), rows([[1.0, 2.0], [3.0, 4.0]], [1, 1], 3)
    reduced = grads.reduce([dense, sparse], [[0, 1]], [None, None])
    np.testing.assert_array_equal(reduced[0], dense)
    np.testing.assert_array_equal(reduced[1], [[0, 0], [4, 6], [0, 0]])
    sums = {"loss": tf.constant(2.0), "count": tf.constant(3.0)}
    assert grads.reduce_sum(sums, name="sums") == sums


@pytest.mark.parametrize(
    "logits, labels, expected",
    [
        ([[0.0, 2.0, 1.0], [5.0, 2.0, 1.0]], [1, 2], [1, 0]),
        ([[[0.0, 2.0], [3.0, 2.0]], [[0.0, 2.0], [3.0, 2.0]]], [[1, 1], [0, 0]], [[1, 0], [0, 1]]),
        ([[0.0, -2.0, -1.0]], [0], [1]),
        ([[0.0, 1.0]], [-100], [0]),  # an ignored label is no class, and no error
    ],
)
@pytest.mark.parametrize("label_type", ["int32", "int64"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_hits(logits, labels, expected, label_type, dtype):
    found = hits(tf.constant(logits, dtype), tf.constant(labels, label_type))
    assert found.dtype == tf.float32
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "outputs, labels",
    [
        (np.zeros((2, 3)), np.zeros((2, 3))),  # a regression
        (np.zeros((2, 3)), np.zeros((2, 3), "int32")),
        (np.zeros((2, 3)), np.zeros((2,))),
        (np.zeros((2, 3, 4)), np.zeros((2,), "int32")),
    ],
)
def test_no_hits_where_there_are_no_classes(outputs, labels):
    assert hits(tf.constant(outputs), tf.constant(labels)) is None


class TestKerasObjective:
    LOSSES = {
        "mean_squared_error": keras.losses.MeanSquaredError,
        "mae": lambda: "mae",
        "huber": lambda: keras.losses.Huber(delta=0.5),
        "function": lambda: lambda y, p: tf.reduce_mean(tf.abs(y - p) ** 3, -1),
    }

    def test_values_are_those_of_keras(self):
        rng = np.random.default_rng(0)
        y, p = rng.standard_normal((2, 5, 3)).astype("float32")
        for name, make in self.LOSSES.items():
            loss = make()
            values, weights = as_token_loss(loss).per_token(tf.constant(p), tf.constant(y))
            assert values.shape == weights.shape == (5,), name
            np.testing.assert_array_equal(weights, 1.0)
            expected = keras.losses.get(loss)(y, p)
            mean = float(tf.reduce_mean(values))
            assert mean == pytest.approx(float(tf.reduce_mean(expected)), TRAINING), name

    @pytest.mark.parametrize("weight_shape", [(2,), (2, 4)])
    def test_weights_of_sentences_or_tokens(self, weight_shape):
        rng = np.random.default_rng(0)
        logits = tf.constant(rng.standard_normal((2, 4, 5)), "float32")
        labels = tf.constant(rng.integers(0, 5, (2, 4)), "int32")
        given = rng.uniform(0, 2, weight_shape).astype("float32")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        values, weights = as_token_loss(loss).per_token(logits, labels, tf.constant(given))
        expected = np.broadcast_to(given.reshape(*weight_shape, *[1] * (2 - given.ndim)), (2, 4))
        np.testing.assert_allclose(weights, expected)
        log_p = tf.nn.log_softmax(logits).numpy()
        own = np.take_along_axis(log_p, labels.numpy()[..., None], -1)[..., 0]
        np.testing.assert_allclose(values, -own, TRAINING)

    def test_a_mask_of_keras_counts(self):
        """As a `Masking` layer or `Embedding(mask_zero=True)` hands it on."""
        embedding = keras.layers.Embedding(6, 5, mask_zero=True)
        labels = tf.constant([[1, 2, 0], [3, 0, 0]])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        objective = as_token_loss(loss)
        _, weights = objective.per_token(embedding(labels), labels)
        np.testing.assert_array_equal(weights, [[1, 1, 0], [1, 0, 0]])
        given = tf.constant([[2.0, 3.0, 4.0], [5.0, 6.0, 7.0]])
        _, weights = objective.per_token(embedding(labels), labels, given)
        np.testing.assert_array_equal(weights, [[2, 3, 0], [5, 0, 0]])

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_16_bit_outputs_are_compared_in_float32(self, dtype):
        """The square of 1,000 is no float16."""
        outputs = tf.constant([[1000.0]], dtype)
        values, weights = as_token_loss("mse").per_token(outputs, tf.constant([[0.0]]))
        assert values.dtype == weights.dtype == tf.float32
        np.testing.assert_array_equal(values, [1e6])

    @pytest.mark.parametrize("reduction", ["sum", "none", None])
    def test_other_reductions_are_refused(self, reduction):
        loss = keras.losses.MeanSquaredError(reduction=reduction, name="the_loss")
        with pytest.raises(ValueError, match=f"the_loss.*{reduction}.*sum_over_batch_size"):
            KerasTokenLoss(loss)

    @pytest.mark.parametrize("loss", [{"output": "mse"}, ["mse"], ("mse", "mae")])
    def test_several_losses_are_refused(self, loss):
        with pytest.raises(ValueError, match="one loss"):
            as_token_loss(loss)

    def test_an_objective_is_taken_as_it_is(self):
        loss = CrossEntropyLoss()
        assert as_token_loss(loss) is loss
        assert as_token_loss(objective := KerasTokenLoss(keras.losses.Huber())) is objective
