"""Optimizer states in bfloat16: exact updates, unbiased rounding, the same bits for every layout."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtransformer
from dtransformer.trainers import Muon, Trainer
from dtransformer.trainers.optimizer.stochastic_rounding import (
    ElementBits,
    StateRounding,
    round_to_bfloat16,
)

X = np.random.default_rng(0).normal(size=(16, 12)).astype("float32")
Y = X[:, :4] - X[:, 4:8]
OPTIMIZERS = {
    "AdamW": lambda: keras.optimizers.AdamW(0.02, weight_decay=0.1),
    "Adam with averages": lambda: keras.optimizers.Adam(0.02, amsgrad=True, use_ema=True),
    "SGD": lambda: keras.optimizers.SGD(0.05, 0.9, nesterov=True),
    "Muon": lambda: Muon(0.05, weight_decay=0.1),
    "LossScaleOptimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Lion(0.005)),
}


def make_trainer(optimizer, state_dtype="bfloat16", seed=0, **options):
    keras.utils.set_random_seed(0)
    dtransformer.set_seed(seed)
    with dtransformer.parallel_config(optimizer_state_dtype=state_dtype):
        hidden = [keras.layers.Dense(12, "tanh") for _ in range(3)]
        trainer = Trainer(keras.Sequential([keras.Input((12,)), *hidden, keras.layers.Dense(4)]))
        trainer.compile(optimizer, "mse", **options)
    return trainer


def train(trainer, steps, state_dtype="bfloat16"):
    with dtransformer.parallel_config(optimizer_state_dtype=state_dtype):
        return [trainer.train_on_batch(X, Y) for _ in range(steps)]


def state_values(trainer):
    return [np.array(tf.cast(v.value, "float64")) for v in trainer.optimizer.variables]


@functools.cache
def float32_losses(name):
    return train(make_trainer(OPTIMIZERS[name](), "float32"), 60, "float32")


def test_mean_of_rounded_values_is_the_value():
    """The mean over all 2¹⁶ equally probable bits has no error at all."""
    bits = tf.range(2**16, dtype="int64")[:, None]
    for value in (1.0000001, -3.1415927, 0.1, 1e-30, -65504.9, 2.0):
        x = tf.fill([2**16, 1], tf.constant(value, "float32"))
        rounded = np.array(tf.cast(round_to_bfloat16(x, tf.cast(bits, "uint32")), "float64"))
        assert rounded.mean() == float(x[0, 0])
        assert len(np.unique(rounded)) == 1 + (np.unique(rounded)[0] != float(x[0, 0]))


def test_infinity_and_nan_stay():
    x = tf.constant([np.inf, -np.inf, np.nan, -np.nan], "float32")
    for bits in (0, 2**16 - 1):
        rounded = round_to_bfloat16(x, tf.fill([4], tf.constant(bits, "uint32")))
        np.testing.assert_array_equal(np.array(tf.cast(rounded, "float32")), x)


def element_bits(part, seed=0, step=0, count=2):
    dtransformer.set_seed(seed)
    keys = StateRounding([], {}).keys(tf.constant(step, "int64"))
    halves = part.halves(tf.constant(part.numbers, "uint32"), keys, count)
    return [np.array(half, "int64") for half in halves]


def test_bits_are_uniform_and_independent():
    """Means, variances and correlations of 40,000 bits are within five standard deviations."""
    shape = (200, 200)
    part = ElementBits.create("kernel", shape, shape, ((0, 200), (0, 200)), None)
    other = ElementBits.create("bias", shape, shape, ((0, 200), (0, 200)), None)
    samples = element_bits(part, count=3) + element_bits(part, step=1) + element_bits(part, seed=1)
    samples += element_bits(other)
    samples.append(np.roll(samples[0], 1))
    samples.append(samples[0].T)
    samples = [(sample.ravel() + 0.5) / 2**16 for sample in samples]
    for sample in samples:
        assert abs(sample.mean() - 0.5) < 5 * (1 / 12 / 40_000) ** 0.5
        assert abs(sample.var() - 1 / 12) < 5 * (1 / 180 / 40_000) ** 0.5
    # The transposed sample shares its diagonal with the first one.
    correlations = np.corrcoef(samples)[np.triu_indices(len(samples), 1)]
    assert abs(correlations).max() < 5 / 200 + 1 / 200


@pytest.mark.parametrize(
    "bounds, flat_range",
    [
        (((2, 5), (0, 5), (2, 4)), None),
        (((0, 6), (0, 5), (0, 4)), (17, 91)),
        (((0, 6), (0, 5), (0, 4)), (17, 18)),
        (((0, 6), (0, 5), (0, 4)), (40, 40)),
        (((0, 6), (0, 5), (2, 4)), (7, 42)),
        (((0, 6), (0, 5), (0, 4)), (100, 150)),  # 30 elements of padding
    ],
)
def test_shards_have_the_bits_of_the_full_weight(bounds, flat_range):
    shape = (6, 5, 4)
    full = ElementBits.create("kernel", shape, shape, ((0, 6), (0, 5), (0, 4)), None)
    part_shape = tuple(stop - start for start, stop in bounds)
    if flat_range is not None:
        part_shape = (flat_range[1] - flat_range[0],)
    part = ElementBits.create("kernel", shape, part_shape, bounds, flat_range)
    for bits, actual in zip(element_bits(full, 3, 5), element_bits(part, 3, 5)):
        expected = bits[tuple(slice(*bound) for bound in bounds)]
        if flat_range is not None:
            expected = expected.ravel()[slice(*flat_range)]
            actual = actual[: len(expected)]
        np.testing.assert_array_equal(actual, expected)


def test_padding_of_a_vocabulary_does_not_change_other_bits():
    full = ElementBits.create("kernel", (4, 5), (4, 5), ((0, 4), (0, 5)), None)
    part = ElementBits.create("kernel", (4, 5), (4, 3), ((0, 4), (3, 6)), None)
    for bits, actual in zip(element_bits(full), element_bits(part)):
        np.testing.assert_array_equal(actual[:, :2], bits[:, 3:])


def test_first_update_equals_float32_and_states_are_neighbors():
    """Updates compute in float32: only stored states are rounded, by less than one unit."""
    exact = make_trainer(OPTIMIZERS["AdamW"](), "float32")
    rounded = make_trainer(OPTIMIZERS["AdamW"]())
    train(exact, 1, "float32")
    train(rounded, 1)
    for actual, expected in zip(rounded.get_weights(), exact.get_weights(), strict=True):
        np.testing.assert_array_equal(actual, expected)
    errors = []
    for actual, expected in zip(state_values(rounded)[2:], state_values(exact)[2:], strict=True):
        unit = 2.0 ** (np.floor(np.log2(np.maximum(abs(expected), 1e-30))) - 7)
        assert (abs(actual - expected) < unit).all()
        errors.append(((actual - expected) / unit).ravel())
    errors = np.concatenate(errors)
    assert errors.std() > 0.2  # Most states are no bfloat16 numbers.
    assert abs(errors.mean()) < 5 * errors.std() / len(errors) ** 0.5


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_follow_float32_states(name):
    """After 60 steps the loss is within 2 % of the initial loss."""
    trainer = make_trainer(OPTIMIZERS[name]())
    losses = train(trainer, 60)
    expected = float32_losses(name)
    assert expected[-1] < 0.3 * expected[0]
    np.testing.assert_allclose(losses, expected, rtol=0, atol=0.02 * expected[0])
    states = [v for v in trainer.optimizer.variables if v.shape.rank]
    assert {v.dtype for v in states} == (
        {"bfloat16", "float32"} if name == "Adam with averages" else {"bfloat16"}
    )


def test_memory_of_states_halves():
    reports = {}
    for dtype in ("float32", "bfloat16"):
        trainer = make_trainer(OPTIMIZERS["AdamW"](), dtype)
        train(trainer, 1, dtype)
        with dtransformer.parallel_config(optimizer_state_dtype=dtype):
            reports[dtype] = trainer.memory_report()["optimizer states"]
        assert reports[dtype].planned == reports[dtype].measured
    assert reports["float32"].measured == 2 * reports["bfloat16"].measured > 0


@pytest.mark.parametrize("jit_compile", [False, True])
def test_resumed_run_is_equal_to_the_last_bit(tmp_path, jit_compile):
    trainer = make_trainer(OPTIMIZERS["AdamW"](), seed=3, jit_compile=jit_compile)
    train(trainer, 5)
    trainer.save(tmp_path / "checkpoint")
    train(trainer, 5)
    resumed = make_trainer(OPTIMIZERS["AdamW"](), seed=4, jit_compile=jit_compile)
    train(resumed, 2)  # These steps are traced with another seed.
    with dtransformer.parallel_config(optimizer_state_dtype="bfloat16"):
        resumed.restore(tmp_path / "checkpoint")
    train(resumed, 5)
    for actual, expected in zip(resumed.get_weights(), trainer.get_weights(), strict=True):
        np.testing.assert_array_equal(actual, expected)
    for actual, expected in zip(state_values(resumed), state_values(trainer), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("saved, restored", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_checkpoints_load_into_states_of_the_other_type(tmp_path, saved, restored):
    first = make_trainer(OPTIMIZERS["AdamW"](), saved)
    train(first, 2, saved)
    first.save(tmp_path / "checkpoint")
    second = make_trainer(OPTIMIZERS["AdamW"](), restored)
    train(second, 1, restored)
    with dtransformer.parallel_config(optimizer_state_dtype=restored):
        second.restore(tmp_path / "checkpoint")
    for actual, expected in zip(state_values(second)[2:], state_values(first)[2:], strict=True):
        np.testing.assert_array_equal(
            actual, np.array(tf.cast(tf.cast(expected, "bfloat16"), "float64"))
        )


def test_optimizers_without_separate_states_raise_an_error():
    for optimizer, options in (
        (keras.optimizers.Nadam(), {}),
        (keras.optimizers.Adam(), {"run_eagerly": True}),
    ):
        with pytest.raises(ValueError, match="cannot round updates to bfloat16"):
            train(make_trainer(optimizer, **options), 1)


def test_built_optimizers_with_float32_states_raise_an_error():
    trainer = make_trainer(optimizer := keras.optimizers.Adam())
    optimizer.build(trainer.network.trainable_variables)
    with pytest.raises(ValueError, match="was built before compile, without the bfloat16 states"):
        train(trainer, 1)
