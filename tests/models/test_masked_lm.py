"""MaskedLM has the expected size, attends in both directions and learns both objectives."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer import parallel_config
from dtransformer.datasets.masked_language_model import select_masked
from dtransformer.layers import CrossEntropyLoss
from dtransformer.layers.heads import SequenceHead
from dtransformer.models import MaskedLM
from dtransformer.models.one_stack import with_task_head
from dtransformer.reports.throughput import tokens_and_flops
from dtransformer.trainers import Trainer
from tests.on_mesh import on_mesh, start
from tests.tolerances import BLOCKS, TRAINING, assert_all_close

VOCAB, MASK = 23, 1
VARIANTS = {
    "bert": {"next_sentence": True},
    "roberta": {"num_token_types": 1, "position_offset": 2, "pad_id": 1},
    "untied": {"tied_head": False, "hidden_act": "relu"},
    "pre": {"post_layernorm_residual": False, "pad_id": None},
}
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def small_model(variant="bert", **options):
    sizes = {"hidden_size": 16, "num_heads": 4, "num_layers": 2, "max_length": 12}
    return MaskedLM(VOCAB, **{**sizes, "dropout_rate": 0.0, **VARIANTS[variant], **options})


def random_ids(model, batch=3, length=8):
    """Return texts of different lengths. The last one has no padding."""
    ids = np.random.default_rng(0).integers(4, VOCAB, (batch, length), "int32")
    for row in range(batch - 1 if model.pad_id is not None else 0):
        ids[row, length - 1 - row :] = model.pad_id
    return ids


def masked_lm_logits(model, inputs):
    outputs = model(inputs)
    return (outputs["masked_lm"] if isinstance(outputs, dict) else outputs).numpy()


@each_variant
def test_number_of_parameters_matches_the_formula(variant):
    model = small_model(variant)
    model.build()
    h, options = 16, model.arguments
    block = 4 * (h * h + h) + 8 * h * h + 5 * h + 2 * 2 * h
    embeddings = VOCAB + 12 + options["position_offset"] + options["num_token_types"]
    expected = (embeddings + 2) * h + 2 * block + (h * h + h + 2 * h + VOCAB)
    expected += 2 * h * (not options["post_layernorm_residual"])
    expected += VOCAB * h * (not options["tied_head"])
    expected += (h * h + h + 2 * h + 2) * options["next_sentence"]
    assert model.count_params() == expected


@each_variant
def test_every_token_changes_all_logits_in_both_directions(variant):
    model = small_model(variant, pad_id=None)
    ids = random_ids(model, batch=1)
    logits = masked_lm_logits(model, ids)
    for position in (0, 4, 7):
        changed_ids = ids.copy()
        changed_ids[0, position] = 5 if ids[0, position] != 5 else 6
        assert (masked_lm_logits(model, changed_ids) != logits).any(axis=-1).all()


@pytest.mark.parametrize("variant", ["bert", "roberta", "untied"])
def test_trailing_padding_does_not_change_logits(variant):
    model = small_model(variant)
    ids = random_ids(model)
    logits = masked_lm_logits(model, ids)
    for row in range(3):
        length = np.count_nonzero(ids[row] != model.pad_id)
        alone = masked_lm_logits(model, ids[row : row + 1, :length])
        assert_all_close({"": alone}, {"": logits[row : row + 1, :length]}, BLOCKS["float32"])


def test_packed_texts_do_not_attend_to_each_other():
    model = small_model(next_sentence=False)
    first, second = np.array([[5, 6, 7]], "int32"), np.array([[8, 9]], "int32")
    packed = {
        "tokens": np.array([[5, 6, 7, 8, 9, 0]], "int32"),
        "segments": np.array([[1, 1, 1, 2, 2, 0]], "int32"),
    }
    logits = masked_lm_logits(model, packed)
    expected = {"": np.concatenate([masked_lm_logits(model, x) for x in (first, second)], axis=1)}
    assert_all_close({"": logits[:, :5]}, expected, BLOCKS["float32"])


def test_token_types_change_outputs_and_default_to_zero():
    model = small_model()
    ids = random_ids(model)
    outputs = model({"tokens": ids, "token_types": tf.zeros_like(ids)})
    np.testing.assert_array_equal(outputs["masked_lm"], masked_lm_logits(model, ids))
    token_types = np.where(np.arange(8) < 4, 0, 1) * np.ones_like(ids)
    changed = model({"tokens": ids, "token_types": token_types})
    assert (changed["masked_lm"] != outputs["masked_lm"]).numpy().any(axis=-1).all()
    assert (changed["next_sentence"] != outputs["next_sentence"]).numpy().all()


def test_padded_vocabulary_does_not_change_the_logits():
    with parallel_config(model_parallel=2):
        model = small_model()
        outputs = model(random_ids(model))
    assert outputs["masked_lm"].shape[-1] == VOCAB + 1
    model = small_model()
    expected = {"": masked_lm_logits(model, random_ids(model))}
    assert_all_close({"": outputs["masked_lm"][..., :VOCAB]}, expected, BLOCKS["float32"])


@each_variant
def test_flops_per_step_match_the_formula(variant):
    """Count a multiplication and an addition per product, and twice that for gradients."""
    model = small_model(variant, ffn_hidden_size=40)
    h, f, b, s = 16, 40, 3, 8
    block = 4 * s * h * h + 2 * s * s * h + 2 * s * h * f
    head = s * h * h + s * h * VOCAB + (h * h + 2 * h) * (variant == "bert")
    expected = 3 * 2 * b * (2 * block + head)
    ids = random_ids(model)
    assert tokens_and_flops(model, ids, ids) == (b * s, pytest.approx(expected, rel=1e-6))


def test_flops_of_the_head_are_counted_at_masked_positions():
    model = small_model("roberta", ffn_hidden_size=40)
    ids = random_ids(model)
    _, full = tokens_and_flops(model, ids, ids)
    inputs = {"tokens": ids, "masked_lm_positions": ids[:, :2]}
    tokens, masked = tokens_and_flops(model, inputs, ids[:, :2])
    assert tokens == ids.size
    assert full - masked == pytest.approx(3 * 2 * 3 * (8 - 2) * 16 * (16 + VOCAB), rel=1e-6)


# Masked positions


@each_variant
def test_logits_at_positions_equal_the_full_logits(variant):
    model = small_model(variant)
    ids = random_ids(model)
    positions = np.array([[7, 1, 0], [0, 0, 0], [3, 4, 5]], "int32")
    logits = masked_lm_logits(model, {"tokens": ids, "masked_lm_positions": positions})
    expected = np.take_along_axis(masked_lm_logits(model, ids), positions[..., None], axis=1)
    assert_all_close({"": logits}, {"": expected}, 1e-6)


@pytest.mark.parametrize("shape", [(2, 3), (3,), (3, 2, 1)])
def test_positions_of_a_wrong_shape_raise_an_error(shape):
    model = small_model()
    inputs = {"tokens": random_ids(model), "masked_lm_positions": np.zeros(shape, "int32")}
    with pytest.raises(ValueError, match=r"'masked_lm_positions' have shape .*\[b, P\]"):
        model(inputs)


def test_positions_raise_an_error_without_a_head_for_masked_tokens():
    model = with_task_head(small_model(next_sentence=False), SequenceHead(2))
    ids = random_ids(model)
    with pytest.raises(ValueError, match="network has a SequenceHead"):
        model({"tokens": ids, "masked_lm_positions": ids[:, :2]})


@each_variant
def test_saved_model_is_loaded_with_equal_logits(variant, tmp_path):
    model = small_model(variant)
    ids = random_ids(model)
    expected = masked_lm_logits(model, ids)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.get_config() == model.get_config()
    np.testing.assert_array_equal(masked_lm_logits(loaded, ids), expected)


@pytest.mark.parametrize(
    "inputs, message",
    [
        ({"ids": 0}, "no input 'ids': (expected one of tokens|did you mean)"),
        ({"tokens": 0, "source": 0}, "no input 'source'"),
        ({"tokens": 0, "segments": 0}, "next_sentence=False"),
    ],
)
def test_unknown_inputs_raise_errors(inputs, message):
    model = small_model()
    with pytest.raises(ValueError, match=message):
        model(dict.fromkeys(inputs, tf.ones((2, 5), "int32")))


def test_too_many_positions_raise_an_error():
    model = small_model("roberta")
    model(random_ids(model, length=12))
    with pytest.raises(ValueError, match="13 positions.*max_length=12"):
        model(random_ids(model, length=13))


# Training


def sentence_pairs(num_pairs=64):
    """Return counting sequences whose second half continues the first or counts down."""
    rng = np.random.default_rng(0)
    follows = rng.integers(0, 2, num_pairs)
    first = rng.integers(4, 12, (num_pairs, 1))
    steps = np.arange(8)
    second = np.where(follows[:, None] == 1, steps, 7 - steps)
    ids = (first + np.where(steps < 4, steps, second)).astype("int32")
    masked = np.arange(8) == rng.integers(0, 3, (num_pairs, 1))
    inputs = {
        "tokens": np.where(masked, MASK, ids).astype("int32"),
        "token_types": np.broadcast_to(steps // 4, ids.shape).astype("int32"),
    }
    labels = {
        "masked_lm": np.where(masked, ids, -100).astype("int32"),
        "next_sentence": follows.astype("int32"),
    }
    return inputs, labels


def at_masked_positions(inputs, labels, count=3):
    """Return the batch with the masked positions, filled up to `count` per row."""
    rows = [select_masked({}, row_labels, count) for row_labels in labels["masked_lm"]]
    positions = np.stack([row["masked_lm_positions"] for row, _ in rows])
    labels = {**labels, "masked_lm": np.stack([row_labels for _, row_labels in rows])}
    return {**inputs, "masked_lm_positions": positions}, labels


LOSSES = {"masked_lm": CrossEntropyLoss(ignore_id=-100), "next_sentence": CrossEntropyLoss()}


def test_learns_masked_tokens_and_next_sentences():
    trainer = Trainer(small_model(num_layers=1, hidden_size=32))
    trainer.compile(keras.optimizers.Adam(5e-3), LOSSES)
    inputs, labels = sentence_pairs()
    history = trainer.fit(inputs, labels, batch_size=16, epochs=30, verbose=0).history
    assert history["loss"][-1] < 0.1 * history["loss"][0]
    outputs = trainer.predict(inputs, batch_size=16, verbose=0)
    is_correct = outputs["masked_lm"].argmax(-1) == labels["masked_lm"]
    assert is_correct[labels["masked_lm"] != -100].mean() > 0.9
    assert (outputs["next_sentence"].argmax(-1) == labels["next_sentence"]).mean() > 0.9


def test_loss_averages_masked_positions_only():
    """The mean losses of masked tokens and of sentence pairs are added."""
    model = small_model()
    trainer = Trainer(model)
    trainer.compile(keras.optimizers.SGD(0.1), LOSSES)
    inputs, labels = sentence_pairs(8)
    outputs = model(inputs)
    expected = {}
    for name, output_labels in labels.items():
        log_p = np.log(keras.ops.softmax(outputs[name]))
        is_masked = output_labels >= 0
        expected[name] = -log_p[is_masked, output_labels[is_masked]].mean()
    logs = trainer.evaluate(inputs, labels, batch_size=8, verbose=0, return_dict=True)
    assert logs["loss"] == pytest.approx(sum(expected.values()), rel=TRAINING)


def train(inputs, labels, num_steps=3):
    """Return the losses of some steps and an evaluation, and the final weights."""
    keras.utils.set_random_seed(0)
    trainer = Trainer(small_model(num_layers=1))
    trainer.compile(keras.optimizers.SGD(0.1), LOSSES)
    losses = [
        float(trainer.train_on_batch(inputs, labels, return_dict=True)["step_loss"])
        for _ in range(num_steps)
    ]
    logs = trainer.evaluate(inputs, labels, batch_size=8, verbose=0, return_dict=True)
    return [*losses, logs["loss"]], {w.path: w.numpy() for w in trainer.network.weights}


def test_losses_at_masked_positions_equal_the_losses_of_the_full_head():
    losses, weights = train(*at_masked_positions(*sentence_pairs(8)))
    expected_losses, expected_weights = train(*sentence_pairs(8))
    assert len(set(losses)) == len(losses)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    assert_all_close(weights, expected_weights, 1e-6)


def test_exported_network_returns_logits_at_all_positions(tmp_path):
    trainer = Trainer(small_model("roberta"))
    trainer.compile(keras.optimizers.SGD(0.1), CrossEntropyLoss(ignore_id=-100))
    ids = random_ids(trainer.network)
    trainer.train_on_batch({"tokens": ids, "masked_lm_positions": ids[:, :2] % 8}, ids[:, :2])
    trainer.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(tmp_path / "exported")
    assert_all_close(
        {"": exported.serve({"tokens": ids})}, {"": trainer.network(ids)}, BLOCKS["float32"]
    )


@on_mesh
def test_losses_at_masked_positions_match_on_every_kind_of_mesh():
    """Positions count from the start of the sequence, also if it is sharded."""
    expected, _ = train(*sentence_pairs(8))
    layouts = {
        "sequence": {"data_parallel": 2, "sequence_parallel": True, "vocab_emb_dp": False},
        "context": {"context_parallel": 2, "model_parallel": 1},
    }
    for name, fields in layouts.items():
        start(**fields)
        # Context parallelism shards four positions, and replicates three.
        for count in (3, 4) if name == "context" else (3,):
            losses, _ = train(*at_masked_positions(*sentence_pairs(8), count))
            np.testing.assert_allclose(losses, expected, rtol=TRAINING, err_msg=name)


@on_mesh
def test_both_outputs_on_a_mesh():
    """A mesh pads the vocabulary, but losses and predictions stay the same."""
    inputs, labels = sentence_pairs(8)

    def train_steps():
        trainer = Trainer(small_model())
        trainer.compile(keras.optimizers.SGD(0.1), LOSSES)
        logs = [trainer.train_on_batch(inputs, labels, return_dict=True) for _ in range(2)]
        outputs = trainer.predict(inputs, batch_size=8, verbose=0)
        return [float(log["step_loss"]) for log in logs], outputs

    losses, outputs = train_steps()
    start(model_parallel=2, sequence_parallel=True)
    mesh_losses, mesh_outputs = train_steps()
    np.testing.assert_allclose(mesh_losses, losses, rtol=TRAINING)
    assert_all_close(mesh_outputs, outputs, BLOCKS["float32"])
