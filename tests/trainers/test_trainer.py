"""Trainer on one process: against steps by hand, against Keras, and with its callbacks."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtransformer
from dtransformer import parallel_config
from dtransformer.errors import InputError
from dtransformer.layers import CrossEntropyLoss, Dropout
from dtransformer.models import TranslationTransformer
from dtransformer.trainers import ModelCheckpoint, Trainer
from tests.layers.reference_compare import dtype_policy
from tests.tolerances import TRAINING, TRAINING_16_BIT, assert_all_close

VOCAB, SMOOTHING, BATCH, RATE = 12, 0.1, 4, 0.1
PAD, START, END = 0, 2, 3


class Record(keras.callbacks.Callback):
    """Keeps the logs of every step, and the weights after it."""

    def on_train_begin(self, logs=None):
        self.logs, self.weights = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append({name: float(value) for name, value in logs.items()})
        self.weights.append([v.numpy() for v in self.model.network.trainable_variables])

    def __getitem__(self, name):
        return [logs[name] for logs in self.logs]


# Translation, by hand


def sentences(num_rows=12, seed=0):
    """Sentences of different lengths: inputs and labels."""
    rng = np.random.default_rng(seed)
    source = rng.integers(4, VOCAB, (num_rows, 6), "int32")
    labels = rng.integers(4, VOCAB, (num_rows, 5), "int32")
    for row in range(num_rows):
        source[row, 6 - row % 4 :] = PAD
        end = 4 - row % 3
        labels[row, end], labels[row, end + 1 :] = END, PAD
    text = np.where(labels == END, PAD, labels)[:, :-1]
    target = np.concatenate([np.full((num_rows, 1), START, "int32"), text], axis=1)
    return {"source": source, "target": target}, labels


def batches(inputs, labels):
    for start in range(0, len(labels), BATCH):
        part = slice(start, start + BATCH)
        yield {name: ids[part] for name, ids in inputs.items()}, labels[part]


def small_model(**options):
    sizes = {"hidden_size": 16, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    return TranslationTransformer(VOCAB, **{**sizes, "dropout_rate": 0.0, **options})


def translation_trainer(optimizer=None, network=None, **compile_options):
    trainer = Trainer(network or small_model())
    trainer.compile(
        optimizer or keras.optimizers.SGD(RATE),
        CrossEntropyLoss(SMOOTHING, ignore_id=PAD),
        **compile_options,
    )
    return trainer


def sums_by_hand(logits, labels, weights=None):
    """Σ loss, Σ right and the number of tokens that count, by NumPy in float64."""
    logits = np.asarray(logits, "float64")
    log_p = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    own = np.take_along_axis(log_p, labels[..., None], -1)[..., 0]
    losses = -(1 - SMOOTHING) * own - SMOOTHING * log_p.mean(-1)
    weights = (labels != PAD) * (1.0 if weights is None else weights)
    right = log_p.argmax(-1) == labels
    return (losses * weights).sum(), (right * weights).sum(), weights.sum()


def train_by_hand(network, inputs, labels, epochs):
    """Plain steps of gradient descent; a dict of what the trainer should log."""
    logs = {"step_loss": [], "gradient_norm": [], "loss": [], "accuracy": []}
    variables = network.trainable_variables
    for _ in range(epochs):
        totals = np.zeros(3)
        for x, y in batches(inputs, labels):
            with tf.GradientTape() as tape:
                log_p = tf.nn.log_softmax(network(x))
                wanted = (1 - SMOOTHING) * tf.one_hot(y, VOCAB) + SMOOTHING / VOCAB
                mask = tf.cast(y != PAD, "float32")
                loss = -tf.reduce_sum(log_p * wanted * mask[..., None]) / tf.reduce_sum(mask)
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


def weights_of(network):
    return {variable.path: variable.numpy() for variable in network.variables}


@pytest.fixture(scope="module")
def by_hand():
    """What two epochs over the sentences come to: the network, and the logs."""
    network = small_model()
    network.build()
    return network, train_by_hand(network, *sentences(), epochs=2)


@pytest.fixture(scope="module")
def run():
    """The same with the trainer: the trainer, the steps' record, the history."""
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
    def test_every_step(self, by_hand, run):
        _, expected = by_hand
        _, record, _ = run
        for name in ("step_loss", "gradient_norm"):
            np.testing.assert_allclose(record[name], expected[name], TRAINING, err_msg=name)

    def test_an_epoch_is_the_mean_over_its_tokens(self, by_hand, run):
        _, expected = by_hand
        _, record, history = run
        for name in ("loss", "accuracy"):
            np.testing.assert_allclose(history[name], expected[name], TRAINING, err_msg=name)
            # During an epoch the mean so far, as Keras shows it.
            assert record[name][2] == pytest.approx(history[name][0])
        assert record["loss"][0] == pytest.approx(record["step_loss"][0])

    def test_the_weights(self, by_hand, run):
        network, _ = by_hand
        trainer, _, _ = run
        assert_all_close(weights_of(trainer.network), weights_of(network), TRAINING)

    def test_evaluate_and_predict(self, by_hand, run):
        network, _ = by_hand
        trainer, _, history = run
        inputs, labels = sentences(seed=1)
        logits = network(inputs).numpy()
        loss, right, count = sums_by_hand(logits, labels)
        found = trainer.evaluate(inputs, labels, batch_size=5, verbose=0, return_dict=True)
        assert found == pytest.approx({"loss": loss / count, "accuracy": right / count}, TRAINING)
        assert history["val_loss"][-1] == pytest.approx(found["loss"], TRAINING)
        assert history["val_accuracy"][-1] == pytest.approx(found["accuracy"])
        predicted = trainer.predict(inputs, batch_size=5, verbose=0)
        assert_all_close({"logits": predicted}, {"logits": logits}, TRAINING)

    def test_sample_weights_weigh_tokens(self, by_hand, run):
        network, _ = by_hand
        inputs, labels = sentences(seed=1)
        weights = np.linspace(0.0, 2.0, labels.size).reshape(labels.shape).astype("float32")
        loss, right, count = sums_by_hand(network(inputs), labels, weights)
        data = tf.data.Dataset.from_tensor_slices((inputs, labels, weights)).batch(BATCH)
        found = run[0].evaluate(data, verbose=0, return_dict=True)
        assert found == pytest.approx({"loss": loss / count, "accuracy": right / count}, TRAINING)

    def test_sample_weights_weigh_sentences(self, by_hand, run):
        """As Keras has them: one for each row."""
        network, _ = by_hand
        inputs, labels = sentences(seed=1)
        weights = np.linspace(0.0, 2.0, len(labels)).astype("float32")
        loss, right, count = sums_by_hand(network(inputs), labels, weights[:, None])
        options = {"sample_weight": weights, "batch_size": BATCH, "verbose": 0}
        trainer = translation_trainer(network=run[0].network)
        found = trainer.evaluate(inputs, labels, return_dict=True, **options)
        assert found == pytest.approx({"loss": loss / count, "accuracy": right / count}, TRAINING)

    def test_what_is_logged(self, run):
        trainer, record, history = run
        step = {"loss", "accuracy", "step_loss", "gradient_norm", "learning_rate"}
        step |= {"tokens_per_second"}
        assert all(step <= set(logs) for logs in record.logs)
        speed = {"gflops_per_second", "share_of_peak"}  # not known before the second step
        assert set(record.logs[-1]) == step | speed
        assert set(history) == step | speed | {"val_loss", "val_accuracy"}
        assert record["learning_rate"] == pytest.approx([RATE] * 6)
        for name in (*speed, "tokens_per_second"):
            assert record.logs[-1][name] > 0
        assert int(trainer.optimizer.iterations) == 6

    def test_a_saved_file_holds_the_network(self, run, tmp_path):
        trainer, _, _ = run
        inputs, labels = sentences(seed=1)
        expected = trainer.evaluate(inputs, labels, verbose=0, return_dict=True)
        path = str(tmp_path / "model.weights.h5")
        trainer.save_weights(path)
        dtransformer.set_seed(1)
        other = translation_trainer()  # not built yet
        other.load_weights(path)
        assert other.evaluate(inputs, labels, verbose=0, return_dict=True) == expected
        network = small_model()
        network.build()
        network.load_weights(path)
        for name, value in weights_of(trainer.network).items():
            np.testing.assert_array_equal(weights_of(network)[name], value, name)

    def test_summary_tells_what_a_rank_holds(self, run):
        trainer, _, _ = run
        lines = []
        trainer.summary(print_fn=lambda line, **_: lines.append(line))
        text = "\n".join(lines)
        count = trainer.network.count_params()
        assert f"each device holds {count:,} parameters ({4 * count / 2**20:.2f} MiB)" in text
        assert "one rank" in text and "transformer" in text


