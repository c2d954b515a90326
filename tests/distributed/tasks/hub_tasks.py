"""Train KerasHub's tasks with Keras' `fit` in one process, and with the trainer in pipelines."""

import pathlib

import keras
import numpy as np

from dtransformer.parallel.runtime import job
from dtransformer.trainers import Trainer

VOCAB_SIZE, ROWS, WIDTH, STEPS, SHORT_STEPS = 24, 8, 6, 20, 5
IDS = np.random.default_rng(0).integers(1, VOCAB_SIZE, (ROWS, WIDTH + 1)).astype("int32")
PADDING_MASK = np.ones((ROWS, WIDTH), "int32")
PADDING_MASK[3:5, 4:] = 0
INPUTS = {"token_ids": IDS[:, :-1], "padding_mask": PADDING_MASK}
MASKED_INPUTS = {
    **INPUTS,
    "segment_ids": np.zeros_like(INPUTS["token_ids"]),
    "mask_positions": np.tile([[0, 2, 3]], (ROWS, 1)).astype("int32"),
}
SIZES = {"vocabulary_size": VOCAB_SIZE, "num_layers": 2, "hidden_dim": 8, "intermediate_dim": 32}


def make(kind):
    """Return a KerasHub task whose head multiplies with the embedding table."""
    from keras_hub import models

    keras.utils.set_random_seed(0)
    heads = {"num_query_heads": 2, "num_key_value_heads": 1}
    if kind == "llama":
        backbone = models.LlamaBackbone(**SIZES, **heads, tie_word_embeddings=True)
        return models.LlamaCausalLM(backbone, preprocessor=None)
    if kind == "gemma":
        backbone = models.GemmaBackbone(**SIZES, **heads, head_dim=4)
        return models.GemmaCausalLM(backbone, preprocessor=None)
    options = {"num_heads": 2, "dropout": 0.0, "max_sequence_length": WIDTH}
    if kind == "gpt2":
        backbone = models.GPT2Backbone(**SIZES, **options)
        return models.GPT2CausalLM(backbone, preprocessor=None)
    backbone = models.BertBackbone(**SIZES, **options)
    return models.BertMaskedLM(backbone, preprocessor=None)


def checkpoint_path(folder, kind, layout_name):
    """Return the path of the checkpoint that a run saves."""
    return pathlib.Path(folder) / f"{kind}-{layout_name}-checkpoint"


def make_inputs(kind):
    """Return the inputs of a kind of task."""
    return MASKED_INPUTS if kind == "bert" else INPUTS


def compile_task(model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    optimizer = keras.optimizers.SGD(0.02, momentum=0.9)
    model.compile(optimizer=optimizer, loss=loss, weighted_metrics=[accuracy])


def train(kind, folder, layout, is_short):
    """Train with the global batch, save, and restore the checkpoint of one process."""
    network = make(kind)
    model = network if job.size() == 1 else Trainer(network)
    compile_task(model)
    x, y, weights = INPUTS, IDS[:, 1:], PADDING_MASK.astype("float32")
    if kind == "bert":
        x, y, weights = MASKED_INPUTS, IDS[:, :3], np.ones((ROWS, 3), "float32")
    epochs = SHORT_STEPS if is_short else STEPS
    history = model.fit(
        x, y, sample_weight=weights, batch_size=ROWS, epochs=epochs, shuffle=False, verbose=0
    ).history
    outputs = model.predict(x, batch_size=ROWS, verbose=0)
    result = {
        "losses": list(map(float, history["loss"])),
        "accuracies": list(map(float, history["sparse_categorical_accuracy"])),
        "outputs": np.asarray(outputs),
        "weights": [list(map(str, np.shape(value))) for value in model.get_weights()],
    }
    if job.size() == 1:
        trainer = Trainer(network)
        compile_task(trainer)
        trainer.predict(x, batch_size=ROWS, verbose=0)
        trainer.save(checkpoint_path(folder, kind, layout.name))
        return result
    result["stages"] = model.plan().stages
    model.save(checkpoint_path(folder, kind, layout.name))
    model.restore(checkpoint_path(folder, kind, "alone@1x1"), weights_only=True)
    result["restored"] = np.asarray(model.predict(x, batch_size=ROWS, verbose=0))
    return result


def task(kind):
    """Return the task that trains a kind of network."""
    return lambda folder, layout, is_short: train(kind, folder, layout, is_short)


TASKS = {kind: task(kind) for kind in ("llama", "gemma", "gpt2", "bert")}
