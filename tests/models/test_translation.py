"""TranslationTransformer has the expected size, and each logit depends on the right tokens."""

import numpy as np
import pytest
import tensorflow as tf

from dtransformer import parallel_config
from dtransformer.models import TranslationTransformer
from dtransformer.reports.throughput import tokens_and_flops
from tests.layers.reference_compare import dtype_policy, each_policy
from tests.tolerances import BLOCKS, assert_all_close

VOCAB = 23
VARIANTS = {
    "untied": {},
    "tied": {"shared_embeddings": True, "tied_head": True},
    "tied_head": {"target_vocab_size": 17, "tied_head": True, "head_bias": True},
    "shared": {"shared_embeddings": True},
    "learned": {"positions": "learned", "max_source_length": 12, "max_target_length": 11},
    "post": {"post_layernorm_residual": True, "hidden_act": "gelu"},
    "decoder_heavy": {"encoder_layers": 0, "decoder_layers": 2},
}
each_variant = pytest.mark.parametrize("variant", VARIANTS)
# All variants run in float32. Both norm placements also run in 16 bits.
each_variant_and_policy = pytest.mark.parametrize(
    "variant, policy",
    [(variant, "float32") for variant in VARIANTS]
    + [
        (variant, policy)
        for variant in ("untied", "post")
        for policy in ("mixed_bfloat16", "mixed_float16")
    ],
)


def small_model(variant="untied", **options):
    sizes = {"hidden_size": 16, "num_heads": 4, "encoder_layers": 1, "decoder_layers": 1}
    return TranslationTransformer(VOCAB, **{**sizes, **VARIANTS[variant], **options})


def random_ids(batch=3, source=8, target=6, seed=0):
    """Return sentences of different lengths. The last one has no padding."""
    rng = np.random.default_rng(seed)
    inputs = {
        "source": rng.integers(4, 17, (batch, source)),
        "target": rng.integers(4, 17, (batch, target)),
    }
    inputs["target"][:, 0] = 2
    for row in range(batch - 1):
        inputs["source"][row, source - 1 - row :] = 0
        inputs["target"][row, target - 2 - row :] = 0
    return {name: ids.astype("int32") for name, ids in inputs.items()}


def pad_columns(ids, columns):
    return np.pad(ids, [(0, 0), (0, columns)])


def test_sample_model_has_the_published_number_of_parameters():
    """The published example, described in spec/sample.md, has 7,948,032 parameters."""
    model = TranslationTransformer(
        20000,
        hidden_size=128,
        ffn_hidden_size=128,
        num_heads=8,
        encoder_layers=1,
        decoder_layers=1,
        positions="learned",
        max_source_length=10,
        max_target_length=10,
        post_layernorm_residual=True,
    )
    model.build()
    assert model.count_params() == 7_948_032
    h, f, vocab = 128, 128, 20000
    attention, feed_forward, norm = 4 * (h * h + h), 2 * h * f + f + h, 2 * h
    encoder = attention + feed_forward + 2 * norm
    decoder = 2 * attention + feed_forward + 3 * norm
    assert model.count_params() == 3 * vocab * h + 2 * 10 * h + encoder + decoder


@pytest.mark.parametrize(
    "variant, tables", [("untied", 3), ("shared", 2), ("tied", 1), ("learned", 3)]
)
def test_tied_tables_are_stored_once(variant, tables):
    model = small_model(variant)
    model.build()
    assert sum(VOCAB in variable.shape for variable in model.variables) == tables


