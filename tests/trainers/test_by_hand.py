"""A trainer matches training steps written with NumPy and plain TensorFlow, for all kinds of data."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtransformer
from tests.tolerances import TRAINING, TRAINING_16_BIT, assert_all_close
from tests.trainers.small import (
    BATCH,
    PAD,
    RATE,
    SMOOTHING,
    VOCAB,
    Record,
    batches,
    dataset,
    get_weights_by_path,
    sentences,
    small_model,
    translation_trainer,
)


def sums_by_hand(logits, labels, weights=None):
    """Return the sums of losses, of correct tokens and of weights, by NumPy in float64."""
    logits = np.asarray(logits, "float64")
    log_p = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    label_log_p = np.take_along_axis(log_p, labels[..., None], -1)[..., 0]
    losses = -(1 - SMOOTHING) * label_log_p - SMOOTHING * log_p.mean(-1)
    weights = (labels != PAD) * (1.0 if weights is None else weights)
    correct = log_p.argmax(-1) == labels
    return (losses * weights).sum(), (correct * weights).sum(), weights.sum()


def train_by_hand(network, inputs, labels, epochs):
    """Train by plain gradient descent. Return a dict of the expected logs."""
    logs = {"step_loss": [], "gradient_norm": [], "loss": [], "accuracy": []}
    variables = network.trainable_variables
    for _ in range(epochs):
        totals = np.zeros(3)
        for x, y in batches(inputs, labels):
            with tf.GradientTape() as tape:
                log_p = tf.nn.log_softmax(network(x))
                targets = (1 - SMOOTHING) * tf.one_hot(y, VOCAB) + SMOOTHING / VOCAB
                mask = tf.cast(y != PAD, "float32")
                loss = -tf.reduce_sum(log_p * targets * mask[..., None]) / tf.reduce_sum(mask)
            sums = sums_by_hand(network(x), y)
            totals += sums
            logs["step_loss"].append(sums[0] / sums[2])
            gradients = tape.gradient(loss, [variable.value for variable in variables])
            gradients = [tf.convert_to_tensor(gradient).numpy() for gradient in gradients]
            norm = np.sqrt(sum((gradient.astype("float64") ** 2).sum() for gradient in gradients))
            logs["gradient_norm"].append(norm)
            for variable, gradient in zip(variables, gradients):
                variable.assign_sub(RATE * gradient)
        logs["loss"].append(totals[0] / totals[2])
        logs["accuracy"].append(totals[1] / totals[2])
    return logs


@pytest.fixture(scope="module")
def reference():
    """Return the network and the logs after two epochs of plain gradient descent."""
    network = small_model()
    network.build()
    return network, train_by_hand(network, *sentences(), epochs=2)


@pytest.fixture(scope="module")
def trained():
    """Return a trainer after the same two epochs, the record of its steps and its history."""
    trainer, record = translation_trainer(), Record()
    inputs, labels = sentences()
    history = trainer.fit(
        inputs,
        labels,
        batch_size=BATCH,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[record],
        validation_data=sentences(seed=1),
    )
    return trainer, record, history.history


class TestByHand:
    def test_every_step_matches_numpy(self, reference, trained):
        _, expected = reference
        _, record, _ = trained
        for name in ("step_loss", "gradient_norm"):
            np.testing.assert_allclose(record[name], expected[name], TRAINING, err_msg=name)

    def test_epoch_logs_are_means_over_tokens(self, reference, trained):
        _, expected = reference
        _, record, history = trained
        for name in ("loss", "accuracy"):
            np.testing.assert_allclose(history[name], expected[name], TRAINING, err_msg=name)
            # During an epoch, the logs have the mean so far, as in Keras.
            assert record[name][2] == pytest.approx(history[name][0])
        assert record["loss"][0] == pytest.approx(record["step_loss"][0])

    def test_weights_match_plain_gradient_descent(self, reference, trained):
        network, _ = reference
        trainer, _, _ = trained
        assert_all_close(
            get_weights_by_path(trainer.network), get_weights_by_path(network), TRAINING
        )

    def test_evaluate_and_predict_match_numpy(self, reference, trained):
        network, _ = reference
        trainer, _, history = trained
        inputs, labels = sentences(seed=1)
        logits = network(inputs).numpy()
        loss, correct, count = sums_by_hand(logits, labels)
        actual = trainer.evaluate(inputs, labels, batch_size=5, verbose=0, return_dict=True)
        assert actual == pytest.approx(
            {"loss": loss / count, "accuracy": correct / count}, TRAINING
        )
        assert history["val_loss"][-1] == pytest.approx(actual["loss"], TRAINING)
        assert history["val_accuracy"][-1] == pytest.approx(actual["accuracy"])
        predicted = trainer.predict(inputs, batch_size=5, verbose=0)
        assert_all_close({"logits": predicted}, {"logits": logits}, TRAINING)

    def test_sample_weights_per_token(self, reference, trained):
        network, _ = reference
        inputs, labels = sentences(seed=1)
        weights = np.linspace(0.0, 2.0, labels.size).reshape(labels.shape).astype("float32")
        loss, correct, count = sums_by_hand(network(inputs), labels, weights)
        data = tf.data.Dataset.from_tensor_slices((inputs, labels, weights)).batch(BATCH)
        actual = trained[0].evaluate(data, verbose=0, return_dict=True)
        assert actual == pytest.approx(
            {"loss": loss / count, "accuracy": correct / count}, TRAINING
        )

    def test_sample_weights_per_row(self, reference, trained):
        """Keras' sample weights have one value per row."""
        network, _ = reference
        inputs, labels = sentences(seed=1)
        weights = np.linspace(0.0, 2.0, len(labels)).astype("float32")
        loss, correct, count = sums_by_hand(network(inputs), labels, weights[:, None])
        options = {"sample_weight": weights, "batch_size": BATCH, "verbose": 0}
        trainer = translation_trainer(network=trained[0].network)
        actual = trainer.evaluate(inputs, labels, return_dict=True, **options)
        assert actual == pytest.approx(
            {"loss": loss / count, "accuracy": correct / count}, TRAINING
        )

    def test_logs_have_the_expected_names_and_values(self, trained):
        trainer, record, history = trained
        step = {"loss", "accuracy", "step_loss", "gradient_norm", "learning_rate"}
        step |= {"tokens_per_second"}
        assert all(step <= set(logs) for logs in record.logs)
        speed = {
            "gflops_per_second",
            "share_of_peak",
            "input_wait",
        }  # Unknown before the second step.
        assert set(record.logs[-1]) == step | speed
        assert set(history) == step | speed | {"val_loss", "val_accuracy"}
        assert record["learning_rate"] == pytest.approx([RATE] * 6)
        for name in (*speed, "tokens_per_second"):
            assert record.logs[-1][name] > 0
        assert all(0 < logs["input_wait"] < 1 for logs in record.logs[1:])
        assert int(trainer.optimizer.iterations) == 6

    def test_saved_weights_restore_the_network(self, trained, tmp_path):
        trainer, _, _ = trained
        inputs, labels = sentences(seed=1)
        expected = trainer.evaluate(inputs, labels, verbose=0, return_dict=True)
        path = str(tmp_path / "model.weights.h5")
        trainer.save_weights(path)
        dtransformer.set_seed(1)
        new_trainer = translation_trainer()  # Not built yet.
        new_trainer.load_weights(path)
        assert new_trainer.evaluate(inputs, labels, verbose=0, return_dict=True) == expected
        network = small_model()
        network.build()
        network.load_weights(path)
        for name, value in get_weights_by_path(trainer.network).items():
            np.testing.assert_array_equal(get_weights_by_path(network)[name], value, name)

    def test_summary_shows_the_parameters_of_each_device(self, trained):
        trainer, _, _ = trained
        lines = []
        trainer.summary(print_fn=lambda line, **_: lines.append(line))
        text = "\n".join(lines)
        count = trainer.network.count_params()
        assert f"each device holds {count:,} parameters ({4 * count / 2**20:.2f} MiB)" in text
        assert "one rank" in text and "transformer" in text


