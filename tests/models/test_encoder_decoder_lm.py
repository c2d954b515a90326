"""EncoderDecoderLM ignores padding, is causal, searches with a cache and freezes weights."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtransformer
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import EncoderDecoderLM
from dtransformer.trainers import Trainer
from tests.on_mesh import on_mesh, start
from tests.tolerances import BLOCKS, assert_all_close

VOCAB = 23
BART = {"position_offset": 2, "embedding_norm": True, "pad_id": 1, "start_id": 2, "end_id": 2}
MARIAN = {
    "positions": "sinusoidal_paper",
    "embedding_scale": None,
    "pad_id": 22,
    "start_id": 22,
    "end_id": 0,
    "trains_padding": False,
}
VARIANTS = {
    "bart": {**BART, "head_bias": True, "trains_head_bias": False},
    "marian": MARIAN,
    "t5": {
        "positions": "relative",
        "relative_ranges": 8,
        "relative_max_distance": 10,
        "norm": "rms_norm",
        "post_layernorm_residual": False,
        "use_bias": False,
        "gated": True,
        "head_dim": 6,
        "query_scale": 1.0,
        "scales_output": True,
        "start_id": 0,
    },
}
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def small_model(variant="bart", **options):
    sizes = {"hidden_size": 16, "num_heads": 4, "encoder_layers": 1, "decoder_layers": 1}
    sizes |= {"max_length": 12, "dropout_rate": 0.0}
    return EncoderDecoderLM(VOCAB, **{**sizes, **VARIANTS[variant], **options})


def random_pairs(model, batch=3, source=8, target=6):
    """Return texts of different lengths. The last one has no padding."""
    rng = np.random.default_rng(0)
    inputs = {
        "source": rng.integers(4, VOCAB - 1, (batch, source), "int32"),
        "target": rng.integers(4, VOCAB - 1, (batch, target), "int32"),
    }
    inputs["target"][:, 0] = model.start_id
    for row in range(batch - 1):
        inputs["source"][row, source - 1 - row :] = model.pad_id
        inputs["target"][row, target - 1 - row :] = model.pad_id
    return inputs


@each_variant
def test_padding_does_not_change_logits(variant):
    model = small_model(variant)
    inputs = random_pairs(model)
    logits = model(inputs).numpy()
    for row in range(3):
        alone = {}
        for side, ids in inputs.items():
            is_token = ids[row] != model.pad_id
            is_token[0] = True
            alone[side] = ids[row : row + 1, : np.count_nonzero(is_token)]
        length = alone["target"].shape[1]
        expected = {"": logits[row : row + 1, :length]}
        assert_all_close({"": model(alone)}, expected, BLOCKS["float32"])


@each_variant
def test_later_token_never_changes_earlier_logits(variant):
    model = small_model(variant)
    inputs = random_pairs(model)
    logits = model(inputs).numpy()
    target = inputs["target"].copy()
    target[:, 3:] = np.where(target[:, 3:] == 5, 6, 5)
    changed = model({**inputs, "target": target}).numpy()
    np.testing.assert_array_equal(changed[:, :3], logits[:, :3])
    assert (changed[:, 3] != logits[:, 3]).any(axis=-1).all()


@each_variant
def test_greedy_search_follows_the_largest_logits(variant):
    """The cached search never returns padding, nor the start token unless it is the end token."""
    model = small_model(variant)
    source = random_pairs(model)["source"]
    generated = model.generate(source, max_length=6).numpy()
    target = np.full((3, 1), model.start_id, "int32")
    forbidden = [x for x in (model.pad_id, model.start_id) if x != model.end_id]
    for _ in range(generated.shape[1]):
        logits = model({"source": source, "target": target}).numpy()[:, -1]
        logits[:, forbidden] = -np.inf
        target = np.concatenate([target, logits.argmax(-1)[:, None]], axis=1).astype("int32")
    for row, expected in zip(generated, target[:, 1:], strict=True):
        ends = np.nonzero(expected == model.end_id)[0]
        length = ends[0] + 1 if ends.size else len(expected)
        np.testing.assert_array_equal(row[:length], expected[:length])
        assert (row[length:] == model.pad_id).all()


@pytest.mark.parametrize("is_trained", [False, True])
def test_head_bias_can_be_frozen(is_trained):
    model = small_model(head_bias=True, trains_head_bias=is_trained)
    model.build()
    before = {x.path: x.numpy() for x in model.weights}
    trainer = Trainer(model)
    trainer.compile(keras.optimizers.SGD(0.1), CrossEntropyLoss(ignore_id=model.pad_id))
    inputs = random_pairs(model)
    trainer.train_on_batch(inputs, inputs["target"])
    changed = {x.path for x in model.weights if (x.numpy() != before[x.path]).any()}
    assert (model.head.bias.path in changed) == is_trained
    assert model.source_embedding.table.path in changed


@pytest.mark.parametrize("trains_padding", [False, True])
def test_padding_embedding_can_be_frozen(trains_padding):
    model = small_model("marian", tied_head=False, trains_padding=trains_padding)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(model(random_pairs(model))))
    table = model.source_embedding.table
    gradient = tf.convert_to_tensor(tape.gradient(loss, table.value)).numpy()
    assert gradient[model.pad_id].any() == trains_padding
    assert gradient[5].any()


@each_variant
def test_saved_model_is_loaded_with_equal_logits(variant, tmp_path):
    model = small_model(variant)
    inputs = random_pairs(model)
    expected = model(inputs).numpy()
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.get_config() == model.get_config()
    np.testing.assert_array_equal(loaded(inputs), expected)
    assert len(loaded.trainable_weights) == len(model.trainable_weights)


def test_relative_positions_are_unlimited_and_share_one_table_per_stack():
    model = small_model("t5", encoder_layers=2)
    logits = model(random_pairs(model, source=40, target=30))
    assert logits.shape == (3, 30, VOCAB)
    tables = [x.path for x in model.weights if x.path.endswith("relative_positions/table")]
    assert [path.split("/")[-3] for path in tables] == ["encoder", "decoder"]


def test_source_order_changes_logits():
    model = small_model("t5")
    inputs = random_pairs(model, batch=1)
    reversed_inputs = {**inputs, "source": inputs["source"][:, ::-1].copy()}
    assert (model(reversed_inputs).numpy() != model(inputs).numpy()).any(axis=-1).all()


def test_initial_logits_have_unit_scale():
    """The first loss of every variant is close to the loss of uniform guesses."""
    for variant in VARIANTS:
        model = small_model(variant, hidden_size=64)
        assert 0.3 < model(random_pairs(model)).numpy().std() < 3.0, variant


def test_generating_beyond_max_length_raises_an_error():
    model = small_model()
    source = np.full((1, 12), 5, "int32")
    assert model.generate(source).shape[1] <= 12
    with pytest.raises(ValueError, match="13 positions exceed.*max_length=12"):
        model.generate(source, max_length=13)


@on_mesh
def test_consecutive_searches_on_a_mesh():
    """DTensor cannot compile a second generation loop of this network."""
    options = {"head_bias": True, "dropout_rate": 0.0}
    sizes = {"hidden_size": 16, "num_heads": 4, "encoder_layers": 1, "decoder_layers": 1}
    source = np.random.default_rng(0).integers(4, 40, (3, 6), "int32")

    def generate():
        dtransformer.set_seed(0)
        network = EncoderDecoderLM(40, **sizes, **options)
        searches = {}, {"temperature": 0.8}, {"beam_size": 3}
        return [network.generate(source, max_length=8, **search).numpy() for search in searches]

    expected = generate()
    start(model_parallel=2)
    for mesh_ids, ids in zip(generate(), expected, strict=True):
        np.testing.assert_array_equal(mesh_ids, ids)
