"""Weights, configs and placement of layers: what does not depend on the numbers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtransformer
from dtransformer import layers, parallel_config
from dtransformer.layers import (
    Dropout,
    FeedForward,
    MultiHeadAttention,
    Transformer,
    TransformerDecoder,
    TransformerEncoder,
    VocabHead,
    dropout_seed,
)
from dtransformer.models import TranslationTransformer
from tests.layers.reference_compare import each_policy
from tests.tolerances import LAYERS, assert_all_close

VOCAB = 10  # three ranks pad it to twelve
INPUTS = {
    "source": np.array([[5, 4, 3, 0], [9, 8, 7, 6]], "int32"),
    "target": np.array([[2, 4, 9], [2, 5, 0]], "int32"),
}
VARIANTS = {
    "untied": {},
    "bias": {"head_bias": True},
    "tied": {"shared_embeddings": True, "tied_head": True},
}
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def small_model(variant="untied", **options):
    sizes = {"hidden_size": 12, "num_heads": 3, "encoder_layers": 1, "decoder_layers": 1}
    model = TranslationTransformer(VOCAB, **{**sizes, **VARIANTS[variant], **options})
    model.build()
    return model


def by_path(model):
    return {variable.path: variable.numpy() for variable in model.variables}


# Initial weights


@each_variant
def test_the_same_seed_gives_the_same_weights(variant):
    first = by_path(small_model(variant))
    keras.utils.set_random_seed(99)  # neither Keras' nor TensorFlow's generator matters
    small_model("untied", hidden_size=24)  # nor what was made before
    second = by_path(small_model(variant))
    assert list(first) == list(second) and len(first) > 40
    for path, value in first.items():
        np.testing.assert_array_equal(second[path], value, path)


def test_another_seed_gives_other_weights():
    first = by_path(small_model())
    dtransformer.set_seed(1)
    second = by_path(small_model())
    for path, value in first.items():
        is_random = value.std() > 0
        assert is_random != np.array_equal(second[path], value), path


def test_no_two_weights_are_equal():
    model = small_model(encoder_layers=2, decoder_layers=2)
    starts = [v.numpy().ravel()[:6].tobytes() for v in model.variables if v.numpy().std() > 0]
    assert len(starts) > 25 and len(set(starts)) == len(starts)


def test_a_weight_does_not_depend_on_the_layers_around_it():
    small, large = by_path(small_model()), by_path(small_model(encoder_layers=3, head_bias=True))
    for path, value in small.items():
        np.testing.assert_array_equal(large[path], value, path)


def test_a_seed_of_the_users_own_is_kept():
    initializer = keras.initializers.RandomNormal(seed=5)
    tables = []
    for seed in (0, 1):
        dtransformer.set_seed(seed)
        tables.append(layers.VocabEmbedding(VOCAB, 4, initializer)(INPUTS["source"])[1].numpy())
    np.testing.assert_array_equal(tables[0], tables[1])


def test_kernels_have_glorots_spread():
    """Attention kernels are matrices of h × h, not convolutions with n × d outputs."""
    layer = MultiHeadAttention(128, 8)
    layer.build((None, None, 128))
    bound = np.sqrt(6 / (128 + 128))
    for name in ("query", "key", "value", "output"):
        kernel = getattr(layer, f"{name}_kernel").numpy()
        assert 0.99 * bound < np.abs(kernel).max() <= bound, name
        assert abs(kernel.mean()) < 0.02 * bound, name


# Padded vocabularies


@each_variant
@pytest.mark.parametrize("model_parallel", [3, 4])
def test_padding_the_vocabulary_changes_no_true_weight(variant, model_parallel):
    sizes = {"hidden_size": 12, "num_heads": 12}
    true = by_path(small_model(variant, **sizes))
    with parallel_config(model_parallel=model_parallel):
        padded = by_path(small_model(variant, **sizes))
    assert list(padded) == list(true)
    for path, value in true.items():
        part = padded[path][tuple(slice(size) for size in value.shape)]
        np.testing.assert_array_equal(part, value, path)
        width = 12 if VOCAB in value.shape else None
        assert padded[path].shape == tuple(width if n == VOCAB else n for n in value.shape)


@each_variant
@pytest.mark.parametrize("saved, loaded", [(3, 1), (1, 3), (3, 2), (4, 3)])
def test_weights_fit_every_layout(variant, saved, loaded, tmp_path):
    sizes = {"hidden_size": 12, "num_heads": 12}
    path = tmp_path / "model.weights.h5"
    with parallel_config(model_parallel=saved):
        model = small_model(variant, **sizes)
        dtransformer.set_seed(1)  # so that only the file can make them equal
        for weight in model.variables:
            weight.assign_add(0.01 * np.random.default_rng(0).standard_normal(weight.shape))
        expected = model(INPUTS)[..., :VOCAB].numpy()
        model.save_weights(path)
    with parallel_config(model_parallel=loaded):
        other = small_model(variant, **sizes)
        assert not np.allclose(other(INPUTS)[..., :VOCAB], expected)
        other.load_weights(path)
        logits = other(INPUTS).numpy()
    assert_all_close({"logits": logits[..., :VOCAB]}, {"logits": expected}, LAYERS["float32"])
    assert (logits[..., VOCAB:] == np.finfo("float32").min).all()


@pytest.mark.parametrize("variant", ["untied", "tied"])
@pytest.mark.parametrize("model_parallel", [1, 3])
def test_a_file_of_another_vocabulary_is_refused(variant, model_parallel, tmp_path):
    """Also where both are padded to the same size."""
    path = tmp_path / "model.weights.h5"
    with parallel_config(model_parallel=model_parallel):
        options = {"hidden_size": 12, "num_heads": 3, "encoder_layers": 1, "decoder_layers": 1}
        saved = TranslationTransformer(VOCAB + 1, **options, **VARIANTS[variant])
        saved.build()
        saved.save_weights(path)
        model = small_model(variant)
        before = by_path(model)
        with pytest.raises(ValueError, match=f"vocab_size={VOCAB}.* {VOCAB + 1} entries"):
            model.load_weights(path)
    for name, value in by_path(model).items():
        if VOCAB in value.shape:
            np.testing.assert_array_equal(value, before[name], name)


# Configs

LAYER_OPTIONS = {
    "AttentionMask": ({}, [(2, 4)]),
    "CrossEntropyLoss": ({"label_smoothing": 0.1, "ignore_id": 3, "vocab_size": 9}, None),
    "Dropout": ({"rate": 0.25}, [(2, 4)]),
    "FeedForward": (
        {
            "hidden_size": 12,
            "ffn_hidden_size": 7,
            "dropout_rate": 0.2,
            "hidden_act": "relu",
            "kernel_initializer": "he_normal",
        },
        [(2, 4, 12)],
    ),
    "LayerNorm": ({"epsilon": 0.1, "compute_type": "float64"}, [(2, 12)]),
    "Linear": (
        {"units": 5, "use_bias": False, "parallel": "row", "kernel_initializer": "ones"},
        [(2, 12)],
    ),
    "MultiHeadAttention": (
        {
            "hidden_size": 12,
            "num_heads": 3,
            "hidden_dropout_rate": 0.2,
            "attention_dropout_rate": 0.3,
            "softmax_compute_type": "float64",
            "kernel_initializer": "he_normal",
        },
        [(2, 4, 12)] * 3,
    ),
    "PositionEmbedding": (
        {"max_length": 6, "kind": "learned", "initializer": "he_normal"},
        [(2, 4, 12)],
    ),
    "RMSNorm": ({"epsilon": 0.1, "compute_type": "float64"}, [(2, 12)]),
    "VocabEmbedding": (
        {"vocab_size": 10, "embedding_size": 12, "initializer": "he_normal"},
        [(2, 4)],
    ),
    "VocabHead": (
        {"vocab_size": 10, "use_bias": True, "tied": False, "kernel_initializer": "he_normal"},
        [(2, 4, 12)],
    ),
}
BLOCK_OPTIONS = {
    "hidden_size": 12,
    "num_heads": 3,
    "ffn_hidden_size": 7,
    "attention_dropout_rate": 0.3,
    "hidden_dropout_rate": 0.2,
    "hidden_act": "relu",
    "post_layernorm_residual": True,
    "layernorm_compute_type": "float64",
    "softmax_compute_type": "float64",
}
X, IDS = (2, 4, 12), (2, 4)
LAYER_OPTIONS |= {
    "TransformerEncoderLayer": (BLOCK_OPTIONS, [X]),
    "TransformerDecoderLayer": (BLOCK_OPTIONS, [X, (2, 4, 4), X]),
    "TransformerEncoder": (
        {"num_layers": 2, "offset": 1, "network_layers": 5, **BLOCK_OPTIONS},
        [X],
    ),
    "TransformerDecoder": (
        {"num_layers": 2, "offset": 1, "network_layers": 5, **BLOCK_OPTIONS},
        [X, (2, 4, 4), X],
    ),
    "Transformer": (
        {"encoder_layers": 2, "decoder_layers": 1, **BLOCK_OPTIONS},
        [X, IDS, X, (2, 4, 4)],
    ),
}
PUBLIC = [
    name
    for name in layers.__all__
    if isinstance(getattr(layers, name), type)
    and name not in ("Layer", "TransformerBlock", "BlockStack")  # bases
]


def run(layer, shapes):
    rng = np.random.default_rng(0)
    tensors = [tf.constant(rng.integers(0, 2, shape), layer.compute_dtype) for shape in shapes]
    return tf.nest.flatten(layer(*tensors))


@pytest.mark.parametrize("name", PUBLIC)
def test_a_layer_is_made_again_from_its_config(name):
    options, shapes = LAYER_OPTIONS[name]
    cls = getattr(layers, name)
    layer = cls(**options, name="the_layer", dtype="mixed_bfloat16")
    again = cls.from_config(layer.get_config())
    assert type(again) is cls and again.name == "the_layer"
    assert again.dtype_policy.name == "mixed_bfloat16"
    config = again.get_config()
    assert config == layer.get_config()
    for option, value in options.items():
        assert config[option] == value, option
    # Keras' own way, through JSON, as a saved model goes.
    stored = keras.saving.serialize_keras_object(layer)
    revived = keras.saving.deserialize_keras_object(stored)
    assert type(revived) is cls and revived.get_config() == layer.get_config()
    if shapes is None:
        return
    outputs = run(layer, shapes)
    for other in (again, revived):
        for expected, actual in zip(outputs, run(other, shapes), strict=True):
            np.testing.assert_array_equal(tf.cast(actual, "float64"), tf.cast(expected, "float64"))
        assert by_path(other).keys() == by_path(layer).keys()


@keras.saving.register_keras_serializable("tests")
def half(x):
    return 0.5 * x


@pytest.mark.parametrize(
    "make, shapes",
    [
        (lambda: FeedForward(12, 7, hidden_act=half, name="it"), [X]),
        (lambda: TransformerEncoder(1, 12, 3, 7, hidden_act=half, name="it"), [X]),
        (lambda: Transformer(1, 1, 12, 3, 7, hidden_act=half, name="it"), [X, IDS, X, (2, 4, 4)]),
    ],
    ids=["FeedForward", "TransformerEncoder", "Transformer"],
)
def test_an_activation_of_the_users_own_survives_the_config(make, shapes):
    layer = make()
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    for expected, actual in zip(run(layer, shapes), run(again, shapes), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_a_model_is_made_again_from_its_config():
    options = {
        "source_vocab_size": 11,
        "target_vocab_size": 9,
        "hidden_size": 12,
        "num_heads": 3,
        "ffn_hidden_size": 7,
        "encoder_layers": 2,
        "decoder_layers": 1,
        "dropout_rate": 0.2,
        "attention_dropout_rate": 0.3,
        "embedding_dropout_rate": 0.4,
        "hidden_act": "gelu",
        "positions": "learned",
        "max_source_length": 8,
        "max_target_length": 7,
        "shared_embeddings": False,
        "tied_head": True,
        "head_bias": True,
        "post_layernorm_residual": True,
        "pad_id": 1,
        "start_id": 0,
        "end_id": 2,
    }
    model = TranslationTransformer(**options, dtype="mixed_bfloat16")
    stored = keras.saving.serialize_keras_object(model)
    again = keras.saving.deserialize_keras_object(stored)
    assert type(again) is TranslationTransformer
    for made in (again, TranslationTransformer.from_config(model.get_config())):
        assert made.get_config() == model.get_config()
        assert {option: made.get_config()[option] for option in options} == options
        assert made.dtype_policy.name == "mixed_bfloat16"
        model.build()
        made.build()
        for path, value in by_path(model).items():
            np.testing.assert_array_equal(by_path(made)[path], value, path)


def test_a_zero_stays_a_zero():
    """Rates that are 0 are given, not left out."""
    model = TranslationTransformer(
        11, attention_dropout_rate=0.0, embedding_dropout_rate=0, dropout_rate=0.3
    )
    assert model.get_config()["attention_dropout_rate"] == 0.0
    assert model.get_config()["embedding_dropout_rate"] == 0.0
    assert model.source_dropout.rate == 0.0
    assert model.transformer.encoder.blocks[0].attention.attention_dropout.rate == 0.0


# Blocks over pipeline stages


@pytest.mark.parametrize("encoder_layers, decoder_layers", [(3, 2), (1, 1), (0, 4)])
def test_lambda_func_is_called_once_a_block(encoder_layers, decoder_layers):
    calls = []
    Transformer(
        encoder_layers, decoder_layers, 12, 3, 7, lambda_func=lambda **call: calls.append(call)
    )
    total = encoder_layers + decoder_layers
    expected = [(number, 0) for number in range(encoder_layers)]
    expected += [(number, encoder_layers) for number in range(decoder_layers)]
    assert [(call["layer_id"], call["offset"]) for call in calls] == expected
    assert len({id(call["network"]) for call in calls}) == total
    for call in calls:
        assert set(call) == {"network", "layer_id", "offset", "parallel_config", "layers"}
        assert call["layers"] == total
        assert call["parallel_config"] is dtransformer.get_parallel_config()
    kinds = [type(call["network"]).__name__ for call in calls]
    assert (
        kinds
        == ["TransformerEncoderLayer"] * encoder_layers
        + ["TransformerDecoderLayer"] * decoder_layers
    )


def test_lambda_func_places_blocks():
    def place(network, layer_id, offset, parallel_config, layers):
        network.pipeline_stage = int(layer_id + offset >= 1)
        network.set_comm_fusion(layers - layer_id)

    with parallel_config(pipeline_stage=2):
        model = model_with(encoder_layers=1, decoder_layers=2, lambda_func=place)
    blocks = [*model.transformer.encoder.blocks, *model.transformer.decoder.blocks]
    assert [block.pipeline_stage for block in blocks] == [0, 1, 1]
    assert [block.comm_fusion for block in blocks] == [3, 3, 2]


@pytest.mark.parametrize(
    "encoder_layers, decoder_layers, stages, groups, expected_stages, expected_groups",
    [
        (1, 1, 1, 4, [0, 0], [1, 2]),
        (6, 6, 1, 4, [0] * 12, [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]),
        (6, 6, 4, 4, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3),
        (4, 4, 2, 2, [0] * 4 + [1] * 4, [1] * 4 + [2] * 4),
        (3, 4, 3, 4, [0, 0, 1, 1, 2, 2, 2], [1, 2, 3, 4, 5, 6, 7]),
        (2, 1, 3, 1, [0, 1, 2], [1, 1, 1]),
        (0, 5, 2, 3, [0, 0, 1, 1, 1], [1, 2, 3, 4, 5]),
    ],
)
def test_blocks_are_spread_evenly_by_default(
    encoder_layers, decoder_layers, stages, groups, expected_stages, expected_groups
):
    with parallel_config(pipeline_stage=stages, gradient_aggregation_group=groups):
        network = Transformer(encoder_layers, decoder_layers, 12, 3, 7)
    blocks = [*network.encoder.blocks, *network.decoder.blocks]
    layers_, group_size = len(blocks), max(len(blocks) // groups, 1)
    per_stage = max(layers_ // stages, 1)
    # What is written in the specification, and what it comes to.
    assert expected_stages == [min(n // per_stage, stages - 1) for n in range(layers_)]
    assert expected_groups == [n // group_size + 1 for n in range(layers_)]
    assert [block.pipeline_stage for block in blocks] == expected_stages
    assert [block.comm_fusion for block in blocks] == expected_groups


@pytest.mark.parametrize(
    "make",
    [
        lambda: Transformer(1, 2, 12, 3, 7),
        lambda: TransformerEncoder(3, 12, 3, 7),
        lambda: TransformerDecoder(3, 12, 3, 7),
        lambda: TranslationTransformer(11, encoder_layers=2, decoder_layers=1),
    ],
)
def test_more_stages_than_layers(make):
    with parallel_config(pipeline_stage=4):
        with pytest.raises(ValueError, match="pipeline_stage=4.*3 "):
            make()
    with parallel_config(pipeline_stage=3):
        make()


@pytest.mark.parametrize(
    "stages, words",
    [
        ([1, 0, 1, 1], ["block_1", "stage 0", "stage 1"]),  # in the encoder
        ([0, 0, 1, 0], ["block_1", "stage 0", "stage 1"]),  # in the decoder
        ([0, 1, 0, 0], ["block_0", "stage 0", "stage 1"]),  # from one to the other
        ([0, 0, 1, 2], ["block_1", "stage 2", "2 stages"]),
        ([-1, 0, 1, 1], ["block_0", "stage -1", "2 stages"]),
    ],
)
def test_wrong_stages_are_refused(stages, words):
    def place(network, layer_id, offset, parallel_config, layers):
        network.pipeline_stage = stages[layer_id + offset]

    with parallel_config(pipeline_stage=2), pytest.raises(ValueError) as caught:
        Transformer(2, 2, 12, 3, 7, lambda_func=place)
    assert all(word in str(caught.value) for word in words)


# Wrong arguments


def model_with(**options):
    sizes = {"source_vocab_size": 11, "hidden_size": 12, "num_heads": 3}
    return TranslationTransformer(**{**sizes, **options})


def encoder_with(**options):
    sizes = {"num_layers": 1, "hidden_size": 12, "num_heads": 3, "ffn_hidden_size": 7}
    return TransformerEncoder(**{**sizes, **options})


@pytest.mark.parametrize("hidden_act", ["gelus", "", "get", "serialize", "Dense"])
def test_an_unknown_activation_lists_what_exists(hidden_act):
    for make in (
        lambda: FeedForward(12, 7, hidden_act=hidden_act),
        lambda: encoder_with(hidden_act=hidden_act),
        lambda: model_with(hidden_act=hidden_act),
    ):
        with pytest.raises(ValueError, match=f"'{hidden_act}'") as caught:
            make()
        assert all(name in str(caught.value) for name in ("gelu", "relu", "silu", "tanh"))


@pytest.mark.parametrize("hidden_act", ["gelu", "relu", "silu", "tanh", tf.sin])
def test_every_keras_activation_and_any_callable(hidden_act):
    layer = FeedForward(12, 7, dropout_rate=0.0, hidden_act=hidden_act)
    x = np.random.default_rng(0).standard_normal((1, 2, 12)).astype("float32")
    layer(x)
    activation = hidden_act if callable(hidden_act) else keras.activations.get(hidden_act)
    inner = activation(x @ layer.mapping_kernel.numpy())
    expected = np.asarray(inner) @ layer.projection_kernel.numpy()
    assert_all_close({"output": layer(x)}, {"output": expected}, LAYERS["float32"])


@pytest.mark.parametrize("hidden_size, num_heads", [(12, 5), (12, 24), (16, 3)])
def test_heads_have_to_divide_the_hidden_size(hidden_size, num_heads):
    for make in (
        lambda: MultiHeadAttention(hidden_size, num_heads),
        lambda: encoder_with(hidden_size=hidden_size, num_heads=num_heads),
        lambda: model_with(hidden_size=hidden_size, num_heads=num_heads),
    ):
        with pytest.raises(ValueError, match=f"{num_heads}.*{hidden_size}"):
            make()


@pytest.mark.parametrize(
    "sizes, model_parallel",
    [
        ({"num_heads": 3, "hidden_size": 12}, 2),
        ({"num_heads": 4, "hidden_size": 12}, 3),
        ({"num_heads": 4, "hidden_size": 12, "ffn_hidden_size": 7}, 4),
    ],
)
def test_model_parallel_has_to_divide_what_it_cuts(sizes, model_parallel):
    with parallel_config(model_parallel=model_parallel):
        with pytest.raises(ValueError) as caught:
            encoder_with(**{"ffn_hidden_size": 12 * model_parallel, **sizes})
    message = str(caught.value)
    assert f"model_parallel={model_parallel}" in message
    wrong = {name: size for name, size in sizes.items() if size % model_parallel}
    assert all(f"{name}={size}" in message for name, size in wrong.items())


RATES = [
    (lambda rate: Dropout(rate), "rate"),
    (lambda rate: FeedForward(12, 7, dropout_rate=rate), "dropout_rate"),
    (lambda rate: MultiHeadAttention(12, 3, hidden_dropout_rate=rate), "hidden_dropout_rate"),
    (lambda rate: MultiHeadAttention(12, 3, attention_dropout_rate=rate), "attention_dropout_rate"),
    (lambda rate: encoder_with(hidden_dropout_rate=rate), "dropout_rate"),
    (lambda rate: encoder_with(attention_dropout_rate=rate), "attention_dropout_rate"),
    (lambda rate: model_with(dropout_rate=rate), "dropout_rate"),
    (lambda rate: model_with(attention_dropout_rate=rate), "attention_dropout_rate"),
    (lambda rate: model_with(embedding_dropout_rate=rate), "rate"),
    (lambda rate: layers.CrossEntropyLoss(rate), "label_smoothing"),
]


@pytest.mark.parametrize("make, name", RATES)
@pytest.mark.parametrize("rate", [1, 1.0, -0.1, 1.5, float("nan")])
def test_rates_out_of_range(make, name, rate):
    with pytest.raises(ValueError, match=rf"{name}.*\[0, 1\).*{rate}"):
        make(rate)


@pytest.mark.parametrize("make, name", RATES)
@pytest.mark.parametrize("rate", ["0.1", True])
def test_rates_of_a_wrong_type(make, name, rate):
    with pytest.raises(TypeError, match=f"{name}.*{rate}"):
        make(rate)


@pytest.mark.parametrize(
    "make",
    [
        lambda size: FeedForward(size, 7),
        lambda size: FeedForward(12, size),
        lambda size: MultiHeadAttention(12, size),
        lambda size: layers.Linear(size),
        lambda size: layers.VocabEmbedding(size, 12),
        lambda size: layers.VocabEmbedding(10, size),
        lambda size: VocabHead(size),
        lambda size: layers.PositionEmbedding(size),
        lambda size: encoder_with(ffn_hidden_size=size),
        lambda size: Transformer(1, size, 12, 3, 7),
        lambda size: model_with(source_vocab_size=size),
        lambda size: model_with(hidden_size=size),
        lambda size: model_with(decoder_layers=size),
        lambda size: model_with(max_source_length=size),
    ],
)
def test_sizes_are_positive_ints(make):
    for size in (0, -2):
        with pytest.raises(ValueError, match=f"at least 1, got {size}"):
            make(size)
    for size in (2.0, "2", True):
        with pytest.raises(TypeError, match=f"must be an int, got {size!r}"):
            make(size)


@pytest.mark.parametrize("encoder_layers", [-1, 1.5, "2"])
def test_the_number_of_encoder_layers(encoder_layers):
    for make in (
        lambda: Transformer(encoder_layers, 1, 12, 3, 7),
        lambda: model_with(encoder_layers=encoder_layers),
    ):
        with pytest.raises((TypeError, ValueError), match="layers"):
            make()


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: layers.Linear(4, parallel="rows"), "'column', 'row' or None, got 'rows'"),
        (lambda: layers.PositionEmbedding(4, kind="rotary"), "'learned' or 'sinusoidal'"),
        (lambda: model_with(positions="rotary"), "'learned' or 'sinusoidal'"),
        (lambda: model_with(target_vocab_size=9, shared_embeddings=True), "11.*9"),
    ],
)
def test_wrong_choices(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# Dropout


def mask_of(layer, seed, x=None):
    x = np.ones((64, 64), "float32") if x is None else x
    with dropout_seed(tf.constant(seed)):
        return layer(x, training=True).numpy()


def test_masks_depend_on_the_seed_and_the_layer_only():
    first, second = Dropout(0.3, name="first"), Dropout(0.3, name="second")
    again = Dropout(0.3, name="first")
    mask = mask_of(first, [7, 3])
    np.testing.assert_array_equal(mask_of(first, [7, 3]), mask)
    np.testing.assert_array_equal(mask_of(again, [7, 3]), mask)
    others = [mask_of(first, [7, 4]), mask_of(first, [8, 3]), mask_of(second, [7, 3])]
    for other in others:
        agree = ((other == 0) == (mask == 0)).mean()
        assert abs(agree - (0.3**2 + 0.7**2)) < 0.05, "masks are independent"


@each_policy
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_how_much_is_kept_and_how_it_is_scaled(policy, rate):
    layer = Dropout(rate, dtype=policy)
    x = np.full((256, 256), 3.0, "float32")
    dropped = mask_of(layer, [1, 2], x).astype("float64")
    kept = dropped != 0
    # Five standard deviations of 65,536 draws.
    assert abs(kept.mean() - (1 - rate)) <= 5 * np.sqrt(rate * (1 - rate)) / 256
    np.testing.assert_allclose(dropped[kept], 3.0 / (1 - rate), rtol=LAYERS[policy])
    np.testing.assert_array_equal(layer(x, training=False).numpy().astype("float64"), x)


def test_outside_of_a_seed_every_call_has_a_mask_of_its_own():
    layer = Dropout(0.5)
    x = np.ones((64, 64), "float32")
    first, second = layer(x, training=True).numpy(), layer(x, training=True).numpy()
    assert (first != second).mean() > 0.4
    with dropout_seed(tf.constant([1, 1])):
        pass
    assert (layer(x, training=True).numpy() != second).mean() > 0.4, "the seed has ended"


@pytest.mark.parametrize("compiled", [False, True])
def test_recomputing_a_block_gives_the_same_masks(compiled):
    block = layers.TransformerEncoderLayer(12, 3, 7, 0.3, 0.3, name="block")
    x = tf.constant(np.random.default_rng(0).standard_normal((2, 5, 12)), "float32")
    block(x)
    weights = [variable.value for variable in block.trainable_variables]

    def apply(x):
        return block(x, training=True)

    def gradients(seed, function):
        # The gradients too are computed while the seed holds, as a step's are.
        with dropout_seed(seed), tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.square(function(x)))
            parts = [loss, *tape.gradient(loss, [x, *weights])]
        return {str(number): part for number, part in enumerate(parts)}

    run_step = tf.function(gradients) if compiled else gradients
    seed = tf.constant([3, 4])
    expected = {name: value.numpy() for name, value in run_step(seed, apply).items()}
    assert_all_close(run_step(seed, tf.recompute_grad(apply)), expected, LAYERS["float32"])


def test_a_step_inside_one_compiled_function_has_its_own_mask():
    layer = Dropout(0.5, name="dropout")
    x = np.ones((64, 64), "float32")

    @tf.function
    def step(number):
        with dropout_seed(tf.stack([7, number])):
            return layer(x, training=True)

    masks = [step(tf.constant(number)).numpy() for number in (0, 1, 0)]
    assert (masks[0] != masks[1]).mean() > 0.4
    np.testing.assert_array_equal(masks[0], masks[2])
    np.testing.assert_array_equal(masks[0], mask_of(layer, [7, 0]))