class Batches:
    """Data that shuffles its rows, as `TranslationBatches` does."""

    def __init__(self):
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def as_dataset(self):
        return dataset()


class TestEquivalentRuns:
    """Kinds of data and of execution do not change losses and weights."""

    @pytest.mark.parametrize(
        "data, options",
        [
            (dataset, {}),
            (Batches, {"steps_per_execution": 3}),
            pytest.param(dataset, {"jit_compile": True}, marks=pytest.mark.long),
            (dataset, {"run_eagerly": True}),
        ],
        ids=["tf.data", "steps_per_execution", "jit_compile", "run_eagerly"],
    )
    def test_fit_matches_numpy(self, reference, data, options):
        network, expected = reference
        # No gradient reaches this norm, so nothing is clipped.
        optimizer = keras.optimizers.SGD(RATE, global_clipnorm=100.0)
        trainer, record, data = translation_trainer(optimizer, **options), Record(), data()
        history = trainer.fit(data, epochs=2, verbose=0, callbacks=[record]).history
        for name in ("loss", "accuracy"):
            np.testing.assert_allclose(history[name], expected[name], TRAINING, err_msg=name)
        interval = options.get("steps_per_execution", 1)
        for name in ("step_loss", "gradient_norm"):
            steps = expected[name][interval - 1 :: interval]
            np.testing.assert_allclose(record[name], steps, TRAINING, err_msg=name)
        assert_all_close(
            get_weights_by_path(trainer.network), get_weights_by_path(network), TRAINING
        )
        if isinstance(data, Batches):
            assert data.epochs == [0, 1]

    @pytest.mark.parametrize("policy", TRAINING_16_BIT)
    def test_mixed_precision_matches_numpy(self, reference, policy):
        _, expected = reference
        # The scale grows after every second step. Logged norms must not depend on it.
        optimizer = keras.optimizers.SGD(RATE)
        if policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(
                optimizer, initial_scale=2.0**8, dynamic_growth_steps=2
            )
        trainer, record = translation_trainer(optimizer, small_model(dtype=policy)), Record()
        trainer.fit(dataset(), epochs=2, verbose=0, callbacks=[record])
        for name in ("step_loss", "gradient_norm"):
            tolerance = TRAINING_16_BIT[policy]
            np.testing.assert_allclose(record[name], expected[name], tolerance, err_msg=name)
        assert record["loss"][-1] < 0.9 * record["step_loss"][0]
        assert {variable.dtype for variable in trainer.network.variables} == {"float32"}
        if policy == "mixed_float16":
            assert float(trainer.optimizer.scale_loss(1.0)) == 2.0**11
