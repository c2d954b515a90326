"""Promise: tensors that a folder holds twice count with their own values, as `transformers` has it."""

import json
import warnings

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from dtransformer.errors import InputError
from dtransformer.models import from_pretrained, save_pretrained
from harness.tolerances import PARITY_LOGITS
from tests.models.pretrained.tiny_configs import DISTILBERT, ENCODER, T5

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
BASE = {
    **ENCODER,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
DECODER = {**BASE, "num_key_value_heads": 1, "head_dim": 8}
FALCON = {key: x for key, x in BASE.items() if key != "intermediate_size"}
OPT = {**FALCON, "ffn_dim": 32, "word_embed_proj_dim": 16}
GPT2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 1}
PAIRS = {
    "vocab_size": 40,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 24,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
M2M_100 = {**PAIRS, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
T5_IDS = {**T5, "decoder_start_token_id": 0}
HEAD = "lm_head.weight"
# The class -> its config, the head's kernel, and the head's own bias if files may have it twice.
CLASSES = {
    "MT5ForConditionalGeneration": (T5_IDS, HEAD, None),
    "GPT2LMHeadModel": (GPT2 | {"eos_token_id": 2}, HEAD, None),
    "OPTForCausalLM": (OPT, HEAD, None),
    "LlamaForCausalLM": (DECODER, HEAD, None),
    "Gemma2ForCausalLM": (DECODER, HEAD, None),
    "FalconForCausalLM": (FALCON, HEAD, None),
    "GPTNeoXForCausalLM": (BASE, "embed_out.weight", None),
    "CohereForCausalLM": (BASE, HEAD, None),
    "BertForMaskedLM": (BASE, "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"),
    "RobertaForMaskedLM": (BASE, "lm_head.decoder.weight", "lm_head.decoder.bias"),
    "DistilBertForMaskedLM": (DISTILBERT, "vocab_projector.weight", None),
    "ModernBertForMaskedLM": (BASE | {"num_hidden_layers": 3}, "decoder.weight", None),
    "BartForConditionalGeneration": (PAIRS, HEAD, None),
    "MarianMTModel": (PAIRS, HEAD, None),
    "MBartForConditionalGeneration": (PAIRS, HEAD, None),
    "PegasusForConditionalGeneration": (PAIRS, HEAD, None),
    "M2M100ForConditionalGeneration": (M2M_100, HEAD, None),
    "T5ForConditionalGeneration": (T5_IDS, HEAD, None),
}
IDS = np.random.default_rng(0).integers(3, 40, (2, 7))
QUICK = "GPT2LMHeadModel", "LlamaForCausalLM", "Gemma2ForCausalLM", "BertForMaskedLM"
QUICK += "RobertaForMaskedLM", "BartForConditionalGeneration", "T5ForConditionalGeneration"
NAMES = [
    pytest.param(x, marks=[pytest.mark.long] * (x not in QUICK)) for x in CLASSES if x[:3] != "MT5"
]


def made(name, folder, **fields):
    """Save a random model of a class of `transformers`, and return the folder."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    config = kind.config_class(**{**CLASSES[name][0], **fields})
    kind(config).save_pretrained(folder)
    return folder


def change(folder, edit):
    """Edit a dict of the tensors of a folder's file."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def table_of(tensors):
    """Return the table of embeddings, by its shape."""
    return next(x for key, x in tensors.items() if x.shape == (40, 16) and "head" not in key)


def expected(name, folder):
    """Return the logits of `transformers`, and the names that it missed or did not know."""
    kind = getattr(transformers, name)
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    inputs = {"input_ids": torch.tensor(IDS)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.tensor(IDS[:, ::-1].copy())
    with torch.no_grad():
        logits = model.eval()(**inputs).logits.numpy()
    return logits, {*info["missing_keys"], *info["unexpected_keys"]}


def found(network):
    if hasattr(network, "encode"):
        return network({"source": IDS, "target": IDS[:, ::-1]}).numpy()
    return network(IDS).numpy()


@pytest.mark.parametrize("name", NAMES)
def test_a_head_with_its_own_values_is_untied(name, tmp_path):
    folder = made(name, tmp_path / "given")
    _, head, bias = CLASSES[name]

    def add(tensors):
        tensors[head] = table_of(tensors) + torch.randn(40, 16) * 0.5
        if bias is not None:
            tensors[bias] = torch.randn(40)

    change(folder, add)
    logits, _ = expected(name, folder)
    with pytest.warns(UserWarning, match=f"{head} differs from .* keeps its values") as caught:
        network = from_pretrained(folder)
    assert len(caught) == 1 and not network.arguments["tied_head"]
    np.testing.assert_allclose(found(network), logits, rtol=0, atol=PARITY_LOGITS)

    saved = save_pretrained(network, tmp_path / "saved")
    again, wrong = expected(name, saved)
    np.testing.assert_allclose(again, logits, rtol=0, atol=1e-6)
    assert not wrong
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(found(from_pretrained(saved)), found(network))


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_of_the_table_stays_tied(name, tmp_path):
    folder = made(name, tmp_path / "given")
    _, head, _ = CLASSES[name]
    change(folder, lambda tensors: tensors.update({head: table_of(tensors).clone()}))
    logits, _ = expected(name, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        network = from_pretrained(folder)
    assert network.arguments["tied_head"]
    np.testing.assert_allclose(found(network), logits, rtol=0, atol=PARITY_LOGITS)


def test_a_head_of_mt5_is_its_own(tmp_path):
    """Configs of `transformers` say that it is tied, and published files have another kernel."""
    name, folder = "MT5ForConditionalGeneration", tmp_path / "given"
    made(name, folder)
    change(folder, lambda tensors: tensors.update({HEAD: torch.randn(40, 16)}))
    logits, _ = expected(name, folder)
    network = from_pretrained(folder)
    np.testing.assert_allclose(found(network), logits, rtol=0, atol=PARITY_LOGITS)
    again, _ = expected(name, save_pretrained(network, tmp_path / "saved"))
    np.testing.assert_allclose(again, logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaForMaskedLM"])
def test_the_bias_of_the_head_counts_if_a_file_has_two(name, tmp_path):
    folder = made(name, tmp_path / "given")
    bias = CLASSES[name][2]
    change(folder, lambda tensors: tensors.update({bias: torch.randn(40)}))
    logits, _ = expected(name, folder)
    network = from_pretrained(folder)
    assert network.arguments["tied_head"]
    np.testing.assert_allclose(found(network), logits, rtol=0, atol=PARITY_LOGITS)
    again, wrong = expected(name, save_pretrained(network, tmp_path / "saved"))
    np.testing.assert_allclose(again, logits, rtol=0, atol=1e-6)
    assert not wrong


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BartForConditionalGeneration"])
def test_an_untied_model_of_transformers_is_loaded(name, tmp_path):
    folder = made(name, tmp_path / "given", tie_word_embeddings=False)

    def share(tensors):  # `transformers` draws one table for each side
        for key in [key for key in tensors if key.endswith("embed_tokens.weight")]:
            tensors[key] = tensors["model.shared.weight"].clone()

    change(folder, share)
    logits, _ = expected(name, folder)
    np.testing.assert_allclose(found(from_pretrained(folder)), logits, rtol=0, atol=PARITY_LOGITS)


@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "T5ForConditionalGeneration"])
def test_two_tables_of_embeddings_are_refused(name, tmp_path):
    folder, prefix = made(name, tmp_path), "model." * name.startswith("Bart")
    table = f"{prefix}decoder.embed_tokens.weight"
    change(folder, lambda tensors: tensors.update({table: torch.randn(40, 16)}))
    with pytest.raises(InputError, match=f"{table} differs from the embedding table that"):
        from_pretrained(folder)


@pytest.mark.parametrize("name", ["PegasusForConditionalGeneration", "MarianMTModel"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_positions_other_than_the_formula_are_refused(name, dtype, tmp_path):
    folder = made(name, tmp_path)
    table = "model.encoder.embed_positions.weight"
    original = transformers.PegasusForConditionalGeneration(
        transformers.PegasusConfig(**PAIRS)
    ).state_dict()[table]

    def positions(noise):
        value = original + noise * torch.randn(original.shape)
        change(folder, lambda tensors: tensors.update({table: value.to(getattr(torch, dtype))}))

    positions(0.0)
    logits, _ = expected(name, folder)
    tolerance = PARITY_LOGITS if dtype == "float32" else 2e-2
    np.testing.assert_allclose(found(from_pretrained(folder)), logits, rtol=0, atol=tolerance)
    positions(0.05)
    with pytest.raises(InputError, match=f"{table} differs from the embedding table that"):
        from_pretrained(folder)


def test_a_head_of_another_size_is_refused(tmp_path):
    folder = made("LlamaForCausalLM", tmp_path)
    change(folder, lambda tensors: tensors.update({HEAD: torch.randn(44, 16)}))
    with pytest.warns(UserWarning, match="keeps its values"):
        with pytest.raises(
            InputError, match=r"lm_head.weight has shape \[44, 16\], not \[40, 16\]"
        ):
            from_pretrained(folder)


def test_a_classifier_of_an_untied_encoder_is_saved_without_the_old_head(tmp_path):
    from dtransformer.layers.heads import SequenceHead
    from dtransformer.models.one_stack import with_task_head

    folder = made("BertForMaskedLM", tmp_path / "given", tie_word_embeddings=False)
    network = from_pretrained(folder)
    with_task_head(network, SequenceHead(2, hidden_act="tanh", dropout_rate=0.1))
    saved = save_pretrained(network, tmp_path / "saved")
    assert not [key for key in load_file(saved / "model.safetensors") if key.startswith("cls.")]
    config = json.loads((saved / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    _, wrong = expected("BertForSequenceClassification", saved)
    assert not wrong
