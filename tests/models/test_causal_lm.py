"""CausalLM has the expected size and FLOPs, is causal, saves and loads, and learns."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtransformer
from dtransformer import parallel_config
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import CausalLM
from dtransformer.parallel.pipeline_parallel.dataflow import Dataflow
from dtransformer.parallel.pipeline_parallel.stage_dispatch import ChunkView, view
from dtransformer.parallel.schedules.placement import Placement
from dtransformer.reports.throughput import tokens_and_flops
from dtransformer.trainers import Trainer
from tests.layers.reference_compare import POLICIES, dtype_policy, each_policy
from tests.tolerances import BLOCKS, assert_all_close

VOCAB = 23
VARIANTS = {
    "tied": {},
    "untied": {"tied_head": False},
    "bias": {"head_bias": True, "hidden_act": "relu"},
    "sinusoidal": {"positions": "sinusoidal"},
    "post": {"post_layernorm_residual": True},
}
each_variant = pytest.mark.parametrize("variant", VARIANTS)
# All variants run in float32. Both norm placements also run in 16 bits.
each_variant_and_policy = pytest.mark.parametrize(
    "variant, policy",
    [(variant, "float32") for variant in VARIANTS]
    + [(variant, policy) for variant in ("tied", "post") for policy in POLICIES[1:]],
)


def small_model(variant="tied", **options):
    sizes = {"hidden_size": 16, "num_heads": 4, "num_layers": 2, "max_length": 12}
    return CausalLM(VOCAB, **{**sizes, **VARIANTS[variant], **options})


def random_ids(batch=3, length=8, seed=0):
    """Return texts of different lengths. The last one has no padding."""
    ids = np.random.default_rng(seed).integers(4, VOCAB, (batch, length), "int32")
    ids[:, 0] = 2
    for row in range(batch - 1):
        ids[row, length - 1 - row :] = 0
    return ids


def float32_logits(model, ids):
    return tf.cast(model(ids), "float32").numpy()


# Size


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("tied, bias", [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("post", [False, True])
def test_number_of_parameters_matches_the_formula(positions, tied, bias, post):
    h, f, layers, length = 16, 40, 3, 12
    model = small_model(
        ffn_hidden_size=f,
        num_layers=layers,
        positions=positions,
        tied_head=tied,
        head_bias=bias,
        post_layernorm_residual=post,
    )
    model.build()
    block = 4 * (h * h + h) + (h * f + f) + (f * h + h) + 2 * 2 * h
    final_norm = 0 if post else 2 * h
    expected = VOCAB * h + layers * block + final_norm
    expected += length * h * (positions == "learned")
    expected += VOCAB * h * (not tied) + VOCAB * bias
    assert model.count_params() == expected


def test_gpt_2_small_has_124_million_parameters():
    """The count of Radford et al., 2019, includes all tables."""
    model = CausalLM(50257, hidden_size=768, num_heads=12, num_layers=12)
    with keras.StatelessScope():  # No weight gets values.
        model.build()
    assert model.count_params() == 124_439_808


@pytest.mark.parametrize("variant, tables", [("tied", 1), ("untied", 2)])
def test_tied_table_is_stored_once(variant, tables):
    model = small_model(variant)
    model.build()
    assert sum(VOCAB in variable.shape for variable in model.variables) == tables


def test_initial_logits_have_unit_scale():
    """The first loss is close to log V, the loss of uniform guesses, with and without a tied head."""
    for variant in ("tied", "untied"):
        logits = small_model(variant, hidden_size=64)(random_ids(length=12)).numpy()
        assert 0.3 < logits.std() < 3.0, variant


# Precision


@each_policy
@each_variant
def test_every_variant_runs_in_every_precision(policy, variant):
    ids = random_ids()
    expected = small_model(variant, dropout_rate=0.0)(ids)
    with dtype_policy(policy):
        model = small_model(variant, dropout_rate=0.0)
    with tf.GradientTape() as tape:
        logits = model(ids, training=True)
        # A mean stays in the range of float16. Only the trainer scales losses.
        loss = tf.reduce_mean(tf.square(tf.cast(logits, "float32")))
    assert logits.dtype == model.compute_dtype
    assert logits.shape == (3, 8, VOCAB)
    assert {variable.dtype for variable in model.variables} == {"float32"}
    assert_all_close({"logits": logits}, {"logits": expected.numpy()}, BLOCKS[policy])
    weights = model.trainable_variables
    gradients = tape.gradient(loss, [variable.value for variable in weights])
    for variable, gradient in zip(weights, gradients, strict=True):
        assert gradient is not None, variable.path
        assert np.isfinite(tf.convert_to_tensor(gradient).numpy()).all(), variable.path


def test_dtype_policy_can_be_an_argument():
    model = small_model(dtype="mixed_bfloat16")
    assert model(random_ids()).dtype == "bfloat16"
    assert {layer.compute_dtype for layer in model.blocks._flatten_layers()} == {"bfloat16"}


# Dependence of logits on tokens


@each_variant_and_policy
def test_later_token_never_changes_earlier_logits(variant, policy):
    """Logits are bitwise equal. Otherwise training could see its labels."""
    ids = random_ids()
    with dtype_policy(policy):
        model = small_model(variant)
    logits = float32_logits(model, ids)
    for position in (1, 4, 7):
        changed_ids = ids.copy()
        changed_ids[:, position:] = np.where(ids[:, position:] == 5, 6, 5)
        changed = float32_logits(model, changed_ids)
        np.testing.assert_array_equal(changed[:, :position], logits[:, :position])
        assert (changed[2, position] != logits[2, position]).any()


@each_variant
def test_every_token_changes_logits_from_its_position_on(variant):
    ids = random_ids(batch=1)
    model = small_model(variant)
    logits = float32_logits(model, ids)
    for position in range(8):
        changed_ids = ids.copy()
        changed_ids[0, position] = 5 if ids[0, position] != 5 else 6
        changed = (float32_logits(model, changed_ids) != logits).any(axis=-1)[0]
        np.testing.assert_array_equal(changed, np.arange(8) >= position)


@pytest.mark.parametrize("variant", ["tied", "sinusoidal"])
def test_word_order_changes_the_last_logits(variant):
    """Without positions, attention of the last word would ignore the order."""
    ids = random_ids(batch=1)
    swapped = ids.copy()
    swapped[:, 1:7] = ids[:, 6:0:-1]
    model = small_model(variant)
    assert not np.allclose(model(ids)[:, -1], model(swapped)[:, -1], atol=1e-4)


@each_variant_and_policy
def test_trailing_padding_does_not_change_logits(variant, policy):
    ids = random_ids()
    with dtype_policy(policy):
        model = small_model(variant)
    logits = float32_logits(model, ids)
    wider = float32_logits(model, np.pad(ids, [(0, 0), (0, 4)]))[:, :8]
    is_token = ids != 0
    assert_all_close({"": wider[is_token]}, {"": logits[is_token]}, BLOCKS[policy])
    # Each unpadded text alone gives the same logits.
    for row in range(3):
        length = np.count_nonzero(ids[row])
        alone = float32_logits(model, ids[row : row + 1, :length])
        assert_all_close({"": alone}, {"": logits[row : row + 1, :length]}, BLOCKS[policy])


def test_text_of_padding_only_gives_finite_logits():
    ids = random_ids()
    ids[1] = 0
    assert np.isfinite(small_model()(ids).numpy()).all()


def test_padding_id_can_be_changed():
    ids = random_ids()
    padded_with_1 = np.where(ids == 0, 1, ids)
    model, reference = small_model(pad_id=1), small_model()
    is_token = ids != 0
    assert_all_close(
        {"": model(padded_with_1)[is_token]},
        {"": reference(ids)[is_token].numpy()},
        BLOCKS["float32"],
    )


def test_any_batch_size_and_length_without_rebuilding():
    model = small_model("sinusoidal")
    model.build()
    compiled = tf.function(model, input_signature=[tf.TensorSpec([None, None], "int32")])
    for batch, length in ((1, 1), (3, 8), (2, 30)):
        ids = random_ids(batch, length)
        logits = compiled(ids)
        assert logits.shape == (batch, length, VOCAB)
        assert_all_close({"": logits}, {"": model(ids).numpy()}, BLOCKS["float32"])
    assert compiled.experimental_get_tracing_count() == 1


def test_dropout_applies_in_training_only():
    ids = random_ids()
    model = small_model(dropout_rate=0.5)
    logits = model(ids).numpy()
    np.testing.assert_array_equal(model(ids, training=False), logits)
    assert not np.allclose(model(ids, training=True), logits, atol=1e-2)
    model = small_model(dropout_rate=0.0)
    np.testing.assert_array_equal(model(ids, training=True), model(ids))


def test_padded_vocabulary_does_not_change_the_logits():
    ids = random_ids()
    expected = small_model()(ids).numpy()
    with parallel_config(model_parallel=2):
        logits = small_model()(ids).numpy()
    assert logits.shape[-1] == VOCAB + 1
    assert (logits[..., VOCAB:] == np.finfo("float32").min).all()
    assert_all_close({"": logits[..., :VOCAB]}, {"": expected}, BLOCKS["float32"])


# Counts


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_flops_per_step_match_the_formula(num_layers, tied):
    """Count a multiplication and an addition per product, and twice that for gradients."""
    h, f, (b, s) = 16, 40, (3, 8)
    model = small_model(ffn_hidden_size=f, num_layers=num_layers, tied_head=tied)
    # Each product is (rows, inner, columns).
    block = 4 * [(s, h, h)] + [(s, h, s), (s, s, h)]
    block += [(s, h, f), (s, f, h)]
    products = num_layers * block + [(s, h, VOCAB)]
    expected = 3 * 2 * b * sum(rows * inner * columns for rows, inner, columns in products)
    ids = random_ids(b, s)
    assert tokens_and_flops(model, ids, ids) == (b * s, pytest.approx(expected, rel=1e-6))
    # The published count per token is 6·N + 12·L·h·s with N parameters in products.
    weights = num_layers * (4 * h * h + 2 * h * f) + h * VOCAB
    assert expected == b * s * (6 * weights + 12 * num_layers * h * s)


def test_stream_shapes_name_the_stack_of_blocks():
    model = small_model()
    assert model.stream_shapes((3, 8)) == {model.blocks.name: (3, 8, 16)}


# Configs and files


def test_model_is_rebuilt_from_its_config():
    options = {
        "vocab_size": 11,
        "hidden_size": 12,
        "num_heads": 3,
        "ffn_hidden_size": 7,
        "num_layers": 3,
        "dropout_rate": 0.2,
        "attention_dropout_rate": 0.0,
        "embedding_dropout_rate": 0.4,
        "hidden_act": "relu",
        "positions": "sinusoidal",
        "max_length": 9,
        "tied_head": False,
        "head_bias": True,
        "post_layernorm_residual": True,
        "pad_id": 1,
        "start_id": 0,
        "end_id": 2,
    }
    model = CausalLM(**options, dtype="mixed_bfloat16")
    model.build()
    stored = keras.saving.serialize_keras_object(model)
    deserialized = keras.saving.deserialize_keras_object(stored)
    for copy in (deserialized, CausalLM.from_config(model.get_config())):
        assert type(copy) is CausalLM
        assert copy.get_config() == model.get_config()
        assert {option: copy.get_config()[option] for option in options} == options
        assert copy.dtype_policy.name == "mixed_bfloat16"
        copy.build()
        for variable, original in zip(copy.variables, model.variables, strict=True):
            assert variable.path == original.path
            np.testing.assert_array_equal(variable.numpy(), original.numpy())


@each_variant
def test_weights_are_saved_and_loaded(variant, tmp_path):
    ids = random_ids()
    model = small_model(variant)
    expected = model(ids).numpy()
    model.save_weights(tmp_path / "model.weights.h5")
    dtransformer.set_seed(1)  # Another seed gives other initial weights.
    loaded = small_model(variant)
    assert not np.allclose(loaded(ids), expected)
    loaded.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(loaded(ids), expected)


def test_keras_file_of_the_model_is_saved_and_loaded(tmp_path):
    ids = random_ids()
    model = small_model("bias")
    expected = model(ids).numpy()
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(keras.saving.load_model(tmp_path / "model.keras")(ids), expected)


# Errors


def test_more_tokens_than_learned_positions_raise_an_error():
    model = small_model()
    model(random_ids(length=12))
    with pytest.raises(ValueError, match="13 positions.*max_length=12"):
        model(random_ids(length=13))
    small_model("sinusoidal")(random_ids(length=13))


@pytest.mark.parametrize("offset", [0, 2])
def test_learned_positions_are_checked_in_functions_of_any_length(offset):
    """A compiled function checks the length at run time, as a gather beyond a table may not fail."""
    model = small_model(position_offset=offset)
    model.build()
    compiled = tf.function(
        lambda ids: model({"tokens": ids, "attention_mask": tf.ones_like(ids)}),
        input_signature=[tf.TensorSpec([None, None], "int32")],
        jit_compile=True,
    )
    ids = random_ids(length=12)
    expected = model({"tokens": ids, "attention_mask": np.ones_like(ids)})
    np.testing.assert_allclose(compiled(ids), expected, rtol=0, atol=1e-5)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"size\[0\] in \[0, 12\], but got 13"):
        compiled(random_ids(length=13))


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"hidden_size": 18}, ValueError, "`num_heads=4` does not divide `hidden_size=18`"),
        ({"hidden_size": 16.0}, TypeError, "`hidden_size` must be an int, got 16.0"),
        ({"num_layers": 0}, ValueError, "`num_layers` must be at least 1, got 0"),
        ({"num_layers": True}, TypeError, "`num_layers` must be an int, got True"),
        ({"ffn_hidden_size": -1}, ValueError, "`ffn_hidden_size` must be at least 1, got -1"),
        ({"max_length": 0}, ValueError, "`max_length` must be at least 1, got 0"),
        (
            {"dropout_rate": 1.0},
            ValueError,
            r"^`dropout_rate` must be a number in \[0, 1\), got 1.0",
        ),
        (
            {"attention_dropout_rate": -0.1},
            ValueError,
            "`attention_dropout_rate` must be a number in",
        ),
        ({"embedding_dropout_rate": "0"}, TypeError, "`embedding_dropout_rate` must be a number"),
        ({"positions": "turned"}, ValueError, "`positions` must be .*alibi, got 'turned'"),
        ({"hidden_act": "gelo"}, ValueError, "gelo"),
        ({"num_beams": 2}, TypeError, "num_beams"),
        ({"prefix": True, "window": 4}, ValueError, "does not work with `window=4`"),
    ],
)
def test_invalid_arguments_raise_errors_that_name_them(options, error, message):
    with pytest.raises(error, match=message):
        small_model(**options)


def test_invalid_vocabulary_size_raises_an_error():
    with pytest.raises(ValueError, match="`vocab_size` must be at least 1, got 0"):
        CausalLM(0)


@pytest.mark.parametrize("prefix", [False, True])
def test_prefix_input_must_match_the_prefix_argument(prefix):
    ids = random_ids()
    inputs = ids if prefix else {"tokens": ids, "prefix": tf.ones_like(ids)}
    with pytest.raises(ValueError, match=f"network has `prefix={prefix}`, but its inputs"):
        small_model(prefix=prefix)(inputs)


# Training


@each_policy
def test_learns_to_count(policy):
    """Train on texts of different lengths whose tokens increase by one."""
    first = np.arange(4, 12)[:, None]
    texts = (first + np.arange(8)).astype("int32")
    texts[::2, 6:] = 0
    with dtype_policy(policy):
        trainer = Trainer(small_model(num_layers=1, dropout_rate=0.0))
    trainer.compile(keras.optimizers.Adam(1e-2), CrossEntropyLoss(ignore_id=0))
    data = tf.data.Dataset.from_tensors((texts[:, :-1], texts[:, 1:])).repeat(30)
    losses = []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses.append(float(logs["step_loss"]))
    )
    trainer.fit(data, verbose=0, callbacks=[record])
    assert losses[0] > 1.0
    assert losses[-1] < 0.2 * losses[0]
    logits = trainer.network(texts[:, :-1]).numpy()
    is_label = texts[:, 1:] != 0
    assert (logits.argmax(-1) == texts[:, 1:])[is_label].mean() > 0.9


# Pipeline stages


@pytest.mark.parametrize("num_stages", [2, 3])
@each_variant
def test_pipeline_stages_compute_the_same_logits(variant, num_stages):
    ids = tf.constant(random_ids())
    with parallel_config(pipeline_stage=num_stages):
        model = small_model(variant, num_layers=3)
        model.build()
        dataflow = Dataflow.from_network(model, ids, Placement.looped(num_stages))
    expected = model(ids).numpy()
    # Stages send only the residual stream. A tied table has a copy on the last stage.
    for stage in range(num_stages - 1):
        assert [value.shape for value in dataflow.sent_after(stage)] == [(3, 8, 16)]
    received = {}
    for stage in range(num_stages):
        with view(ChunkView(stage, dataflow, received)) as calls:
            logits = model(ids)
        received = calls.sent
    np.testing.assert_array_equal(logits, expected)