class Batches:
    """Data that shares and shuffles by itself, as `TranslationBatches` does."""

    def __init__(self):
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def as_dataset(self):
        return tf.data.Dataset.from_tensor_slices(sentences()).batch(BATCH)


def dataset():
    return Batches().as_dataset()


class TestTheSameInOtherWays:
    """However the data comes and the step is run, losses and weights are the same."""

    @pytest.mark.parametrize(
        "data, options",
        [
            (dataset, {}),
            (Batches, {"steps_per_execution": 3}),
            (dataset, {"jit_compile": True}),
            (dataset, {"run_eagerly": True}),
        ],
        ids=["tf.data", "steps_per_execution", "jit_compile", "run_eagerly"],
    )
    def test_fit(self, by_hand, data, options):
        network, expected = by_hand
        # The limit is beyond every norm: it changes nothing.
        optimizer = keras.optimizers.SGD(RATE, global_clipnorm=100.0)
        trainer, record, data = translation_trainer(optimizer, **options), Record(), data()
        history = trainer.fit(data, epochs=2, verbose=0, callbacks=[record]).history
        for name in ("loss", "accuracy"):
            np.testing.assert_allclose(history[name], expected[name], TRAINING, err_msg=name)
        every = options.get("steps_per_execution", 1)
        for name in ("step_loss", "gradient_norm"):
            steps = expected[name][every - 1 :: every]
            np.testing.assert_allclose(record[name], steps, TRAINING, err_msg=name)
        assert_all_close(weights_of(trainer.network), weights_of(network), TRAINING)
        if isinstance(data, Batches):
            assert data.epochs == [0, 1]

    @pytest.mark.parametrize("policy", TRAINING_16_BIT)
    def test_mixed_precision(self, by_hand, policy):
        _, expected = by_hand
        # The scale grows after every second step, and norms must not show it.
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


