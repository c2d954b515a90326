"""Initial weights depend only on seed and name, and vocabulary padding does not change them."""

import keras
import numpy as np
import pytest

import dtransformer
from dtransformer import layers, parallel_config
from dtransformer.layers import (
    MultiHeadAttention,
)
from dtransformer.models import TranslationTransformer
from tests.tolerances import LAYERS, assert_all_close

VOCAB = 10  # Three ranks pad it to 12.
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
def test_same_seed_gives_same_weights(variant):
    first = by_path(small_model(variant))
    keras.utils.set_random_seed(99)  # The generators of Keras and TensorFlow have no effect.
    small_model("untied", hidden_size=24)  # Earlier models have no effect.
    second = by_path(small_model(variant))
    assert list(first) == list(second) and len(first) > 40
    for path, value in first.items():
        np.testing.assert_array_equal(second[path], value, path)


def test_different_seed_gives_different_weights():
    first = by_path(small_model())
    dtransformer.set_seed(1)
    second = by_path(small_model())
    for path, value in first.items():
        is_random = value.std() > 0
        assert is_random != np.array_equal(second[path], value), path


def test_all_weights_differ():
    model = small_model(encoder_layers=2, decoder_layers=2)
    starts = [v.numpy().ravel()[:6].tobytes() for v in model.variables if v.numpy().std() > 0]
    assert len(starts) > 25 and len(set(starts)) == len(starts)


def test_weight_does_not_depend_on_other_layers():
    small, large = by_path(small_model()), by_path(small_model(encoder_layers=3, head_bias=True))
    for path, value in small.items():
        np.testing.assert_array_equal(large[path], value, path)


def test_explicit_initializer_seed_is_kept():
    initializer = keras.initializers.RandomNormal(seed=5)
    tables = []
    for seed in (0, 1):
        dtransformer.set_seed(seed)
        tables.append(layers.VocabEmbedding(VOCAB, 4, initializer)(INPUTS["source"])[1].numpy())
    np.testing.assert_array_equal(tables[0], tables[1])


def test_kernels_have_glorot_variance():
    """Attention kernels are matrices of size h × h, not convolutions with n × d outputs."""
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
def test_vocabulary_padding_does_not_change_weights(variant, model_parallel):
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
def test_weight_files_fit_all_layouts(variant, saved, loaded, tmp_path):
    sizes = {"hidden_size": 12, "num_heads": 12}
    path = tmp_path / "model.weights.h5"
    with parallel_config(model_parallel=saved):
        model = small_model(variant, **sizes)
        dtransformer.set_seed(1)  # Only the file can make the weights equal.
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
def test_file_with_another_vocab_size_raises(variant, model_parallel, tmp_path):
    """Also if both are padded to the same size."""
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