@each_policy
@each_variant
def test_every_variant_runs_in_every_precision(policy, variant):
    inputs = random_ids()
    reference = small_model(variant, dropout_rate=0.0)
    expected = reference(inputs)
    with dtype_policy(policy):
        model = small_model(variant, dropout_rate=0.0)
    with tf.GradientTape() as tape:
        logits = model(inputs, training=True)
        # A mean stays in the range of float16. Only the trainer scales losses.
        loss = tf.reduce_mean(tf.square(tf.cast(logits, "float32")))
    assert logits.dtype == model.compute_dtype
    assert logits.shape == (3, 6, model.vocab_size)
    assert {variable.dtype for variable in model.variables} == {"float32"}
    actual = {"logits": logits}
    assert_all_close(actual, {"logits": expected.numpy().astype("float64")}, BLOCKS[policy])
    weights = model.trainable_variables
    gradients = tape.gradient(loss, [variable.value for variable in weights])
    for variable, gradient in zip(weights, gradients, strict=True):
        assert gradient is not None, variable.path
        assert np.isfinite(tf.convert_to_tensor(gradient).numpy()).all(), variable.path


def test_dtype_policy_can_be_an_argument():
    model = small_model(dtype="mixed_bfloat16")
    assert model(random_ids()).dtype == "bfloat16"
    policies = {layer.dtype_policy.name for layer in model._flatten_layers()}
    assert "mixed_bfloat16" in policies and "mixed_float16" not in policies
    assert {layer.compute_dtype for layer in model.transformer._flatten_layers()} == {"bfloat16"}


@each_variant_and_policy
def test_source_padding_does_not_change_logits(variant, policy):
    inputs = random_ids()
    with dtype_policy(policy):
        model = small_model(variant)
    logits = tf.cast(model(inputs), "float32").numpy()
    wider = {**inputs, "source": pad_columns(inputs["source"], 3)}
    padded = {"logits": model(wider)}
    assert_all_close(padded, {"logits": logits}, BLOCKS[policy])
    # Each unpadded sentence alone gives the same logits.
    for row in range(3):
        length = np.count_nonzero(inputs["source"][row])
        alone = {
            "source": inputs["source"][row : row + 1, :length],
            "target": inputs["target"][row : row + 1],
        }
        assert_all_close(
            {"logits": model(alone)}, {"logits": logits[row : row + 1]}, BLOCKS[policy]
        )


@each_variant
def test_target_padding_does_not_change_logits(variant):
    inputs = random_ids()
    model = small_model(variant)
    logits = model(inputs).numpy()
    wider = model({**inputs, "target": pad_columns(inputs["target"], 4)})
    is_token = inputs["target"] != 0
    assert_all_close(
        {"logits": wider[:, :6][is_token]}, {"logits": logits[is_token]}, BLOCKS["float32"]
    )


@each_variant_and_policy
def test_later_token_never_changes_earlier_logits(variant, policy):
    """Logits are bitwise equal. Otherwise training could see its labels."""
    inputs = random_ids()
    inputs["target"][2] = [2, 5, 6, 7, 8, 9]
    with dtype_policy(policy):
        model = small_model(variant)
    logits = tf.cast(model(inputs), "float32").numpy()
    for position in (1, 3, 5):
        target = inputs["target"].copy()
        target[:, position:] = 16 - position
        changed = tf.cast(model({**inputs, "target": target}), "float32").numpy()
        np.testing.assert_array_equal(changed[:, :position], logits[:, :position])
        assert (changed[2, position] != logits[2, position]).any()


@each_variant
def test_every_source_token_changes_logits(variant):
    inputs = random_ids(batch=1)
    model = small_model(variant)
    logits = model(inputs).numpy()
    for position in (0, 3, 7):
        source = inputs["source"].copy()
        source[0, position] = (source[0, position] - 3) % 13 + 4
        assert (model({**inputs, "source": source}).numpy() != logits).any(), position


def test_word_order_changes_logits():
    """Without positions, attention would ignore the order."""
    inputs = random_ids(batch=1)
    swapped = {**inputs, "source": inputs["source"][:, ::-1]}
    for variant in ("untied", "learned"):
        model = small_model(variant)
        assert not np.allclose(model(inputs), model(swapped), atol=1e-4)