# Plain Keras networks, against Keras' own fit


def points(num_rows=16, num_classes=None, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_rows, 3)).astype("float32")
    if num_classes:
        return x, np.digitize(x[:, 0], np.linspace(-1, 1, num_classes - 1)).astype("int32")
    return x, (x @ [[1.0], [-2.0], [0.5]]).astype("float32")


def dense_network(units=1, activation="tanh", **options):
    initializer = keras.initializers.GlorotUniform(seed=1)
    return keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, activation=activation, kernel_initializer=initializer),
            keras.layers.Dense(units, kernel_initializer=initializer, **options),
        ]
    )


def dense_trainer(optimizer="sgd", loss="mse", network=None, **options):
    trainer = Trainer(network or dense_network())
    trainer.compile(optimizer, loss, **options)
    return trainer


def squared(y_true, y_pred):
    return tf.reduce_mean(tf.square(y_true - y_pred), axis=-1)


class TestAgainstKeras:
    """Losses, metrics and weights after epochs of Keras' own `fit`."""

    @pytest.mark.parametrize(
        "units, loss, metrics, batch_size",
        [
            (1, "mse", ["mae"], 5),
            (1, lambda: keras.losses.Huber(), ["mse", "mae"], 16),
            (1, lambda: squared, [], 5),
            (
                4,
                lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                [lambda: keras.metrics.SparseCategoricalAccuracy(name="right")],
                5,
            ),
        ],
        ids=["name", "Huber", "function", "classes"],
    )
    def test_losses_and_metrics(self, units, loss, metrics, batch_size):
        histories, weights = [], []
        x, y = points(num_classes=units if units > 1 else None)
        for make in (dense_trainer, self.keras_model):
            network = dense_network(units)
            model = make(
                keras.optimizers.Adam(0.01),
                loss() if callable(loss) else loss,
                network,
                metrics=[metric() if callable(metric) else metric for metric in metrics],
            )
            history = model.fit(
                x,
                y,
                batch_size=batch_size,
                epochs=3,
                shuffle=False,
                verbose=0,
                validation_data=points(8, units if units > 1 else None, seed=1),
            )
            histories.append(history.history)
            weights.append(weights_of(network).values())
        found, expected = histories
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, TRAINING, err_msg=name)
        assert ("accuracy" in found) == (units > 1), "only a classifier has an accuracy"
        for actual, wanted in zip(*weights, strict=True):
            np.testing.assert_allclose(actual, wanted, TRAINING, atol=TRAINING)

    @staticmethod
    def keras_model(optimizer, loss, network, **options):
        network.compile(optimizer, loss, **options)
        return network

    def test_sample_weights(self):
        """The mean is over the weights, whatever they sum to."""
        x, y = points(num_classes=4)
        sample_weight = np.linspace(0.0, 3.0, 16).astype("float32")
        found = []
        for make in (dense_trainer, self.keras_model):
            network = dense_network(4)
            loss = keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction="mean_with_sample_weight"
            )
            right = [keras.metrics.SparseCategoricalAccuracy(name="right")]
            model = make(keras.optimizers.SGD(0.5), loss, network, weighted_metrics=right)
            options = dict(sample_weight=sample_weight, batch_size=16)
            history = model.fit(x, y, epochs=3, shuffle=False, verbose=0, **options).history
            scores = model.evaluate(x, y, verbose=0, return_dict=True, **options)
            found.append((history, scores, weights_of(network).values()))
        (history, scores, weights), expected = found
        for name in ("loss", "right"):
            np.testing.assert_allclose(history[name], expected[0][name], TRAINING, err_msg=name)
            assert scores[name] == pytest.approx(expected[1][name], TRAINING)
        for actual, wanted in zip(weights, expected[2], strict=True):
            np.testing.assert_allclose(actual, wanted, TRAINING, atol=TRAINING)

    def test_regularizers(self):
        x, y = points()
        weights = []
        for make in (dense_trainer, self.keras_model):
            network = dense_network(kernel_regularizer=keras.regularizers.L2(0.5))
            model = make(keras.optimizers.SGD(0.1), "mse", network)
            model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
            weights.append(weights_of(network).values())
        for actual, wanted in zip(*weights, strict=True):
            np.testing.assert_allclose(actual, wanted, TRAINING, atol=TRAINING)

    def test_a_network_that_is_not_built_is_built_from_the_data(self):
        x, y = points()
        for data in ((x, y), (tf.data.Dataset.from_tensor_slices((x, y)).batch(8),)):
            network = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
            history = dense_trainer(network=network).fit(*data, verbose=0, epochs=2).history
            assert history["loss"][1] < history["loss"][0]

    def test_data_that_keras_asks_batch_by_batch(self):
        """A `PyDataset` or a generator trains a network that is built."""
        x, y = points()

        class Halves(keras.utils.PyDataset):
            def __len__(self):
                return 2

            def __getitem__(self, number):
                part = slice(8 * number, 8 * number + 8)
                return x[part], y[part]

        def halves():
            while True:
                yield from (Halves()[number] for number in range(2))

        expected = dense_trainer().fit(x, y, batch_size=8, shuffle=False, verbose=0).history
        for data, options in ((Halves(), {}), (halves(), {"steps_per_epoch": 2})):
            options |= {"shuffle": False, "verbose": 0}
            history = dense_trainer().fit(data, **options).history
            assert history["loss"] == pytest.approx(expected["loss"], TRAINING)
            unbuilt = keras.Sequential([keras.layers.Dense(1)])
            with pytest.raises(ValueError, match="not built"):
                dense_trainer(network=unbuilt).fit(data, **options)

    def test_one_batch_at_a_time(self):
        x, y = points()
        trainer, by_fit = dense_trainer(), dense_trainer()
        parts = (slice(0, 8), slice(8, 16))
        logs = [trainer.train_on_batch(x[part], y[part], return_dict=True) for part in parts]
        record = Record()
        by_fit.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[record])
        assert [float(log["step_loss"]) for log in logs] == pytest.approx(record["step_loss"])
        for actual, wanted in zip(trainer.get_weights(), by_fit.get_weights(), strict=True):
            np.testing.assert_allclose(actual, wanted, TRAINING)


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_every_precision_compiled_or_not(policy, jit_compile):
    keras.utils.set_random_seed(0)
    x, y = points()
    with dtype_policy(policy):
        trainer = dense_trainer(keras.optimizers.Adam(0.05), jit_compile=jit_compile)
    scales = isinstance(trainer.optimizer, keras.optimizers.LossScaleOptimizer)
    assert scales == (policy == "mixed_float16")
    history = trainer.fit(x, y, batch_size=8, epochs=16, verbose=0).history
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    assert np.isfinite(history["gradient_norm"][-1])  # float16 may skip the first steps


