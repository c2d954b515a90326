"""CrossEntropyLoss matches the reference, and ignored tokens and padding have no effect."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import CrossEntropyLoss
from dtransformer.trainers import Trainer
from tests.layers import reference, reference_weights
from tests.layers.reference_compare import dtype_policy
from tests.tolerances import LOSS, assert_all_close

WIDTH, CLASSES = 13, 10
DTYPES = tuple(LOSS)
POLICY_OF = {"float32": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def compare(dtype, logits, labels, mask=None, mask_type=None, label_type="int32", **options):
    """Compare the loss and the logits' gradient, for logits in a model's type."""
    with dtype_policy(POLICY_OF[dtype]):
        layer = CrossEntropyLoss(**options)
    mask_tensor = None if mask is None else tf.cast(mask, mask_type or "float32")
    logits_given = tf.constant(logits, dtype)
    with tf.GradientTape() as tape:
        tape.watch(logits_given)
        loss = layer(logits_given, tf.constant(labels, label_type), mask_tensor)
    gradient = tape.gradient(loss, logits_given)
    expected, backward = reference.cross_entropy(logits, labels, mask, **options)
    (expected_gradient,), _ = backward(1.0)
    assert loss.dtype == tf.float32 and loss.shape == ()
    np.testing.assert_allclose(float(loss), expected, rtol=LOSS["float32"])
    assert_all_close({"logits": gradient}, {"logits": expected_gradient}, LOSS[dtype])


def data(shape, seed=0):
    rng = np.random.default_rng(seed)
    return reference_weights.numbers(rng, *shape, WIDTH, scale=1.5), rng.integers(0, CLASSES, shape)


@each_dtype
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("vocab_size", [None, CLASSES])
@pytest.mark.parametrize("shape", [(5,), (3, 7), (1, 1)])
def test_matches_the_reference(dtype, label_smoothing, vocab_size, shape):
    logits, labels = data(shape)
    options = dict(label_smoothing=label_smoothing, vocab_size=vocab_size)
    compare(dtype, logits, labels, **options)


@each_dtype
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("vocab_size", [None, CLASSES])
def test_z_loss_matches_the_reference(dtype, label_smoothing, vocab_size):
    options = dict(label_smoothing=label_smoothing, vocab_size=vocab_size, z_loss=0.05)
    compare(dtype, *data((3, 7)), **options)


@each_dtype
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mask_type", ["float32", "int32", "bool", "bfloat16"])
def test_mean_is_over_weighted_tokens(dtype, label_smoothing, mask_type):
    logits, labels = data((4, 6))
    mask = reference_weights.padding_mask(np.random.default_rng(1), 4, 6)
    mask[2] = 0
    compare(dtype, logits, labels, mask, mask_type, label_smoothing=label_smoothing)


@each_dtype
@pytest.mark.parametrize("label_type", ["int32", "int64"])
@pytest.mark.parametrize("ignore_id", [0, 3, -100, -1, 50_000])
def test_ignored_labels_have_no_weight(dtype, label_type, ignore_id):
    """Labels such as -100 are not a class and do not raise an error."""
    logits, labels = data((4, 6), seed=2)
    labels[0, 2:] = ignore_id
    labels[3] = ignore_id
    mask = np.ones((4, 6))
    mask[1, :3] = 0
    options = dict(ignore_id=ignore_id, label_smoothing=0.1, vocab_size=CLASSES)
    compare(dtype, logits, labels, label_type=label_type, **options)
    compare(dtype, logits, labels, mask, label_type=label_type, **options)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_float32_logits_and_masks_keep_their_precision_under_mixed_policies(policy):
    logits, labels = data((4, 6))
    logits = logits + 1e-4 * np.arange(WIDTH)
    mask = np.linspace(0.1, 1.0, 24).reshape(4, 6)
    with dtype_policy(policy):
        layer = CrossEntropyLoss()
    loss = layer(tf.constant(logits, tf.float32), labels, tf.constant(mask, tf.float32))
    expected, _ = reference.cross_entropy(logits, labels, mask)
    assert_all_close({"loss": loss}, {"loss": expected}, LOSS["float32"])


def test_mask_weights_tokens():
    logits, labels = data((2, 3))
    compare("float32", logits, labels, np.array([[0.5, 1.0, 0.0], [2.0, 0.25, 1.0]]))


@each_dtype
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_padded_columns_do_not_change_the_loss(dtype, label_smoothing):
    """Padded columns change no bit of the loss and have no gradient."""
    logits, labels = data((4, 6))
    loss = CrossEntropyLoss(label_smoothing=label_smoothing, vocab_size=CLASSES)
    seen = []
    for fill in (0.0, 3e4, -3e4, tf.as_dtype(dtype).min):
        logits[..., CLASSES:] = fill
        tensor = tf.constant(logits, dtype)
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            value = loss(tensor, labels)
        gradient = tf.cast(tape.gradient(value, tensor), "float32").numpy()
        np.testing.assert_array_equal(gradient[..., CLASSES:], 0.0)
        seen.append((float(value), gradient))
    for value, gradient in seen[1:]:
        assert value == seen[0][0]
        np.testing.assert_array_equal(gradient, seen[0][1])


@each_dtype
@pytest.mark.parametrize("options", [dict(), dict(ignore_id=4, label_smoothing=0.1)])
def test_loss_without_weighted_tokens_is_0(dtype, options):
    logits, labels = data((2, 3))
    mask = np.zeros((2, 3))
    if options:
        labels[:], mask[:] = 4, 1
    compare(dtype, logits, labels, mask, **options)


@each_dtype
def test_large_logits_do_not_overflow(dtype):
    """Logits over nearly the entire float16 range, for right and wrong labels."""
    logits = np.zeros((3, 4))
    logits[:, 1] = 32768.0
    logits[:, 2] = -32768.0
    compare(dtype, logits, np.array([1, 0, 2]))


@each_dtype
def test_many_classes_are_summed_in_float32(dtype):
    """bfloat16 has no number within 0.004 of ln(3000)."""
    logits = np.full((2, 3000), 0.5)
    compare(dtype, logits, np.array([0, 2999]), label_smoothing=0.1)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_compiled_loss_matches_eager(jit_compile):
    logits, labels = data((3, 5))
    options = dict(label_smoothing=0.1, ignore_id=2, vocab_size=CLASSES)
    loss = CrossEntropyLoss(**options)
    leading = [3, 5] if jit_compile else [None, None]
    shapes = [tf.TensorSpec([*leading, WIDTH]), tf.TensorSpec(leading, tf.int32)]

    @tf.function(input_signature=shapes, jit_compile=jit_compile)
    def step(logits, labels):
        value = loss(logits, labels)
        return value, tf.gradients(value, logits)[0]

    value, gradient = step(tf.constant(logits, tf.float32), tf.constant(labels, tf.int32))
    expected, backward = reference.cross_entropy(logits, labels, **options)
    (expected_gradient,), _ = backward(1.0)
    assert_all_close({"loss": value}, {"loss": expected}, LOSS["float32"])
    assert_all_close({"logits": gradient}, {"logits": expected_gradient}, LOSS["float32"])


@pytest.mark.parametrize("vocab_size", [0, -3, 2.5])
def test_invalid_vocab_size_raises(vocab_size):
    with pytest.raises((TypeError, ValueError), match="vocab_size"):
        CrossEntropyLoss(vocab_size=vocab_size)


def test_labels_may_have_a_last_dimension_of_1():
    logits, labels = tf.constant([[1.0, 2.0, 3.0], [0.5, 0.0, 1.0]]), tf.constant([2, 0])
    expected = CrossEntropyLoss()(logits, labels)
    assert CrossEntropyLoss()(logits, labels[:, None]) == expected
    mask = tf.constant([1.0, 0.0])
    expected = CrossEntropyLoss()(logits, labels, mask)
    assert CrossEntropyLoss()(logits, labels[:, None], mask[:, None]) == expected


@pytest.mark.parametrize("shape", [(8,), (8, 1)])
def test_loss_in_keras_compile_matches_trainer(shape):
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    y, histories = np.reshape(np.arange(8) % 3, shape), []
    for loss in (keras.losses.SparseCategoricalCrossentropy(from_logits=True), CrossEntropyLoss()):
        for wrap in (lambda network: network, Trainer):
            keras.utils.set_random_seed(0)
            network = wrap(keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]))
            network.compile("sgd", loss)
            histories.append(network.fit(x, y, epochs=2, verbose=0))
    losses = np.array([history.history["loss"] for history in histories])
    np.testing.assert_allclose(losses, losses[:1].repeat(4, 0), rtol=1e-6)
    accuracy = histories[-1].history["accuracy"]
    assert all(0 <= value <= 1 for value in accuracy)
