"""One function updates all similar weights, with the same results as Keras' optimizers."""

import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer._compat import uses_weight_decay
from dtransformer.models import CausalLM
from dtransformer.trainers import Muon, Trainer
from dtransformer.trainers.optimizer import update_calls
from dtransformer.trainers.optimizer.update_calls import grouped_calls
from dtransformer.trainers.optimizer.update_group import UpdateGroup

X = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
Y = X[:, :2] - X[:, 2:4]


class HalvedBiasSGD(keras.optimizers.SGD):
    """Custom optimizer that reads the names of weights."""

    def update_step(self, gradient, variable, learning_rate):
        gradient = gradient * (0.5 if "bias" in variable.name else 1.0)
        super().update_step(gradient, variable, learning_rate)


class Momentum(keras.optimizers.Optimizer):
    """Custom optimizer that assigns its states as variables."""

    def build(self, variables):
        super().build(variables)
        self.means = [self.add_variable_from_reference(v, name="mean") for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        mean = self.means[self._get_variable_index(variable)]
        mean.assign(0.9 * mean + gradient)
        self.assign_sub(variable, learning_rate * mean)


def project(weight):
    """Custom constraint."""
    return weight.value * 0.99 if weight.ndim == 2 else weight


def exclude_biases(optimizer):
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


OPTIMIZERS = {
    "AdamW": lambda: exclude_biases(keras.optimizers.AdamW(0.01, weight_decay=0.1, epsilon=1e-3)),
    "all gradients clipped": lambda: keras.optimizers.SGD(0.1, 0.9, global_clipnorm=0.1),
    "each gradient clipped": lambda: keras.optimizers.Lion(0.001, clipnorm=0.1),
    "a schedule": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), epsilon=1e-3, amsgrad=True
    ),
    "states of other shapes": lambda: keras.optimizers.Adafactor(0.01),
    "two kinds of updates": lambda: keras.optimizers.Muon(
        0.01, exclude_layers=["second"], adam_weight_decay=0.1
    ),
    "a scalar for all": lambda: keras.optimizers.Nadam(0.01, epsilon=1e-3),
    "averages": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3, use_ema=True),
    "averages that overwrite weights": lambda: keras.optimizers.Adam(
        0.01, epsilon=1e-3, use_ema=True, ema_momentum=0.6, ema_overwrite_frequency=3
    ),
    "accumulated": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2, clipnorm=0.1),
    "a custom optimizer": lambda: HalvedBiasSGD(0.1),
    "states that are assigned": lambda: Momentum(0.1),
    "a scaled loss, all gradients clipped": lambda: keras.optimizers.SGD(
        0.1, global_clipnorm=0.1, loss_scale_factor=1024.0
    ),
    "a scaled loss, each gradient clipped": lambda: keras.optimizers.SGD(
        0.1, clipnorm=0.1, loss_scale_factor=1024.0
    ),
}
# The quick suite also tests these optimizers with XLA.
QUICK_XLA = "AdamW", "all gradients clipped", "states of other shapes", "two kinds of updates"


def train(optimizer, wrap, depth=4, **options):
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    names = ["first", "second", *(f"dense_{i}" for i in range(2, depth))]
    constraints = {"first": keras.constraints.MaxNorm(1.0), "second": project}
    model = keras.Sequential(
        [
            keras.Input((8,)),
            *(
                keras.layers.Dense(8, "tanh", name=name, kernel_constraint=constraints.get(name))
                for name in names
            ),
            keras.layers.Dense(2),
        ]
    )
    trainer = Trainer(model) if wrap else model
    trainer.compile(optimizer, "mse", **options)
    trainer.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return trainer, model.get_weights()


@functools.cache
def keras_weights(name):
    return train(OPTIMIZERS[name](), wrap=False, jit_compile=False)[1]


@pytest.mark.parametrize(
    "name, jit_compile",
    [
        *((name, False) for name in OPTIMIZERS),
        *(
            pytest.param(name, True, marks=[] if name in QUICK_XLA else [pytest.mark.long])
            for name in OPTIMIZERS
        ),
    ],
)
def test_weights_after_training_match_keras(name, jit_compile, monkeypatch):
    monkeypatch.setattr(update_calls, "_MAX_ELEMENTS", 80)
    _, actual = train(OPTIMIZERS[name](), wrap=True, jit_compile=jit_compile)
    for actual_value, expected_value in zip(actual, keras_weights(name), strict=True):
        np.testing.assert_allclose(actual_value, expected_value, rtol=1e-5, atol=1e-6)