def test_an_overflow_in_float16_skips_the_step():
    """The scale is halved, no weight changes, and training goes on."""
    x, y = points(24)
    x[8:16] *= 1e5  # beyond float16
    with dtype_policy("mixed_float16"):
        network = dense_network(activation="linear")
    trainer, record = dense_trainer(keras.optimizers.Adam(0.01), network=network), Record()
    scale = float(trainer.optimizer.scale_loss(1.0))
    assert scale > 1.0
    trainer.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[record])
    assert not np.isfinite(record["gradient_norm"][1])
    for before, after in zip(record.weights[0], record.weights[1], strict=True):
        np.testing.assert_array_equal(after, before)
    assert any((a != b).any() for a, b in zip(record.weights[1], record.weights[2]))
    assert all(np.isfinite(weight).all() for weight in record.weights[2])
    assert np.isfinite(record["gradient_norm"][2])
    assert float(trainer.optimizer.scale_loss(1.0)) == scale / 2


# Callbacks


class Interrupt(keras.callbacks.Callback):
    """Stops the process' training when an epoch begins, as a kill does."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise KeyboardInterrupt


class TestCallbacks:
    def fit(self, *callbacks, trainer=None, epochs=6, rate=0.05, resume=False):
        trainer, record = trainer or dense_trainer(keras.optimizers.Adam(rate)), Record()
        options = dict(batch_size=8, shuffle=False, verbose=0, callbacks=[record, *callbacks])
        options.update(epochs=epochs, resume=resume)
        history = trainer.fit(*points(), validation_data=points(seed=1), **options)
        return trainer, record, history

    def test_an_interrupted_fit_goes_on_where_it_was(self, tmp_path):
        """With the optimizer's state: its moments, and the step of its schedule."""

        def trainer():
            rate = keras.optimizers.schedules.PolynomialDecay(0.1, 12)
            return dense_trainer(keras.optimizers.Adam(rate))

        _, whole, _ = self.fit(trainer=trainer())
        saving = ModelCheckpoint(tmp_path)
        with pytest.raises(KeyboardInterrupt):
            self.fit(saving, Interrupt(epoch=3), trainer=trainer())
        dtransformer.set_seed(1)  # a new process, whose own weights must not matter
        resumed, record, history = self.fit(saving, trainer=trainer(), resume=True)
        assert history.epoch == [3, 4, 5]
        for name in ("step_loss", "learning_rate", "gradient_norm"):
            np.testing.assert_allclose(record[name], whole[name][6:], TRAINING, err_msg=name)
        assert int(resumed.optimizer.iterations) == 12

    def test_keras_backup_is_refused(self, tmp_path):
        """It would go on without the optimizer's state."""
        with pytest.raises(InputError, match=r"ModelCheckpoint\(folder\) and fit\(resume=True\)"):
            self.fit(keras.callbacks.BackupAndRestore(tmp_path / "backup"))

    def test_early_stopping(self):
        stop = keras.callbacks.EarlyStopping("val_loss", min_delta=1e9, patience=2)
        _, _, history = self.fit(stop)
        assert history.epoch == [0, 1, 2]
        stop = keras.callbacks.EarlyStopping(
            "val_loss", patience=1, restore_best_weights=True, start_from_epoch=0
        )
        trainer, _, history = self.fit(stop, rate=1.0, epochs=30)  # so fast that it overshoots
        best = min(history.history["val_loss"])
        assert len(history.epoch) < 30 and history.history["val_loss"][-1] > best
        loss = trainer.evaluate(*points(seed=1), verbose=0, return_dict=True)["loss"]
        assert loss == pytest.approx(best, TRAINING)

    def test_model_checkpoint(self, tmp_path):
        every = keras.callbacks.ModelCheckpoint(
            tmp_path / "{epoch}.weights.h5", save_weights_only=True
        )
        best = keras.callbacks.ModelCheckpoint(
            tmp_path / "best.weights.h5",
            monitor="val_loss",
            save_best_only=True,
            save_weights_only=True,
        )
        _, _, history = self.fit(every, best)
        losses = history.history["val_loss"]
        files = {str(epoch): losses[epoch - 1] for epoch in (1, 3, 6)}
        for name, expected in {**files, "best": min(losses)}.items():
            trainer = dense_trainer()
            trainer.load_weights(tmp_path / f"{name}.weights.h5")
            found = trainer.evaluate(*points(seed=1), verbose=0, return_dict=True)
            assert found["loss"] == pytest.approx(expected, TRAINING)

    def test_learning_rates(self):
        """The rate that a step is made with is the one in its logs."""
        schedule = keras.optimizers.schedules.PolynomialDecay(0.1, 12)
        _, record, _ = self.fit(trainer=dense_trainer(keras.optimizers.SGD(schedule)))
        expected = [float(schedule(step)) for step in range(12)]
        assert record["learning_rate"] == pytest.approx(expected)
        rates = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
        _, record, _ = self.fit(rates, epochs=3)
        assert record["learning_rate"] == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.1 / 3, 0.1 / 3])

    def test_tensorboard(self, tmp_path):
        pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
        self.fit(keras.callbacks.TensorBoard(tmp_path, update_freq="batch"), epochs=2)
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        events = b"".join(path.read_bytes() for path in files)
        assert b"epoch_loss" in events and b"epoch_gradient_norm" in events

    def test_progress_is_printed(self, capsys):
        dense_trainer().fit(*points(), epochs=2, verbose=2)
        text = capsys.readouterr().out
        assert "Epoch 2/2" in text and re.search(r"loss: \d", text)
        assert "gradient_norm" in text and "tokens_per_second" in text


