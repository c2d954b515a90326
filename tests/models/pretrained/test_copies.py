"""Duplicate tensors in a folder are loaded with the values that `transformers` uses."""

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
# Each class has a config, a head kernel and the head bias if files may contain it twice.
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


def save_random_model(name, folder, **fields):
    """Save a random model of a class of `transformers` and return the folder."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    config = kind.config_class(**{**CLASSES[name][0], **fields})
    kind(config).save_pretrained(folder)
    return folder


def edit_tensors(folder, edit):
    """Call `edit` with a dict of a folder's tensors and save them."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def get_table(tensors):
    """Return the embedding table, identified by its shape."""
    return next(x for key, x in tensors.items() if x.shape == (40, 16) and "head" not in key)


def hf_logits(name, folder):
    """Return the logits of `transformers`, and the names of missing or unexpected tensors."""
    kind = getattr(transformers, name)
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    inputs = {"input_ids": torch.tensor(IDS)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.tensor(IDS[:, ::-1].copy())
    with torch.no_grad():
        logits = model.eval()(**inputs).logits.numpy()
    return logits, {*info["missing_keys"], *info["unexpected_keys"]}


def get_logits(network):
    if hasattr(network, "encode"):
        return network({"source": IDS, "target": IDS[:, ::-1]}).numpy()
    return network(IDS).numpy()


@pytest.mark.parametrize("name", NAMES)
def test_head_with_different_values_is_untied(name, tmp_path):
    folder = save_random_model(name, tmp_path / "given")
    _, head, bias = CLASSES[name]

    def add(tensors):
        tensors[head] = get_table(tensors) + torch.randn(40, 16) * 0.5
        if bias is not None:
            tensors[bias] = torch.randn(40)

    edit_tensors(folder, add)
    logits, _ = hf_logits(name, folder)
    with pytest.warns(UserWarning, match=f"{head} differs from .* keeps its values") as caught:
        network = from_pretrained(folder)
    assert len(caught) == 1 and not network.arguments["tied_head"]
    np.testing.assert_allclose(get_logits(network), logits, rtol=0, atol=PARITY_LOGITS)

    saved = save_pretrained(network, tmp_path / "saved")
    saved_logits, mismatches = hf_logits(name, saved)
    np.testing.assert_allclose(saved_logits, logits, rtol=0, atol=1e-6)
    assert not mismatches
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(get_logits(from_pretrained(saved)), get_logits(network))


@pytest.mark.parametrize("name", NAMES)
def test_head_equal_to_the_table_stays_tied(name, tmp_path):
    folder = save_random_model(name, tmp_path / "given")
    _, head, _ = CLASSES[name]
    edit_tensors(folder, lambda tensors: tensors.update({head: get_table(tensors).clone()}))
    logits, _ = hf_logits(name, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        network = from_pretrained(folder)
    assert network.arguments["tied_head"]
    np.testing.assert_allclose(get_logits(network), logits, rtol=0, atol=PARITY_LOGITS)


def test_mt5_head_is_untied(tmp_path):
    """Configs of `transformers` claim a tied head, but published files have another kernel."""
    name, folder = "MT5ForConditionalGeneration", tmp_path / "given"
    save_random_model(name, folder)
    edit_tensors(folder, lambda tensors: tensors.update({HEAD: torch.randn(40, 16)}))
    logits, _ = hf_logits(name, folder)
    network = from_pretrained(folder)
    np.testing.assert_allclose(get_logits(network), logits, rtol=0, atol=PARITY_LOGITS)
    saved_logits, _ = hf_logits(name, save_pretrained(network, tmp_path / "saved"))
    np.testing.assert_allclose(saved_logits, logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaForMaskedLM"])
def test_decoder_bias_takes_precedence_over_its_copy(name, tmp_path):
    folder = save_random_model(name, tmp_path / "given")
    bias = CLASSES[name][2]
    edit_tensors(folder, lambda tensors: tensors.update({bias: torch.randn(40)}))
    logits, _ = hf_logits(name, folder)
    network = from_pretrained(folder)
    assert network.arguments["tied_head"]
    np.testing.assert_allclose(get_logits(network), logits, rtol=0, atol=PARITY_LOGITS)
    saved_logits, mismatches = hf_logits(name, save_pretrained(network, tmp_path / "saved"))
    np.testing.assert_allclose(saved_logits, logits, rtol=0, atol=1e-6)
    assert not mismatches


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BartForConditionalGeneration"])
def test_untied_model_of_transformers_is_loaded(name, tmp_path):
    folder = save_random_model(name, tmp_path / "given", tie_word_embeddings=False)

    def share(tensors):  # `transformers` initializes a table for each side.
        for key in [key for key in tensors if key.endswith("embed_tokens.weight")]:
            tensors[key] = tensors["model.shared.weight"].clone()

    edit_tensors(folder, share)
    logits, _ = hf_logits(name, folder)
    np.testing.assert_allclose(
        get_logits(from_pretrained(folder)), logits, rtol=0, atol=PARITY_LOGITS
    )


@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "T5ForConditionalGeneration"])
def test_two_different_embedding_tables_raise_an_error(name, tmp_path):
    folder, prefix = save_random_model(name, tmp_path), "model." * name.startswith("Bart")
    table = f"{prefix}decoder.embed_tokens.weight"
    edit_tensors(folder, lambda tensors: tensors.update({table: torch.randn(40, 16)}))
    with pytest.raises(InputError, match=f"{table} differs from the embedding table that"):
        from_pretrained(folder)


@pytest.mark.parametrize("name", ["PegasusForConditionalGeneration", "MarianMTModel"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_positions_that_are_not_sinusoidal_raise_an_error(name, dtype, tmp_path):
    folder = save_random_model(name, tmp_path)
    table = "model.encoder.embed_positions.weight"
    original = transformers.PegasusForConditionalGeneration(
        transformers.PegasusConfig(**PAIRS)
    ).state_dict()[table]

    def positions(noise):
        value = original + noise * torch.randn(original.shape)
        edit_tensors(
            folder, lambda tensors: tensors.update({table: value.to(getattr(torch, dtype))})
        )

    positions(0.0)
    logits, _ = hf_logits(name, folder)
    tolerance = PARITY_LOGITS if dtype == "float32" else 2e-2
    np.testing.assert_allclose(get_logits(from_pretrained(folder)), logits, rtol=0, atol=tolerance)
    positions(0.05)
    with pytest.raises(InputError, match=f"{table} differs from the embedding table that"):
        from_pretrained(folder)


def test_head_of_another_size_raises_an_error(tmp_path):
    folder = save_random_model("LlamaForCausalLM", tmp_path)
    edit_tensors(folder, lambda tensors: tensors.update({HEAD: torch.randn(44, 16)}))
    with pytest.warns(UserWarning, match="keeps its values"):
        with pytest.raises(
            InputError, match=r"lm_head.weight has shape \[44, 16\], not \[40, 16\]"
        ):
            from_pretrained(folder)


def test_classifier_of_an_untied_encoder_is_saved_without_the_old_head(tmp_path):
    from dtransformer.layers.heads import SequenceHead
    from dtransformer.models.one_stack import with_task_head

    folder = save_random_model("BertForMaskedLM", tmp_path / "given", tie_word_embeddings=False)
    network = from_pretrained(folder)
    with_task_head(network, SequenceHead(2, hidden_act="tanh", dropout_rate=0.1))
    saved = save_pretrained(network, tmp_path / "saved")
    assert not [key for key in load_file(saved / "model.safetensors") if key.startswith("cls.")]
    config = json.loads((saved / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    _, mismatches = hf_logits("BertForSequenceClassification", saved)
    assert not mismatches
