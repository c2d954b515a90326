"""Class weights match Keras. Token labels raise an error, because Keras would weight rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import CrossEntropyLoss
from dtransformer.trainers import Trainer
from tests.tolerances import TRAINING

WEIGHTS = {0: 0.5, 1: 3.0, 2: 1.0}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 4, 5)).astype("float32")
TOKEN_LABELS = RNG.integers(0, 3, (6, 4), "int32")
ROW_LABELS = TOKEN_LABELS[:, 0]
SPARSE = [
    "sparse_categorical_crossentropy",
    keras.losses.sparse_categorical_crossentropy,
    lambda: keras.losses.SparseCategoricalCrossentropy(name="mine"),
    CrossEntropyLoss,
]


class Batches(keras.utils.PyDataset):
    """One batch of rows and their labels."""

    def __init__(self, x, y):
        super().__init__()
        self.batch = x, y

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return self.batch


def network(by_token):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4, 5))
    x = inputs if by_token else keras.layers.GlobalAveragePooling1D()(inputs)
    return keras.Model(inputs, keras.layers.Dense(3, "softmax")(x))


def compiled_model(loss, by_token, wrap=Trainer):
    model = wrap(network(by_token))
    is_factory = callable(loss) and getattr(loss, "__name__", "") in (
        "<lambda>",
        "CrossEntropyLoss",
    )
    model.compile("sgd", loss() if is_factory else loss)
    return model


def fit(model, x, y, kind):
    """Train for one epoch with class weights and return the loss."""
    options = {"class_weight": WEIGHTS, "verbose": 0, "shuffle": False}
    if kind == "arrays":
        return model.fit(x, y, batch_size=6, **options).history["loss"]
    if kind == "dataset":
        return model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(6), **options).history[
            "loss"
        ]
    if kind == "PyDataset":
        return model.fit(Batches(x, y), **options).history["loss"]
    return model.train_on_batch(x, y, class_weight=WEIGHTS, return_dict=True)["loss"]


KINDS = ["arrays", "dataset", "PyDataset", "batch"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", SPARSE)
def test_class_weights_for_token_labels_raise_an_error(loss, kind):
    with pytest.raises(ValueError, match=r"`class_weight` weights rows, .* of shape \(\w+, 4\)"):
        fit(compiled_model(loss, True), X, TOKEN_LABELS, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["rows", "rows of one", "one-hot"])
def test_class_weights_for_row_labels_match_keras(shape, kind):
    y = {
        "rows": ROW_LABELS,
        "rows of one": ROW_LABELS[:, None],
        "one-hot": np.eye(3, dtype="float32")[ROW_LABELS],
    }[shape]
    loss = "categorical_crossentropy" if shape == "one-hot" else SPARSE[0]
    actual, expected = (
        fit(compiled_model(loss, False, wrap), X, y, kind)
        for wrap in (Trainer, lambda model: model)
    )
    np.testing.assert_allclose(actual, expected, rtol=TRAINING)
    probabilities = network(False).predict(X, verbose=0)[np.arange(6), ROW_LABELS]
    weights = np.array([WEIGHTS[i] for i in ROW_LABELS])
    np.testing.assert_allclose(actual, np.mean(-weights * np.log(probabilities)), rtol=TRAINING)


def test_class_weights_for_one_hot_token_labels_match_keras():
    """Keras weights each token of a dataset, and raises an error for arrays."""
    y = np.eye(3, dtype="float32")[TOKEN_LABELS]
    losses = []
    for wrap in (Trainer, lambda model: model):
        losses.append(fit(compiled_model("categorical_crossentropy", True, wrap), X, y, "dataset"))
        with pytest.raises(TypeError):
            fit(compiled_model("categorical_crossentropy", True, wrap), X, y, "arrays")
    np.testing.assert_allclose(*losses, rtol=TRAINING)


def test_suggested_sample_weights_apply_to_each_token():
    weights = np.array([WEIGHTS[i] for i in range(3)], "float32")[TOKEN_LABELS]
    model = compiled_model(CrossEntropyLoss, True)
    logs = model.train_on_batch(X, TOKEN_LABELS, sample_weight=weights, return_dict=True)
    logits = np.float64(network(True).predict(X, verbose=0))
    shifted = np.take_along_axis(logits, TOKEN_LABELS[..., None], -1)[..., 0]
    losses = np.logaddexp.reduce(logits, axis=-1) - shifted
    assert logs["loss"] == pytest.approx(np.average(losses, weights=weights), rel=TRAINING)