# Fine-tuning, and what is refused


def test_frozen_layers_stay_as_they_are():
    x, y = points()
    network = dense_network()
    trainer = dense_trainer(network=network)
    trainer.fit(x, y, verbose=0)
    network.layers[0].trainable = False
    trainer.compile(keras.optimizers.Adam(0.05), "mse")
    before = [layer.get_weights() for layer in network.layers]
    history = trainer.fit(x, y, epochs=4, verbose=0).history
    after = [layer.get_weights() for layer in network.layers]
    for old, new in zip(before[0], after[0], strict=True):
        np.testing.assert_array_equal(new, old)
    assert all((new != old).any() for old, new in zip(before[1], after[1], strict=True))
    assert history["loss"][-1] < history["loss"][0]


def test_a_frozen_embedding_of_a_translation_model():
    network = small_model()
    network.build()
    network.source_embedding.trainable = False
    before = weights_of(network)
    translation_trainer(network=network).fit(dataset(), verbose=0)
    for path, value in weights_of(network).items():
        is_frozen = "source_embedding" in path
        # The key's bias has no gradient: it moves all scores of a query alike.
        if "key_bias" not in path:
            assert np.array_equal(value, before[path]) == is_frozen, path


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_weight_that_the_loss_does_not_depend_on_is_named(run_eagerly):
    class Forgetful(keras.Model):
        def __init__(self):
            super().__init__()
            self.used = keras.layers.Dense(1, name="used")
            self.forgotten = keras.layers.Dense(1, name="forgotten")

        def build(self, input_shape):
            self.used.build(input_shape)
            self.forgotten.build(input_shape)
            self.built = True

        def call(self, x):
            return self.used(x)

    trainer = dense_trainer(network=Forgetful(), run_eagerly=run_eagerly)
    with pytest.raises(ValueError, match="forgotten/kernel.*forgotten/bias") as caught:
        trainer.fit(*points(), verbose=0)
    assert "used/kernel" not in str(caught.value)