def test_averaged_weights_match_the_ema_formula():
    """One weight has an update group. The averages of all weights are updated."""
    network = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
    network.layers[0].kernel.update_group = UpdateGroup(0.5)
    trainer = Trainer(network)
    trainer.compile(keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.75), "mse")
    expected = None
    for step in range(4):
        trainer.train_on_batch(X[:4], Y[:4])
        current = network.get_weights()
        momentum = 0.75 if step else 0.0
        expected = [
            momentum * average + (1 - momentum) * value
            for average, value in zip(expected or current, current, strict=True)
        ]
        with trainer.averaged_weights():
            for average, value in zip(expected, network.get_weights(), strict=True):
                np.testing.assert_allclose(value, average, rtol=1e-6, atol=1e-7)
        for before, value in zip(current, network.get_weights(), strict=True):
            np.testing.assert_array_equal(value, before)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_adam_is_close_to_adam_in_64_bits(jit_compile):
    """Keras' own update is 1.6e-7 away, because it rounds `1 - beta_2` and powers separately."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    trainer = Trainer(keras.Sequential([keras.Input((500,)), layer]))
    trainer.compile(keras.optimizers.Adam(1e-3), lambda _, y: y, jit_compile=jit_compile)
    value = first = second = np.zeros(500)
    rng = np.random.default_rng(0)
    for step in range(1, 41):
        gradient = rng.normal(size=500).astype("float32")
        trainer.train_on_batch(gradient[None], np.zeros((1, 1)))
        first = first + (gradient - first) * 0.1
        second = second + (gradient.astype("float64") ** 2 - second) * 0.001
        rate = 1e-3 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        value = value - rate * first / (np.sqrt(second) + 1e-7)
    np.testing.assert_allclose(layer.kernel[:, 0], value, rtol=0, atol=6e-8)


@pytest.mark.parametrize(
    "keys, max_elements, expected",
    [
        ("", 9, []),
        ("abc", 9, [[0, 1, 2]]),
        ("abc", 2, [[0, 1], [2]]),
        ("ababab", 9, [[0, 1], [2, 3], [4, 5]]),
        ("eabcabcabcg", 9, [[1, 2, 3], [4, 5, 6], [7, 8, 9], [0, 10]]),
        ("aabaabg", 9, [[0, 1, 2], [3, 4, 5], [6]]),
        ("aaaaa", 9, [[0], [1], [2], [3], [4]]),
    ],
)
def test_calls_group_equal_keys_within_the_limit(keys, max_elements, expected):
    calls = grouped_calls(keys, [1] * len(keys), max_elements)
    assert calls == expected
    assert sorted(i for call in calls for i in call) == list(range(len(keys)))


def test_weights_overwritten_with_gradients_raise_an_error():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
    model.weights[0].overwrite_with_gradient = True
    trainer = Trainer(model)
    trainer.compile("sgd", "mse")
    with pytest.raises(ValueError, match="kernel is overwritten with its gradient.*mixed_bfloat16"):
        trainer.fit(X, Y, verbose=0)


def test_settings_changed_between_fits_apply():
    def weights(wrap):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
        trainer = Trainer(model) if wrap else model
        trainer.compile(keras.optimizers.AdamW(0.01, epsilon=1e-3), "mse")
        trainer.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
        decay = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
        trainer.optimizer.learning_rate = decay
        trainer.fit(X, Y, batch_size=8, shuffle=False, verbose=0)  # A new shape needs a new trace.
        trainer.optimizer.weight_decay = 0.9
        trainer.make_train_function(force=True)
        trainer.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
        return model.get_weights()

    for actual_value, expected_value in zip(weights(True), weights(False), strict=True):
        np.testing.assert_allclose(actual_value, expected_value, rtol=1e-5, atol=1e-6)


def test_multi_optimizer_raises_an_error():
    trainer = Trainer(keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)]))
    multi_optimizer = keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.SGD())
    )
    with pytest.raises(ValueError, match="does not support MultiOptimizer"):
        trainer.compile(multi_optimizer, "mse")


def test_optimizer_built_for_another_network_raises_an_error():
    networks = [keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)]) for _ in range(2)]
    optimizer = keras.optimizers.SGD()
    optimizer.build(networks[1].trainable_variables)
    trainer = Trainer(networks[0])
    trainer.compile(optimizer, "mse")
    with pytest.raises(ValueError, match="SGD was built before compile, for other weights"):
        trainer.fit(np.ones((2, 8)), np.ones((2, 2)), verbose=0)


def test_sparse_inputs_train():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,), sparse=True), keras.layers.Dense(2)])
    trainer = Trainer(model)
    trainer.compile("sgd", "mse")
    logs = trainer.fit(tf.sparse.from_dense(X), Y, batch_size=4, verbose=0).history
    assert np.isfinite(logs["loss"]).all()


def test_biases_are_excluded_from_weight_decay_by_name():
    network = CausalLM(20, hidden_size=8, num_heads=2, num_layers=1, max_length=4)
    network.build()
    optimizer = exclude_biases(keras.optimizers.AdamW(0.01, weight_decay=0.1))
    optimizer.build(network.trainable_variables)
    decays = {
        weight.path: uses_weight_decay(optimizer, weight.value)
        for weight in network.trainable_variables
    }
    assert decays == {path: not path.endswith("bias") for path in decays}
    assert not all(decays.values())


def muon_warnings(optimizer, network):
    trainer = Trainer(network)
    trainer.compile(optimizer)
    ids = np.ones((2, 4), "int32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train_on_batch(ids, ids)
    return [str(warning.message) for warning in caught if "Muon" in str(warning.message)]


def test_warns_if_muon_updates_kernels_of_attention_with_adamw():
    language_model = lambda: CausalLM(9, hidden_size=8, num_heads=2, num_layers=2)
    (text,) = muon_warnings(keras.optimizers.Muon(0.01), language_model())
    # Queries, keys, values and outputs of two blocks.
    assert "block_0/attention/query_kernel and 7 other kernels with AdamW" in text
    assert "Use dtransformer.trainers.Muon" in text
    assert not muon_warnings(Muon(0.01), language_model())
    assert not muon_warnings(keras.optimizers.AdamW(0.01), language_model())
