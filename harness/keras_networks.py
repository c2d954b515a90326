"""Small networks of Keras' and KerasHub's layers, with one batch each."""

import keras
import numpy as np
from keras import layers

VOCAB_SIZE = 60
CLASSES = 10
HIDDEN = 64
_LENGTH = 10
_ROWS = 8
_HUB_SIZES = {
    "vocabulary_size": VOCAB_SIZE,
    "num_layers": 2,
    "hidden_dim": HIDDEN,
    "intermediate_dim": 2 * HIDDEN,
}


def make_batch(name):
    """Return the `(inputs, labels)` of a network in `NETWORKS`."""
    rng = np.random.default_rng(0)
    if name in ("vit", "resnet"):
        pictures = rng.standard_normal((_ROWS, 8, 8, 3)).astype("float32")
        return pictures, rng.integers(0, CLASSES, _ROWS)
    ids = rng.integers(1, VOCAB_SIZE, (_ROWS, _LENGTH + 1)).astype("int32")
    inputs, labels = ids[:, :-1], ids[:, 1:]
    if name != "gpt":
        inputs = {"token_ids": inputs, "padding_mask": np.ones_like(inputs)}
    if name == "bert":
        inputs["segment_ids"] = np.zeros_like(inputs["token_ids"])
    return inputs, labels


def _block(x, causal):
    """Return the output of a pre-norm Transformer block."""
    normed = layers.LayerNormalization()(x)
    attention = layers.MultiHeadAttention(4, HIDDEN // 4)
    x = layers.Add()([x, attention(normed, normed, use_causal_mask=causal)])
    hidden = layers.Dense(4 * HIDDEN, activation="gelu")(layers.LayerNormalization()(x))
    return layers.Add()([x, layers.Dense(HIDDEN)(hidden)])


def gpt():
    """Functional language model."""
    ids = keras.Input((_LENGTH,), dtype="int32")
    x = layers.Embedding(VOCAB_SIZE, HIDDEN)(ids)
    for _ in range(2):
        x = _block(x, causal=True)
    return keras.Model(ids, layers.Dense(VOCAB_SIZE)(layers.LayerNormalization()(x)))


def vit():
    """Functional vision Transformer."""
    pictures = keras.Input((8, 8, 3))
    x = layers.Conv2D(HIDDEN, 2, strides=2)(pictures)
    x = layers.Reshape((16, HIDDEN))(x)
    for _ in range(2):
        x = _block(x, causal=False)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(pictures, layers.Dense(CLASSES)(x))


def resnet():
    """Functional residual network of convolutions."""
    pictures = keras.Input((8, 8, 3))
    x = layers.Conv2D(16, 3, padding="same", activation="relu")(pictures)
    for _ in range(2):
        y = layers.Conv2D(16, 3, padding="same")(x)
        y = layers.Activation("relu")(layers.BatchNormalization()(y))
        y = layers.BatchNormalization()(layers.Conv2D(16, 3, padding="same")(y))
        x = layers.Activation("relu")(layers.Add()([x, y]))
    x = layers.GlobalAveragePooling2D()(x)
    x = layers.Dense(64, activation="relu")(x)
    return keras.Model(pictures, layers.Dense(CLASSES)(x))


def _with_head(backbone):
    """Return a token classifier that multiplies with the backbone's embedding table."""
    inputs = {x: keras.Input((_LENGTH,), dtype="int32", name=x) for x in backbone.input}
    outputs = backbone(inputs)
    hidden = outputs["sequence_output"] if isinstance(outputs, dict) else outputs
    return keras.Model(inputs, backbone.token_embedding(hidden, reverse=True))


def llama():
    """KerasHub's Llama with grouped queries."""
    import keras_hub  # An optional package.

    heads = {"num_query_heads": 4, "num_key_value_heads": 2}
    return _with_head(keras_hub.models.LlamaBackbone(**heads, **_HUB_SIZES))


def gemma():
    """KerasHub's Gemma with grouped queries and a tied table."""
    import keras_hub

    heads = {"num_query_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return _with_head(keras_hub.models.GemmaBackbone(**heads, **_HUB_SIZES))


def gpt2():
    """KerasHub's GPT-2."""
    import keras_hub

    options = {"num_heads": 4, "max_sequence_length": 16, "dropout": 0.0}
    return _with_head(keras_hub.models.GPT2Backbone(**options, **_HUB_SIZES))


def bert():
    """KerasHub's BERT."""
    import keras_hub

    options = {"num_heads": 4, "max_sequence_length": 16, "dropout": 0.0}
    return _with_head(keras_hub.models.BertBackbone(**options, **_HUB_SIZES))


KERAS_NETWORKS = {"gpt": gpt, "vit": vit, "resnet": resnet}
HUB_NETWORKS = {"llama": llama, "gemma": gemma, "gpt2": gpt2, "bert": bert}
NETWORKS = KERAS_NETWORKS | HUB_NETWORKS
