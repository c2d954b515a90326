"""The trainer fits a KerasHub task as the task itself does, from raw texts."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.trainers import Trainer

models = pytest.importorskip("keras_hub", reason="the package keras-hub is not installed").models
TEXTS = ["a quick fox", "a fox", "quick quick fox a", "fox a quick", "a a", "fox", "quick", "a"]
WORDS = ["a", "Ġa", "quick", "Ġquick", "fox", "Ġfox", "Ġ", *"quickfox"]
MERGES = "Ġ a,q u,i c,ic k,qu ick,Ġ quick,f o,fo x,Ġ fox".split(",")
WORDS += ["qu", "ic", "ick", "fo"]
EPOCHS = 2


def make_task():
    """Return a GPT-2 that tokenizes texts and is compiled by its constructor."""
    keras.utils.set_random_seed(0)
    words = ["<|endoftext|>", *dict.fromkeys(WORDS)]
    tokenizer = models.GPT2Tokenizer({word: i for i, word in enumerate(words)}, MERGES)
    backbone = models.GPT2Backbone(len(words), 1, 2, 8, 16, dropout=0.0, max_sequence_length=8)
    preprocessor = models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=8)
    return models.GPT2CausalLM(backbone, preprocessor)


def test_losses_metrics_and_optimizer_are_those_of_the_task():
    network = make_task()
    options = {"batch_size": 4, "verbose": 0}
    expected = network.fit(TEXTS, epochs=EPOCHS, **options).history
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = Trainer(make_task())
        trainer.compile()
        data = tf.data.Dataset.from_tensor_slices(TEXTS).batch(4)
        history = trainer.fit(data, epochs=EPOCHS, verbose=0).history
    messages = [str(warning.message) for warning in caught]
    assert [text for text in messages if "Trainer" in text or "GPT2" in text] == []
    assert isinstance(trainer.optimizer, keras.optimizers.Adam)
    assert float(trainer.optimizer.learning_rate) == pytest.approx(2e-5)
    assert len(set(expected["loss"])) == EPOCHS
    for name in ("loss", "sparse_categorical_accuracy"):
        np.testing.assert_allclose(history[name], expected[name], rtol=1e-5, err_msg=name)
    results, outputs = trainer.evaluate(TEXTS, **options), trainer.predict(TEXTS, **options)
    x, y, weights = network.preprocessor(TEXTS)
    network.preprocessor = None  # Every function that tokenizes texts takes seconds to trace.
    np.testing.assert_allclose(
        results, network.evaluate(x, y, sample_weight=weights, **options), rtol=1e-5
    )
    np.testing.assert_allclose(outputs, network.predict(x, **options), atol=1e-5)