@pytest.mark.parametrize(
    "loss, words",
    [
        (lambda: keras.losses.MeanSquaredError(reduction="sum"), "reduction='sum'.*mean"),
        (lambda: keras.losses.MeanSquaredError(reduction=None), "reduction=None.*mean"),
        (lambda: {"a": "mse", "b": "mae"}, "one loss"),
        (lambda: ["mse", "mae"], "one loss"),
        (lambda: "squared_error_or_so", "squared_error_or_so"),
    ],
    ids=["sum", "none", "dict", "list", "unknown"],
)
def test_losses_that_are_refused(loss, words):
    with pytest.raises(ValueError, match=words):
        dense_trainer(loss=loss())


def test_fit_and_evaluate_before_compile():
    trainer = Trainer(dense_network())
    for call in (trainer.fit, trainer.evaluate):
        with pytest.raises(ValueError, match="compile"):
            call(*points(), verbose=0)


def test_a_config_that_is_not_carried_out_is_refused():
    with parallel_config(expert_parallel=2):
        with pytest.raises(NotImplementedError, match="expert_parallel=2"):
            Trainer(dense_network())


def test_the_seed_decides_the_dropout():
    def losses(seed):
        dtransformer.set_seed(seed)
        network = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(8, kernel_initializer=keras.initializers.GlorotUniform(1)),
                Dropout(0.5, name="the_dropout"),
                keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(2)),
            ],
            name="dropping",
        )
        record = Record()
        trainer = dense_trainer(keras.optimizers.SGD(0.0), network=network)
        data = tf.data.Dataset.from_tensors(points(8))
        trainer.fit(data, epochs=4, verbose=0, callbacks=[record])
        return record["step_loss"]

    first, again, other = losses(0), losses(0), losses(1)
    assert first == again
    assert all(a != b for a, b in zip(first, other))
    assert len(set(first)) == 4, "every step has masks of its own"


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict", "train_on_batch"])
def test_a_config_that_changes_after_the_trainer_was_made_is_refused(call):
    trainer = dense_trainer()
    arguments = points(4)[:1] if call == "predict" else points(4)
    with parallel_config(recompute=True):
        with pytest.raises(RuntimeError, match="recompute=False.*now has True.*make a new one"):
            getattr(trainer, call)(*arguments)
    trainer.fit(*points(4), verbose=0)


def test_micro_batches_work_with_a_loss_whose_weights_are_known_after_the_forward_pass():
    def losses(**fields):
        with parallel_config(**fields):
            network = dense_network()
            trainer = dense_trainer(keras.optimizers.SGD(0.1), "mse", network=network)
            record = Record()
            trainer.fit(*points(8), batch_size=8, epochs=3, verbose=0, callbacks=[record])
        return record["step_loss"]

    np.testing.assert_allclose(losses(micro_batch_num=4), losses(), rtol=TRAINING)