def test_any_batch_size_and_length_without_rebuilding():
    model = small_model()
    model.build()
    before = {variable.path: variable.numpy() for variable in model.variables}
    ids = tf.TensorSpec([None, None], "int32")
    compiled = tf.function(model, input_signature=[{"source": ids, "target": ids}])
    for batch, source, target in ((1, 1, 1), (3, 8, 6), (2, 30, 50), (7, 5, 2)):
        inputs = random_ids(batch, source, target)
        logits = compiled(inputs)
        assert logits.shape == (batch, target, VOCAB)
        assert_all_close({"logits": logits}, {"logits": model(inputs).numpy()}, BLOCKS["float32"])
    assert compiled.experimental_get_tracing_count() == 1
    assert [v.path for v in model.variables] == list(before)
    for variable in model.variables:
        np.testing.assert_array_equal(variable.numpy(), before[variable.path])


def test_sentence_of_padding_only_gives_finite_logits():
    inputs = random_ids()
    inputs["source"][1] = 0
    assert np.isfinite(small_model()(inputs).numpy()).all()


@pytest.mark.parametrize("side, limit", [("source", 12), ("target", 11)])
def test_more_tokens_than_learned_positions_raise_an_error(side, limit):
    model = small_model("learned")
    lengths = {"source": 8, "target": 6, side: limit}
    model(random_ids(**lengths))
    lengths[side] += 1
    with pytest.raises(ValueError, match=f"{limit + 1} positions.*max_length={limit}"):
        model(random_ids(**lengths))


@pytest.mark.parametrize("model_parallel", [2, 4])
def test_padded_vocabulary_does_not_change_the_logits(model_parallel):
    inputs = random_ids()
    expected = small_model()(inputs).numpy()
    with parallel_config(model_parallel=model_parallel):
        logits = small_model()(inputs).numpy()
    assert logits.shape[-1] == 24
    np.testing.assert_array_equal(logits.argmax(-1), expected.argmax(-1))
    assert_all_close({"logits": logits[..., :VOCAB]}, {"logits": expected}, BLOCKS["float32"])


def test_padding_id_can_be_changed():
    """The sample pads with 1."""
    inputs = random_ids()
    reference = small_model()
    model = small_model(pad_id=1)
    padded_with_1 = {name: np.where(ids == 0, 1, ids) for name, ids in inputs.items()}
    is_token = inputs["target"] != 0
    assert_all_close(
        {"logits": model(padded_with_1)[is_token]},
        {"logits": reference(inputs).numpy()[is_token]},
        BLOCKS["float32"],
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("encoder_layers, decoder_layers", [(1, 1), (2, 3), (0, 1)])
def test_flops_per_step_match_the_formula(encoder_layers, decoder_layers, tied):
    """Count a multiplication and an addition per product, and twice that for gradients."""
    h, f, vocab, (b, s, t) = 16, 40, VOCAB, (3, 8, 6)
    model = TranslationTransformer(
        vocab,
        hidden_size=h,
        num_heads=4,
        ffn_hidden_size=f,
        encoder_layers=encoder_layers,
        decoder_layers=decoder_layers,
        shared_embeddings=tied,
        tied_head=tied,
    )

    def attention(queries, keys):
        # Each product is (rows, inner, columns).
        projections = [(queries, h, h), (keys, h, h), (keys, h, h), (queries, h, h)]
        return projections + [(queries, h, keys), (queries, keys, h)]

    def feed_forward(length):
        return [(length, h, f), (length, f, h)]

    products = encoder_layers * (attention(s, s) + feed_forward(s))
    products += decoder_layers * (attention(t, t) + attention(t, s) + feed_forward(t))
    products += [(t, h, vocab)]
    expected = 3 * 2 * b * sum(rows * inner * columns for rows, inner, columns in products)
    ids = random_ids(b, s, t)
    counted = tokens_and_flops(model, ids, ids["target"])
    assert counted == (b * (s + t), pytest.approx(expected, rel=1e-6))
