"""Every layer works in functional, sequential and subclassed Keras models."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer import _compat, layers
from dtransformer.parallel.config.config import MoEConfig
from dtransformer.trainers import Trainer

IDS = np.array([[3, 1, 2, 0], [5, 4, 0, 0]])
MASK = tf.constant(IDS != 0)
X = np.random.default_rng(0).normal(size=(2, 4, 8)).astype("float32")
TABLE = np.random.default_rng(1).normal(size=(6, 8)).astype("float32")
RATES = {"hidden_dropout_rate": 0.0, "attention_dropout_rate": 0.0}
BLOCK = {"hidden_size": 8, "num_heads": 2, "ffn_hidden_size": 16, **RATES}
EXPERTS = MoEConfig(expert_num=2)
BOTH = np.repeat((IDS != 0)[:, None], 4, 1)  # [b, t, t]

# Constructor arguments and call arguments of each layer.
LAYERS = {
    "AttentionMask": ({}, [IDS]),
    "Dropout": ({"rate": 0.0}, [X]),
    "FeedForward": ({"hidden_size": 8, "ffn_hidden_size": 16, "dropout_rate": 0.0}, [X]),
    "FixedSparseAttention": (
        {"num_heads": 2, "size_per_head": 4, "block_size": 1, "seq_length": 4},
        [X, X, X],
    ),
    "LayerNorm": ({}, [X]),
    "Linear": ({"units": 4}, [X]),
    "MaskedLMHead": ({"vocab_size": 6, "hidden_size": 8}, [X, TABLE]),
    "MaskedLMHead, not tied": ({"vocab_size": 6, "hidden_size": 8, "tied": False}, [X]),
    "MoE": (
        {"hidden_size": 8, "ffn_hidden_size": 16, "dropout_rate": 0.0, "moe_config": EXPERTS},
        [X],
    ),
    "MultiHeadAttention": ({"hidden_size": 8, "num_heads": 2, **RATES}, [X, X, X]),
    "PoolingHead": ({"pooling": "last"}, [X]),
    "PositionEmbedding": ({"max_length": 4}, [X]),
    "RMSNorm": ({}, [X]),
    "Router": ({"moe_config": EXPERTS}, [X]),
    "SequenceHead": ({"num_labels": 3, "pooling": "mean", "hidden_act": "tanh"}, [X]),
    "TokenHead": ({"num_labels": 3}, [X]),
    "TokenTypeEmbedding": ({"num_types": 2}, [X]),
    "Transformer": ({"encoder_layers": 1, "decoder_layers": 1, **BLOCK}, [X, BOTH, X, BOTH]),
    "TransformerDecoder": ({"num_layers": 1, **BLOCK}, [X, BOTH, X]),
    "TransformerDecoderLayer": (BLOCK, [X, BOTH, X]),
    "TransformerEncoder": ({"num_layers": 1, **BLOCK}, [X]),
    "TransformerEncoderLayer": (BLOCK, [X]),
    "VocabEmbedding": ({"vocab_size": 6, "embedding_size": 8}, [IDS]),
    "VocabHead": ({"vocab_size": 6}, [X]),
    "VocabHead, tied": ({"vocab_size": 6, "tied": True}, [X, TABLE]),
}
BASES = {"BlockStack", "CrossEntropyLoss", "DistillationLoss", "Layer", "TransformerBlock"}
DESTROY = "ignore:.*does not support masking"  # Layers that return router choices or masks.
CALLS = [{}, {"training": None}, {"training": False}, {"training": True}]
MASKED = [{"mask": MASK}, {"training": False, "mask": MASK}]


class Subclassed(keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, inputs, training=None, mask=None):
        if isinstance(inputs, list):
            return self.layer(*inputs, training=training, mask=keras.tree.flatten(mask)[0])
        return self.layer(inputs, training=training, mask=mask)


def values(outputs):
    return [np.asarray(x) for x in keras.tree.flatten(outputs)]


def same(outputs, expected):
    for x, y in zip(values(outputs), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_all_public_layers_are_tested():
    public = {
        name
        for name in layers.__all__
        if isinstance(getattr(layers, name), type)
        and issubclass(getattr(layers, name), keras.layers.Layer)
    }
    # LatentAttention needs the same tensor three times. Tests of pretrained models cover it.
    assert public - BASES - {"LatentAttention"} == {name.split(",")[0] for name in LAYERS}


@pytest.mark.filterwarnings(DESTROY)
@pytest.mark.parametrize("name", LAYERS)
def test_keras_models_match_the_layer(name):
    arguments, inputs = LAYERS[name]
    layer = getattr(layers, name.split(",")[0])(**arguments)
    inputs = [tf.constant(x) for x in inputs]
    expected, symbols = (
        values(layer(*inputs)),
        [keras.Input(x.shape[1:], dtype=x.dtype) for x in inputs],
    )
    batch = inputs if len(inputs) > 1 else inputs[0]
    masked = values(layer(*inputs, mask=MASK))
    subclassed, functional = Subclassed(layer), keras.Model(symbols, layer(*symbols))
    assert [x.shape[1:] for x in functional.outputs] == [x.shape[1:] for x in expected]
    for call in CALLS:
        same(layer(*inputs, **call), expected)
        same(functional(batch, **call), expected)
        same(subclassed(batch, **call), expected)
        if len(inputs) == 1:
            same(keras.Sequential([layer])(batch, **call), expected)
    for call in MASKED:
        same(layer(*inputs, **call), masked)
        same(subclassed(batch, **call), masked)
    first = _compat.with_mask(tf.identity(inputs[0]), MASK)
    same(layer(first, *inputs[1:]), masked)
    mask = keras.Input((4,), dtype="bool")
    same(keras.Model([*symbols, mask], layer(*symbols, mask=mask))([*inputs, MASK]), masked)


@pytest.mark.parametrize("name", ["MultiHeadAttention", "TransformerEncoder", "TransformerDecoder"])
def test_mask_keyword_is_used(name):
    arguments, inputs = LAYERS[name]
    layer = getattr(layers, name)(**arguments)
    inputs = [inputs[0], *(None if x is BOTH else x for x in inputs[1:])]
    masked_inputs = [
        X,
        *(_compat.with_mask(tf.constant(X), MASK) if x is X else x for x in inputs[1:]),
    ]
    masked = layer(*masked_inputs, mask=MASK)
    assert np.abs(masked - layer(*inputs)).max() > 1e-3


def test_functional_model_with_task_head_trains():
    ids = keras.Input((4,), dtype="int32")
    x = keras.layers.Embedding(6, 8, mask_zero=True)(ids)
    network = keras.Model(ids, layers.VocabHead(6)(x))
    alike = keras.models.clone_model(network)
    alike.set_weights(network.get_weights())
    models, loss = [Trainer(network), alike], keras.losses.SparseCategoricalCrossentropy(True)
    for model in models:
        model.compile(keras.optimizers.SGD(0.1), loss)
    losses, expected = (
        model.fit(IDS, IDS, epochs=2, verbose=0).history["loss"] for model in models
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
