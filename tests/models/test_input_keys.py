"""Unknown input names raise an error; no input is silently ignored."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer import parallel_config
from dtransformer.models import CausalLM, EncoderDecoderLM, MaskedLM, TranslationTransformer
from dtransformer.trainers import Trainer
from tests.on_mesh import on_mesh, start

SIZES = {"hidden_size": 16, "num_heads": 2, "dropout_rate": 0.0}
TWO = {**SIZES, "encoder_layers": 1, "decoder_layers": 1}
NETWORKS = {
    "causal": lambda: CausalLM(20, num_layers=1, pad_id=None, **SIZES),
    "masked": lambda: MaskedLM(20, num_layers=1, **SIZES),
    "pairs": lambda: EncoderDecoderLM(20, **TWO),
    "translation": lambda: TranslationTransformer(20, **TWO),
}
IDS = np.random.default_rng(0).integers(4, 20, (4, 6)).astype("int32")
MASK = np.array([[1] * 6, [0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1]])


def make_inputs(name, mask=MASK):
    if name in ("causal", "masked"):
        return {"input_ids": IDS, "attention_mask": mask}
    return {"input_ids": IDS, "attention_mask": mask, "decoder_input_ids": IDS[:, :4]}


@pytest.mark.parametrize(
    "name, inputs, message",
    [
        (
            "causal",
            {"tokens": IDS, "segmentz": IDS},
            "no input 'segmentz': did you mean segments",
        ),
        ("causal", {"tokens": IDS, "input_id": IDS}, "did you mean input_ids"),
        (
            "causal",
            {"tokens": IDS, "input_ids": IDS},
            "'tokens' twice, the second time as 'input_ids'",
        ),
        ("causal", {"tokens": IDS, "labels": IDS}, r"a tuple `\(inputs, labels\)`"),
        ("causal", {"tokens": IDS, "position_ids": IDS}, "'segments' for packed texts"),
        ("causal", {"tokens": IDS, "token_type_ids": IDS}, "no input 'token_type_ids'"),
        ("causal", {"tokens": IDS, "zzz": IDS}, "no input .zzz.: expected one of tokens, "),
        ("causal", {"segments": IDS}, "must contain 'tokens' or 'input_ids', got 'segments'"),
        (
            "causal",
            {"tokens": IDS, "attention_mask": MASK[:, :3]},
            r"\(4, 3\), but .*\(4, 6\)",
        ),
        ("causal", {"tokens": IDS, "attention_mask": MASK[:, None]}, r"\(4, 1, 6\), but"),
        ("masked", {"tokens": IDS, "token_typez": IDS}, "did you mean token_types"),
        ("pairs", {"source": IDS}, "must contain 'target' or 'decoder_input_ids'"),
        ("pairs", IDS, "must be a dict with 'source', 'target', got "),
        ("translation", {"source": IDS, "target": IDS, "targets": IDS}, "did you mean target"),
    ],
)
def test_unknown_input_names_raise_errors(name, inputs, message):
    """Calling and training both raise a one-line error before the first step."""
    network = NETWORKS[name]()
    with pytest.raises(ValueError, match=message) as caught:
        network(inputs)
    assert "\n" not in str(caught.value)
    trainer = Trainer(NETWORKS[name]())
    trainer.compile("sgd")
    with pytest.raises(ValueError, match=message) as caught:
        trainer.fit(tf.data.Dataset.from_tensors((inputs, IDS)), verbose=0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", NETWORKS)
def test_attention_mask_hides_positions(name):
    """Ids at masked positions do not change other outputs."""
    network = NETWORKS[name]()
    inputs, changed_inputs = make_inputs(name), make_inputs(name)
    changed_inputs["input_ids"] = np.where(MASK, IDS, 5)
    outputs = [np.asarray(network(x)) for x in (inputs, changed_inputs)]
    is_token = MASK[:, : outputs[0].shape[1]] > 0 if "decoder_input_ids" not in inputs else ...
    np.testing.assert_allclose(outputs[0][is_token], outputs[1][is_token], rtol=0, atol=1e-6)
    unmasked = np.asarray(network({**inputs, "attention_mask": None}))
    assert np.abs(unmasked - outputs[0])[is_token].max() > 1e-3


def train_losses(name):
    keras.utils.set_random_seed(0)
    trainer = Trainer(NETWORKS[name]())
    trainer.compile("sgd")
    inputs = make_inputs(name)
    labels = inputs.get("decoder_input_ids", IDS)
    data = tf.data.Dataset.from_tensors((inputs, labels)).repeat(2)
    return trainer.fit(data, epochs=2, verbose=0).history["loss"]


@pytest.mark.parametrize("name", ["causal", "pairs"])
def test_attention_mask_is_split_into_micro_batches(name):
    expected = train_losses(name)
    with parallel_config(micro_batch_num=2):
        np.testing.assert_allclose(train_losses(name), expected, rtol=1e-5)


@on_mesh
def test_attention_mask_on_a_mesh():
    start(model_parallel=2)
    network = NETWORKS["causal"]()
    trainer = Trainer(network)
    trainer.compile("sgd")
    outputs = trainer.predict(make_inputs("causal"), verbose=0)
    changed_outputs = trainer.predict(
        {**make_inputs("causal"), "input_ids": np.where(MASK, IDS, 5)}, verbose=0
    )
    np.testing.assert_allclose(outputs[MASK > 0], changed_outputs[MASK > 0], rtol=0, atol=1e-6)


def test_generate_accepts_prompts_with_a_mask():
    network = NETWORKS["causal"]()
    expected = network.generate([row[row_mask > 0] for row, row_mask in zip(IDS, MASK)], 3).numpy()
    generated = network.generate({"input_ids": IDS, "attention_mask": MASK}, 3).numpy()
    np.testing.assert_array_equal(generated, expected)
    ends = np.where(MASK, IDS, network.end_id)
    with pytest.raises(ValueError, match='Prompt 1 begins with the end token 3.*"attention_mask"'):
        network.generate(ends, 3)
    with pytest.raises(ValueError, match="accepts 'tokens' and 'attention_mask', got 'segments'"):
        network.generate({"tokens": IDS, "segments": IDS}, 3)
    pairs = NETWORKS["pairs"]()
    with pytest.raises(
        ValueError, match="attention_mask` must be 0 where the source has `pad_id=0`"
    ):
        pairs.generate({"input_ids": IDS, "attention_mask": MASK}, 3)


def test_positions_restart_in_packed_texts_with_a_mask():
    """Segments restart positions even if a mask is passed."""
    network = CausalLM(20, num_layers=1, pad_id=None, position_offset=2, **SIZES)
    segments = np.array([[1, 1, 1, 2, 2, 2]] * 4)
    packed = network({"tokens": IDS, "segments": segments, "attention_mask": np.ones_like(IDS)})
    for half in (slice(0, 3), slice(3, 6)):
        np.testing.assert_allclose(packed[:, half], network(IDS[:, half]), rtol=0, atol=1e-5)
