"""Promise: an input's name that a network does not know is an error, and none is ignored."""

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


def inputs_of(name, mask=MASK):
    if name in ("causal", "masked"):
        return {"input_ids": IDS, "attention_mask": mask}
    return {"input_ids": IDS, "attention_mask": mask, "decoder_input_ids": IDS[:, :4]}


@pytest.mark.parametrize(
    "name, inputs, told",
    [
        (
            "causal",
            {"tokens": IDS, "segmentz": IDS},
            "no input 'segmentz': did you mean segments",
        ),
        ("causal", {"tokens": IDS, "input_id": IDS}, "did you mean input_ids"),
        ("causal", {"tokens": IDS, "input_ids": IDS}, "'tokens' twice, as 'input_ids'"),
        ("causal", {"tokens": IDS, "labels": IDS}, r"a tuple \(inputs, labels\)"),
        ("causal", {"tokens": IDS, "position_ids": IDS}, "'segments' number the texts"),
        ("causal", {"tokens": IDS, "token_type_ids": IDS}, "no input 'token_type_ids'"),
        ("causal", {"tokens": IDS, "zzz": IDS}, "no input .zzz.: expected one of tokens, "),
        ("causal", {"segments": IDS}, "lack 'tokens' or 'input_ids'; they have 'segments'"),
        (
            "causal",
            {"tokens": IDS, "attention_mask": MASK[:, :3]},
            r"\(4, 3\), expected .*\(4, 6\)",
        ),
        ("causal", {"tokens": IDS, "attention_mask": MASK[:, None]}, r"\(4, 1, 6\), expected"),
        ("masked", {"tokens": IDS, "token_typez": IDS}, "did you mean token_types"),
        ("pairs", {"source": IDS}, "lack 'target' or 'decoder_input_ids'"),
        ("pairs", IDS, "takes a dict of 'source', 'target', got "),
        ("translation", {"source": IDS, "target": IDS, "targets": IDS}, "did you mean target"),
    ],
)
def test_names_that_are_not_known(name, inputs, told):
    """One line, called and trained, before a step."""
    network = NETWORKS[name]()
    with pytest.raises(ValueError, match=told) as caught:
        network(inputs)
    assert "\n" not in str(caught.value)
    trainer = Trainer(NETWORKS[name]())
    trainer.compile("sgd")
    with pytest.raises(ValueError, match=told) as caught:
        trainer.fit(tf.data.Dataset.from_tensors((inputs, IDS)), verbose=0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_mask_hides_what_it_says(name):
    """Whatever stands where there is no token changes nothing of what is computed elsewhere."""
    network = NETWORKS[name]()
    first, others = inputs_of(name), inputs_of(name)
    others["input_ids"] = np.where(MASK, IDS, 5)
    outputs = [np.asarray(network(x)) for x in (first, others)]
    is_token = MASK[:, : outputs[0].shape[1]] > 0 if "decoder_input_ids" not in first else ...
    np.testing.assert_allclose(outputs[0][is_token], outputs[1][is_token], rtol=0, atol=1e-6)
    unmasked = np.asarray(network({**first, "attention_mask": None}))
    assert np.abs(unmasked - outputs[0])[is_token].max() > 1e-3


def trained(name):
    keras.utils.set_random_seed(0)
    trainer = Trainer(NETWORKS[name]())
    trainer.compile("sgd")
    inputs = inputs_of(name)
    labels = inputs.get("decoder_input_ids", IDS)
    data = tf.data.Dataset.from_tensors((inputs, labels)).repeat(2)
    return trainer.fit(data, epochs=2, verbose=0).history["loss"]


@pytest.mark.parametrize("name", ["causal", "pairs"])
def test_masks_of_micro_batches(name):
    expected = trained(name)
    with parallel_config(micro_batch_num=2):
        np.testing.assert_allclose(trained(name), expected, rtol=1e-5)


@on_mesh
def test_masks_on_a_mesh():
    start(model_parallel=2)
    network = NETWORKS["causal"]()
    trainer = Trainer(network)
    trainer.compile("sgd")
    own = trainer.predict(inputs_of("causal"), verbose=0)
    other = trainer.predict({**inputs_of("causal"), "input_ids": np.where(MASK, IDS, 5)}, verbose=0)
    np.testing.assert_allclose(own[MASK > 0], other[MASK > 0], rtol=0, atol=1e-6)


def test_prompts_with_their_mask():
    network = NETWORKS["causal"]()
    expected = network.generate([row[own > 0] for row, own in zip(IDS, MASK)], 3).numpy()
    found = network.generate({"input_ids": IDS, "attention_mask": MASK}, 3).numpy()
    np.testing.assert_array_equal(found, expected)
    ends = np.where(MASK, IDS, network.end_id)
    with pytest.raises(ValueError, match='prompt 1 begins with the end token 3.*"attention_mask"'):
        network.generate(ends, 3)
    with pytest.raises(ValueError, match="takes tokens and an attention_mask, not 'segments'"):
        network.generate({"tokens": IDS, "segments": IDS}, 3)
    pairs = NETWORKS["pairs"]()
    with pytest.raises(ValueError, match="attention_mask is not 0 where the source has pad_id=0"):
        pairs.generate({"input_ids": IDS, "attention_mask": MASK}, 3)


def test_packed_texts_with_a_mask_have_their_own_positions():
    """Where positions begin after padding, too: segments begin anew, whatever the mask says."""
    network = CausalLM(20, num_layers=1, pad_id=None, position_offset=2, **SIZES)
    segments = np.array([[1, 1, 1, 2, 2, 2]] * 4)
    packed = network({"tokens": IDS, "segments": segments, "attention_mask": np.ones_like(IDS)})
    for half in (slice(0, 3), slice(3, 6)):
        np.testing.assert_allclose(packed[:, half], network(IDS[:, half]), rtol=0, atol=1e-5)
