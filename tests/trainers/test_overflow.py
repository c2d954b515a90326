"""If every step overflows in float16, training ends with an error that names the cause."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.models import CausalLM
from dtransformer.trainers import Trainer
from dtransformer.trainers.step_logs import MAX_SKIPPED
from tests.trainers.small import dense_trainer, points

X, Y = points(64)
X = np.abs(X) + 1


@contextlib.contextmanager
def float16():
    """Set the dtype policy `mixed_float16` inside the `with` block."""
    previous_policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(previous_policy)


def make_trainer(scale, optimizer="sgd", **options):
    """Return a trainer of a network whose layer `second` multiplies its inputs by `scale`."""
    kernel = keras.initializers.Constant(scale)
    with float16():
        layers = [
            keras.layers.Dense(4, kernel_initializer="ones", name="first"),
            keras.layers.Dense(4, kernel_initializer=kernel, name="second"),
            keras.layers.Dense(
                1, kernel_initializer=keras.initializers.Constant(0.1), name="third"
            ),
        ]
        network = keras.Sequential([keras.Input((3,)), *layers])
    return dense_trainer(optimizer, network=network, **options)


def fit(trainer, epochs=8):
    return trainer.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0)


class Count(keras.callbacks.Callback):
    steps = 0

    def on_train_batch_begin(self, batch, logs=None):
        self.steps += 1


@pytest.mark.filterwarnings("ignore:The loss of step")
@pytest.mark.parametrize("log_every, steps", [(1, MAX_SKIPPED), (7, 55)])
def test_fifty_skipped_steps_raise_an_error_that_names_the_layer(log_every, steps):
    count = Count()
    pattern = f"last {steps} steps were skipped.*/second'.*mixed_bfloat16"
    with pytest.raises(ValueError, match=pattern):
        make_trainer(6e4, log_every=log_every).fit(
            X, Y, batch_size=8, epochs=8, verbose=0, callbacks=[count]
        )
    assert count.steps == steps


@pytest.mark.filterwarnings("ignore:The loss of step")
def test_skipped_train_on_batch_calls_are_counted():
    trainer = make_trainer(6e4)
    for _ in range(MAX_SKIPPED - 1):
        logs = trainer.train_on_batch(X, Y, return_dict=True)
    assert "skipped_in_a_row" not in logs and logs["skipped_steps"] == MAX_SKIPPED - 1
    with pytest.raises(ValueError, match="last 50 steps were skipped"):
        trainer.train_on_batch(X, Y)


def test_overflowing_gradient_with_finite_outputs_raises_an_error():
    @tf.custom_gradient
    def overflows(x):
        return x, lambda gradient: gradient * np.inf

    with float16():
        layers = [keras.layers.Dense(1), keras.layers.Lambda(overflows)]
        model = keras.Sequential([keras.Input((3,)), *layers])
    with pytest.raises(ValueError, match="overflowed in float16, so the weights no longer change"):
        fit(dense_trainer(network=model))


def test_repeated_overflows_with_progress_raise_no_error():
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(1e-4), initial_scale=2.0**55, dynamic_growth_steps=10
    )
    history = fit(make_trainer(0.1, optimizer), epochs=20).history  # Some steps overflow.
    assert 35 < history["skipped_steps"][-1] and history["loss"][-1] < history["loss"][0]


def test_overflowing_transformer_layer_is_named():
    model = CausalLM(20, hidden_size=8, num_heads=2, num_layers=2, dtype="mixed_float16")
    model.build()
    kernel = next(v for v in model.trainable_variables if "ffn" in v.path or "feed" in v.path)
    kernel.assign(np.full(kernel.shape, 6e4))
    trainer = Trainer(model)
    trainer.compile("sgd")
    ids = np.random.default_rng(0).integers(1, 20, (8, 6))
    path = kernel.path.rpartition("/")[0]
    with pytest.warns(UserWarning, match="The loss of step 1 is"):
        with pytest.raises(ValueError, match=f"is '{path}"):
            trainer.fit(ids, ids, batch_size=8, epochs=60, verbose=0)


@pytest.mark.parametrize("value, expected", [(np.inf, "inf"), (np.nan, "nan")])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_nonfinite_loss_warns_once(value, expected, is_scaled, recwarn):
    trainer = make_trainer(1.0) if is_scaled else dense_trainer()
    x, _ = points(8)
    for _ in range(2):
        trainer.fit(x, np.full((8, 1), value), batch_size=2, epochs=2, verbose=0)
    messages = [
        str(warning.message) for warning in recwarn if "The loss of" in str(warning.message)
    ]
    assert len(messages) == 1 and f"The loss of step 1 is {expected}" in messages[0]
