"""Learning-rate schedules: formulas, boundary cases and invalid arguments."""

import doctest
import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.trainers import lr_schedules

PEAK, WARMUP, TOTAL, FINAL = 0.3, 5, 21, 0.02
DECAY = dict(warmup_steps=WARMUP, total_steps=TOTAL, final_learning_rate=FINAL)


def inverse_sqrt(step):
    return PEAK * min((step + 1) / WARMUP, math.sqrt(WARMUP / (step + 1)))


def linear(step):
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    remaining = max(TOTAL - step, 0) / (TOTAL - WARMUP)
    return FINAL + (PEAK - FINAL) * remaining


def cosine(step):
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    progress = min((step - WARMUP) / (TOTAL - WARMUP), 1.0)
    return FINAL + (PEAK - FINAL) * (1 + math.cos(math.pi * progress)) / 2


def constant(step):
    return PEAK * min((step + 1) / WARMUP, 1.0)


CASES = [
    pytest.param("inverse_sqrt", dict(warmup_steps=WARMUP), inverse_sqrt, id="inverse_sqrt"),
    pytest.param("linear", DECAY, linear, id="linear"),
    pytest.param("cosine", DECAY, cosine, id="cosine"),
    pytest.param("constant", dict(warmup_steps=WARMUP), constant, id="constant"),
]
STEPS = [0, 1, WARMUP - 1, WARMUP, WARMUP + 1, 13, TOTAL - 1, TOTAL, TOTAL + 1, 10**6]


@pytest.mark.parametrize("name, arguments, formula", CASES)
class TestEverySchedule:
    def test_learning_rates_match_the_formula_at_boundaries(self, name, arguments, formula):
        schedule = lr_schedules.get(name, peak_learning_rate=PEAK, **arguments)
        actual = [float(schedule(step)) for step in STEPS]
        np.testing.assert_allclose(actual, [formula(step) for step in STEPS], rtol=1e-6)

    def test_tensor_steps_give_the_same_numbers_compiled(self, name, arguments, formula):
        schedule = lr_schedules.get(name, peak_learning_rate=PEAK, **arguments)
        compiled = tf.function(lambda step: schedule(step), jit_compile=True)
        step = tf.Variable(0, dtype=tf.int64)
        for value in STEPS:
            step.assign(value)
            rate = compiled(step.read_value())
            assert rate.dtype == tf.float32 and rate.shape == ()
            assert schedule(value).dtype == tf.float32
            np.testing.assert_allclose(rate, formula(value), rtol=2e-6)

    def test_survives_json(self, name, arguments, formula):
        schedule = lr_schedules.get(name, peak_learning_rate=PEAK, **arguments)
        stored = json.dumps(keras.optimizers.schedules.serialize(schedule))
        restored = keras.optimizers.schedules.deserialize(json.loads(stored))
        assert type(restored) is type(schedule)
        assert restored.get_config() == schedule.get_config()

    def test_drives_an_optimizer(self, name, arguments, formula):
        schedule = lr_schedules.get(name, peak_learning_rate=PEAK, **arguments)
        optimizer = keras.optimizers.SGD(schedule)
        weight = keras.Variable(0.0)
        for _ in range(7):
            optimizer.apply([tf.constant(1.0)], [weight])
        expected = -sum(formula(step) for step in range(7))
        np.testing.assert_allclose(float(weight), expected, rtol=1e-5)

    def test_without_warmup_the_first_step_has_the_peak(self, name, arguments, formula):
        arguments = {**arguments, "warmup_steps": 0}
        schedule = lr_schedules.get(name, peak_learning_rate=PEAK, **arguments)
        np.testing.assert_allclose(float(schedule(0)), PEAK, rtol=1e-6)
        assert 0.0 < float(schedule(1)) <= float(schedule(0))

    @pytest.mark.parametrize(
        "argument, value",
        [
            ("peak_learning_rate", 0.0),
            ("peak_learning_rate", -1e-3),
            ("peak_learning_rate", math.nan),
            ("peak_learning_rate", "1e-4"),
            ("peak_learning_rate", True),
            ("warmup_steps", -1),
            ("warmup_steps", 2.5),
            ("warmup_steps", None),
            ("warmup_steps", False),
        ],
    )
    def test_invalid_argument_is_named(self, name, arguments, formula, argument, value):
        arguments = {"peak_learning_rate": PEAK, **arguments, argument: value}
        with pytest.raises(ValueError) as error:
            lr_schedules.get(name, **arguments)
        assert argument in str(error.value) and repr(value) in str(error.value)


@pytest.mark.parametrize("name", ["linear", "cosine"])
@pytest.mark.parametrize(
    "argument, value",
    [
        ("total_steps", WARMUP),
        ("total_steps", 0),
        ("total_steps", 30.0),
        ("final_learning_rate", -0.1),
        ("final_learning_rate", math.inf),
        ("final_learning_rate", 2 * PEAK),
    ],
)
def test_invalid_decay_is_named(name, argument, value):
    with pytest.raises(ValueError) as error:
        lr_schedules.get(name, peak_learning_rate=PEAK, **{**DECAY, argument: value})
    assert argument in str(error.value) and repr(value) in str(error.value)


@pytest.mark.parametrize("name", ["liner", "", None, 3])
def test_unknown_name_suggests_similar_or_all_names(name):
    with pytest.raises(ValueError) as error:
        lr_schedules.get(name, peak_learning_rate=PEAK)
    for suggestion in (
        ("linear",) if name == "liner" else ("constant", "cosine", "inverse_sqrt", "linear")
    ):
        assert suggestion in str(error.value)


def test_unknown_and_missing_arguments_are_named():
    with pytest.raises(ValueError, match="warmup_steps: .*'warmup'"):
        lr_schedules.get("constant", peak_learning_rate=PEAK, warmup_steps=3, warmup=3)
    with pytest.raises(ValueError, match="total_steps"):
        lr_schedules.get("linear", peak_learning_rate=PEAK, warmup_steps=3)


def test_examples_in_the_docstrings():
    result = doctest.testmod(lr_schedules)
    assert result.attempted > 10 and result.failed == 0
