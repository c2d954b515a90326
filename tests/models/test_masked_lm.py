"""MaskedLM: its size, what its logits depend on, its two outputs; and that it learns."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer import parallel_config
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import MaskedLM
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
    """Texts of different lengths; the last one has no padding."""
    ids = np.random.default_rng(0).integers(4, VOCAB, (batch, length), "int32")
    for row in range(batch - 1 if model.pad_id is not None else 0):
        ids[row, length - 1 - row :] = model.pad_id
    return ids


def logits_of(model, inputs):
    outputs = model(inputs)
    return (outputs["masked_lm"] if isinstance(outputs, dict) else outputs).numpy()


@each_variant
def test_number_of_parameters(variant):
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
def test_every_token_changes_all_logits(variant):
    """It sees both sides of a masked token."""
    model = small_model(variant, pad_id=None)
    ids = random_ids(model, batch=1)
    logits = logits_of(model, ids)
    for position in (0, 4, 7):
        other = ids.copy()
        other[0, position] = 5 if ids[0, position] != 5 else 6
        assert (logits_of(model, other) != logits).any(axis=-1).all()


@pytest.mark.parametrize("variant", ["bert", "roberta", "untied"])
def test_padding_at_the_end_changes_nothing(variant):
    model = small_model(variant)
    ids = random_ids(model)
    logits = logits_of(model, ids)
    for row in range(3):
        length = np.count_nonzero(ids[row] != model.pad_id)
        alone = logits_of(model, ids[row : row + 1, :length])
        assert_all_close({"": alone}, {"": logits[row : row + 1, :length]}, BLOCKS["float32"])


def test_packed_texts_do_not_see_each_other():
    model = small_model(next_sentence=False)
    first, second = np.array([[5, 6, 7]], "int32"), np.array([[8, 9]], "int32")
    packed = {
        "tokens": np.array([[5, 6, 7, 8, 9, 0]], "int32"),
        "segments": np.array([[1, 1, 1, 2, 2, 0]], "int32"),
    }
    logits = logits_of(model, packed)
    expected = {"": np.concatenate([logits_of(model, x) for x in (first, second)], axis=1)}
    assert_all_close({"": logits[:, :5]}, expected, BLOCKS["float32"])


def test_types_of_tokens_matter_and_are_0_where_they_are_not_given():
    model = small_model()
    ids = random_ids(model)
    given = model({"tokens": ids, "token_types": tf.zeros_like(ids)})
    np.testing.assert_array_equal(given["masked_lm"], logits_of(model, ids))
    second = np.where(np.arange(8) < 4, 0, 1) * np.ones_like(ids)
    other = model({"tokens": ids, "token_types": second})
    assert (other["masked_lm"] != given["masked_lm"]).numpy().any(axis=-1).all()
    assert (other["next_sentence"] != given["next_sentence"]).numpy().all()


def test_a_padded_vocabulary_does_not_change_the_logits():
    with parallel_config(model_parallel=2):
        model = small_model()
        outputs = model(random_ids(model))
    assert outputs["masked_lm"].shape[-1] == VOCAB + 1
    model = small_model()
    expected = {"": logits_of(model, random_ids(model))}
    assert_all_close({"": outputs["masked_lm"][..., :VOCAB]}, expected, BLOCKS["float32"])


@each_variant
def test_flops_per_step(variant):
    """Two for every number of every product, and the backward pass has two for each."""
    model = small_model(variant, ffn_hidden_size=40)
    h, f, b, s = 16, 40, 3, 8
    block = 4 * s * h * h + 2 * s * s * h + 2 * s * h * f
    head = s * h * h + s * h * VOCAB + (h * h + 2 * h) * (variant == "bert")
    expected = 3 * 2 * b * (2 * block + head)
    ids = random_ids(model)
    assert tokens_and_flops(model, ids, ids) == (b * s, pytest.approx(expected, rel=1e-6))


@each_variant
def test_it_is_made_again_from_its_file(variant, tmp_path):
    model = small_model(variant)
    ids = random_ids(model)
    expected = logits_of(model, ids)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.get_config() == model.get_config()
    np.testing.assert_array_equal(logits_of(again, ids), expected)


@pytest.mark.parametrize(
    "inputs, message",
    [
        ({"ids": 0}, "no input 'ids': (expected one of tokens|did you mean)"),
        ({"tokens": 0, "source": 0}, "no input 'source'"),
        ({"tokens": 0, "segments": 0}, "next_sentence=False"),
    ],
)
def test_inputs_of_other_names_are_refused(inputs, message):
    model = small_model()
    with pytest.raises(ValueError, match=message):
        model(dict.fromkeys(inputs, tf.ones((2, 5), "int32")))


def test_positions_end():
    model = small_model("roberta")
    model(random_ids(model, length=12))
    with pytest.raises(ValueError, match="13 positions.*max_length=12"):
        model(random_ids(model, length=13))


# Training


def sentences(number=64):
    """Pairs of halves that go up by one; the second follows the first, or goes down."""
    rng = np.random.default_rng(0)
    follows = rng.integers(0, 2, number)
    first = rng.integers(4, 12, (number, 1))
    steps = np.arange(8)
    second = np.where(follows[:, None] == 1, steps, 7 - steps)
    ids = (first + np.where(steps < 4, steps, second)).astype("int32")
    masked = np.arange(8) == rng.integers(0, 3, (number, 1))
    inputs = {
        "tokens": np.where(masked, MASK, ids).astype("int32"),
        "token_types": np.broadcast_to(steps // 4, ids.shape).astype("int32"),
    }
    labels = {
        "masked_lm": np.where(masked, ids, -100).astype("int32"),
        "next_sentence": follows.astype("int32"),
    }
    return inputs, labels


LOSSES = {"masked_lm": CrossEntropyLoss(ignore_id=-100), "next_sentence": CrossEntropyLoss()}


def test_it_learns_masked_tokens_and_next_sentences():
    trainer = Trainer(small_model(num_layers=1, hidden_size=32))
    trainer.compile(keras.optimizers.Adam(5e-3), LOSSES)
    inputs, labels = sentences()
    history = trainer.fit(inputs, labels, batch_size=16, epochs=30, verbose=0).history
    assert history["loss"][-1] < 0.1 * history["loss"][0]
    outputs = trainer.predict(inputs, batch_size=16, verbose=0)
    right = outputs["masked_lm"].argmax(-1) == labels["masked_lm"]
    assert right[labels["masked_lm"] != -100].mean() > 0.9
    assert (outputs["next_sentence"].argmax(-1) == labels["next_sentence"]).mean() > 0.9


def test_only_masked_positions_count():
    """The loss is the mean over those, and that of sentences is added to it."""
    model = small_model()
    trainer = Trainer(model)
    trainer.compile(keras.optimizers.SGD(0.1), LOSSES)
    inputs, labels = sentences(8)
    outputs = model(inputs)
    expected = {}
    for name, of_output in labels.items():
        log_p = np.log(keras.ops.softmax(outputs[name]))
        counts = of_output >= 0
        expected[name] = -log_p[counts, of_output[counts]].mean()
    found = trainer.evaluate(inputs, labels, batch_size=8, verbose=0, return_dict=True)
    assert found["loss"] == pytest.approx(sum(expected.values()), rel=TRAINING)


@on_mesh
def test_both_outputs_on_a_mesh():
    """The vocabulary is padded there; losses and predictions are not."""
    inputs, labels = sentences(8)

    def steps():
        trainer = Trainer(small_model())
        trainer.compile(keras.optimizers.SGD(0.1), LOSSES)
        logs = [trainer.train_on_batch(inputs, labels, return_dict=True) for _ in range(2)]
        outputs = trainer.predict(inputs, batch_size=8, verbose=0)
        return [float(x["step_loss"]) for x in logs], outputs

    losses, outputs = steps()
    start(model_parallel=2, sequence_parallel=True)
    found_losses, found = steps()
    np.testing.assert_allclose(found_losses, losses, rtol=TRAINING)
    assert_all_close(found, outputs, BLOCKS["float32"])
