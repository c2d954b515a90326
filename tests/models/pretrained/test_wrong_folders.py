"""Promise: a folder that cannot be loaded, or a network that cannot be saved, is told in one line."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dtransformer.errors import InputError
from dtransformer.models import (
    CausalLM,
    EncoderDecoderLM,
    MaskedLM,
    from_pretrained,
    save_pretrained,
)

LLAMA = {
    "hidden_size": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 24,
    "num_layers": 1,
    "positions": "rotary",
    "hidden_act": "silu",
    "norm": "rms_norm",
    "gated": True,
    "use_bias": False,
    "tied_head": False,
    "embedding_scale": 1.0,
    "pad_id": None,
}

GPT_2 = {
    "positions": "learned",
    "norm": "layer_norm",
    "gated": False,
    "use_bias": True,
    "num_kv_heads": None,
}


def saved(network, path, family):
    network.build()
    save_pretrained(network, path / family, family)
    return path / family


@pytest.fixture
def folder(tmp_path):
    """A good folder of a Llama."""
    return saved(CausalLM(20, **LLAMA), tmp_path, "llama")


def refusal(path):
    with pytest.raises(InputError) as caught:
        from_pretrained(path)
    text = str(caught.value)
    assert str(path) in text and "\n" not in text
    return text


def change_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in (config | fields).items() if value is not KeyError}
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_good_folder_is_loaded_bit_for_bit(folder):
    network = CausalLM(20, **LLAMA)
    network.build()
    again = from_pretrained(folder)
    for own, other in zip(network.weights, again.weights, strict=True):
        np.testing.assert_array_equal(own.numpy(), other.numpy())


def test_no_folder(tmp_path):
    assert "there is no such folder" in refusal(tmp_path / "none")
    assert "does not exist" in refusal(tmp_path)


def test_weights_of_another_format(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "found pytorch_model.bin" in refusal(folder)


@pytest.mark.parametrize(
    "fields, told",
    [
        ({"model_type": "mamba"}, "model_type is 'mamba', expected one of gpt2, opt, llama"),
        ({"model_type": KeyError}, "model_type is None"),
        ({"hidden_size": KeyError}, "lacks the field 'hidden_size'"),
        ({"hidden_act": "mish"}, "the activation 'mish' is none of"),
        ({"attention_bias": True}, "attention_bias=true is not built"),
        ({"is_causal": False}, "is_causal=false is not built for LlamaForCausalLM's blocks"),
        ({"rope_parameters": {"rope_type": "su", "factor": 2.0}}, "'su', expected one of"),
        ({"num_hidden_layers": 2}, "it lacks model.layers.1.input_layernorm.weight"),
        ({"intermediate_size": 32}, r"gate_proj.weight is [24, 16], not [32, 16]"),
        ({"vocab_size": 21}, "embed_tokens.weight is [20, 16], not [21, 16]"),
        ({"num_key_value_heads": 3}, "`num_kv_heads=3` must divide `num_heads=4`"),
        ({"tie_word_embeddings": "yes"}, "`tied_head` must be a bool, got 'yes'"),
        ({"num_attention_heads": 0, "head_dim": KeyError}, "num_attention_heads=0, num_key"),
        (
            {"num_attention_heads": [4], "head_dim": KeyError},
            "num_attention_heads=[4], num_key",
        ),
        ({"architectures": [True]}, "architectures is [True], expected a list of names"),
        (
            {"architectures": ["LlamaForSequenceClassification"], "id2label": ["a"]},
            "id2label is ['a'], expected numbers and names",
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"], "num_labels": "2"},
            "num_labels must be an integer of at least 1, got '2'",
        ),
        ({"hidden_act": {}}, "hidden_act={} one is not as published"),
        ({"model_type": ["llama"]}, "model_type is ['llama'], expected one of gpt2, opt, llama"),
        (
            {"model_type": "gpt2", "n_embd": 16, "scale_attn_weights": False},
            "scale_attn_weights=false is not built",
        ),
    ],
)
def test_a_config_that_does_not_fit(folder, fields, told):
    change_config(folder, **fields)
    assert told in refusal(folder)


@pytest.mark.parametrize(
    "modules, pooling, told",
    [
        (
            [{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": 1}],
            {},
            "a list of modules",
        ),
        ([{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "x"}], {}, "by nothing"),
        ([{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "x"}], [], "an object"),
        ({"modules": []}, {}, "a list of modules"),
    ],
)
def test_modules_that_are_none_of_sentence_transformers(folder, modules, pooling, told):
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "x").mkdir()
    (folder / "x" / "config.json").write_text(json.dumps(pooling))
    assert told in refusal(folder)


def test_a_config_that_is_no_object(folder):
    (folder / "config.json").write_text("[]")
    assert "expected an object of JSON" in refusal(folder)


def test_tensors_that_lack_or_are_too_many(folder):
    change_tensors(folder, lambda tensors: tensors.pop("model.norm.weight"))
    change_tensors(folder, lambda tensors: tensors.update(other=np.zeros(3, "float32")))
    text = refusal(folder)
    assert "it lacks model.norm.weight; it also has other" in text


def test_values_that_are_not_finite(folder):
    def spoil(tensors):
        tensors["model.norm.weight"][3] = np.nan

    change_tensors(folder, spoil)
    with pytest.raises(InputError, match="model.norm.weight has values that are not finite"):
        from_pretrained(folder)


def test_arguments_that_need_other_weights(folder):
    with pytest.raises(InputError, match="it lacks lm_head.bias"):
        from_pretrained(folder, head_bias=True)


@pytest.mark.parametrize("pad_id, found", [(None, None), (0, 0), (3, None), (2, None), (-1, None)])
def test_padding_that_has_another_meaning_is_none(folder, pad_id, found):
    """Many published models pad with their end token, which their texts have, too."""
    change_config(folder, pad_token_id=pad_id, bos_token_id=2, eos_token_id=3)
    assert from_pretrained(folder).pad_id == found


def test_the_window_of_the_first_mistral(folder):
    for given, window in (({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 7}, 7)):
        change_config(folder, **{"model_type": "mistral", "sliding_window": KeyError, **given})
        assert from_pretrained(folder).arguments["window"] == window


def test_an_index_that_does_not_fit(folder):
    index = {"weight_map": {"model.norm.weight": "model.safetensors", "x": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks x (1 missing tensors), which model.safetensors.index.json lists" in refusal(
        folder / ""
    )
    index = {"weight_map": {"x": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "expected a weight_map of names of files" in refusal(folder)


@pytest.mark.parametrize(
    "family, options, told",
    [
        ("mamba", {}, "family is 'mamba', expected one of"),
        ("bert", {}, "is a CausalLM, but the family 'bert' needs a MaskedLM"),
        ("gpt2", {}, "the network has positions='rotary', the published family 'learned'"),
        ("llama", {"window": 3}, "the network has window=3, the published family None"),
        ("llama", {"embedding_scale": None}, "embedding_scale=None, the published family 1.0"),
        ("qwen2", {}, "the network has qkv_bias=False, the published family True"),
        ("llama", {"soft_cap": 30.0}, "soft_cap=30.0, the published family None"),
        ("llama", {"qk_norm": "rms_norm"}, "qk_norm='rms_norm', the published family None"),
        ("llama", {"hidden_act": "tanh"}, "hidden_act='tanh' has no name in published configs"),
        ("llama", {"rotary_fraction": 0.5}, "rotary_fraction=0.5, the published family 1.0"),
        ("mistral", {"qkv_bias": True}, "qkv_bias=True, the published family False"),
        ("gpt2", {**GPT_2, "num_kv_heads": 2}, "num_kv_heads=2, the published family None"),
        ("gpt2", {**GPT_2, "head_dim": 8}, "head_dim=8, the published family None"),
        ("gpt2", {**GPT_2, "window": 8}, "window=8, the published family None"),
    ],
)
def test_a_network_that_is_none_of_the_family(tmp_path, family, options, told):
    network = CausalLM(20, **{**LLAMA, **options})
    network.build()
    with pytest.raises(InputError, match=told):
        save_pretrained(network, tmp_path / "new", family)
    assert not (tmp_path / "new").exists()


def test_what_could_not_be_written_whole_is_not_there(tmp_path, monkeypatch):
    network = CausalLM(20, **LLAMA)
    network.build()
    monkeypatch.setattr("json.dumps", lambda *_, **__: "\ud800")  # is no UTF-8
    with pytest.raises(ValueError):
        save_pretrained(network, tmp_path / "new", "llama")
    assert not list(tmp_path.iterdir())


BERT = {"hidden_size": 16, "num_heads": 4, "num_layers": 1, "ffn_hidden_size": 24, "max_length": 9}


@pytest.fixture
def bert(tmp_path):
    """A good folder of a BERT."""
    return saved(MaskedLM(20, **BERT, next_sentence=True), tmp_path, "bert")


def test_files_of_the_first_bert(bert):
    """Its norms have older names, and what it is without next sentences is spare in them."""

    def as_older(tensors):
        for name in [name for name in tensors if "LayerNorm" in name]:
            older = name.replace("weight", "gamma").replace("bias", "beta")
            tensors[older] = tensors.pop(name)
        table = tensors["bert.embeddings.word_embeddings.weight"]
        tensors["cls.predictions.decoder.weight"] = table.copy()

    expected = from_pretrained(bert)
    change_tensors(bert, as_older)
    change_config(bert, architectures=["BertForMaskedLM"])
    assert not from_pretrained(bert).arguments["next_sentence"]
    again = from_pretrained(bert, next_sentence=True)
    for own, other in zip(expected.weights, again.weights, strict=True):
        np.testing.assert_array_equal(own.numpy(), other.numpy())


@pytest.mark.parametrize(
    "fields, told",
    [
        ({"is_decoder": True}, "is_decoder=true is not built for BertForMaskedLM's"),
        ({"position_embedding_type": "relative_key"}, "is not built"),
        ({"tie_word_embeddings": False}, "it lacks cls.predictions.decoder.weight"),
        ({"type_vocab_size": 3}, "token_type_embeddings.weight is [2, 16], not [3, 16]"),
        ({"model_type": "roberta"}, 'hidden_act="gelu_new" is not built for Roberta'),
    ],
)
def test_a_config_of_bert_that_does_not_fit(bert, fields, told):
    change_config(bert, hidden_act="gelu_new")
    change_config(bert, **fields)
    assert told in refusal(bert)


@pytest.mark.parametrize("pad_id", [None, KeyError])
def test_positions_of_roberta_need_its_padding(bert, pad_id):
    change_config(bert, model_type="roberta", pad_token_id=pad_id)
    assert "pad_token_id" in refusal(bert)


@pytest.mark.parametrize(
    "family, options, told",
    [
        ("llama", {}, "is a MaskedLM, but the family 'llama' needs a CausalLM"),
        ("bert", {"position_offset": 2}, "position_offset=2, the published family 0"),
        ("roberta", {}, "position_offset=0, the published family 1"),
        ("roberta", {"position_offset": 1, "hidden_act": "relu"}, "hidden_act='relu'"),
    ],
)
def test_a_masked_network_that_is_none_of_the_family(tmp_path, family, options, told):
    network = MaskedLM(20, **{**BERT, **options})
    network.build()
    with pytest.raises(InputError, match=told):
        save_pretrained(network, tmp_path / "new", family)


SIZES = {"hidden_size": 16, "num_heads": 4, "encoder_layers": 1, "decoder_layers": 1}
FROZEN = {"head_bias": True, "trains_head_bias": False, "max_length": 9}
BART = {**SIZES, **FROZEN, "position_offset": 2, "embedding_norm": True, "pad_id": 1, "end_id": 2}


@pytest.fixture
def bart(tmp_path):
    """A good folder of a BART."""
    return saved(EncoderDecoderLM(20, **BART), tmp_path, "bart")


def test_special_tokens_may_be_the_same(bart):
    """The start is the end of BART's, and the padding of Marian's."""
    network = from_pretrained(bart)
    assert (network.pad_id, network.start_id, network.end_id) == (1, 2, 2)
    change_config(bart, pad_token_id=2)
    assert from_pretrained(bart).pad_id == 2


def test_a_file_of_a_model_without_a_head(bart):
    """Its names have no prefix, and there is no bias of the head."""

    def as_model(tensors):
        tensors.pop("final_logits_bias")
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    change_tensors(bart, as_model)
    network = from_pretrained(bart)
    assert not network.arguments["head_bias"]
    save_pretrained(network, bart.parent / "new", "bart")
    assert "model.shared.weight" in load_file(bart.parent / "new" / "model.safetensors")


def test_tables_that_are_stored_once_more(bart):
    def store(tensors):
        for name in ("lm_head", "model.encoder.embed_tokens", "model.decoder.embed_tokens"):
            tensors[f"{name}.weight"] = tensors["model.shared.weight"].copy()

    change_tensors(bart, store)
    from_pretrained(bart)


@pytest.mark.parametrize(
    "fields, told",
    [
        ({"normalize_before": True}, "normalize_before=true is not built for Bart"),
        ({"normalize_embedding": False}, "normalize_embedding=false is not built"),
        ({"decoder_ffn_dim": 24}, "encoder_ffn_dim=64 and decoder_ffn_dim=24 differ"),
        ({"decoder_attention_heads": 2}, "attention_heads=4 and decoder_attention_heads=2 differ"),
        ({"decoder_layers": KeyError}, "lacks the field 'decoder_layers'"),
        ({"decoder_layers": 2}, "it lacks decoder.layers.1.self_attn_layer_norm.weight"),
        ({"vocab_size": 21}, "shared.weight is [20, 16], not [21, 16]"),
        ({"decoder_start_token_id": 20}, "start_id must be in the vocabulary of 20, got 20"),
        ({"pad_token_id": None}, "lacks the field pad_token_id"),
        ({"decoder_start_token_id": KeyError}, "lacks the field decoder_start_token_id"),
        (
            {"model_type": "marian", "share_encoder_decoder_embeddings": False},
            "share_encoder_decoder_embeddings=false is not built for MarianMTModel's blocks",
        ),
        ({"model_type": "marian"}, "normalize_embedding=true is not built for MarianMTModel"),
    ],
)
def test_a_config_of_bart_that_does_not_fit(bart, fields, told):
    change_config(bart, **fields)
    assert told in refusal(bart)


@pytest.mark.parametrize(
    "family, options, told",
    [
        ("marian", {}, "positions='learned', the published family 'sinusoidal_paper'"),
        ("bart", {"embedding_scale": 2.0}, "embedding_scale=2.0, the published family 1.0 or None"),
        ("bart", {"norm": "rms_norm"}, "norm='rms_norm', the published family 'layer_norm'"),
        ("llama", {}, "is a EncoderDecoderLM, but the family 'llama'"),
    ],
)
def test_an_encoder_decoder_that_is_none_of_the_family(tmp_path, family, options, told):
    network = EncoderDecoderLM(20, **{**BART, **options})
    network.build()
    with pytest.raises(InputError, match=told):
        save_pretrained(network, tmp_path / "new", family)


T5 = {
    **SIZES,
    "positions": "relative",
    "norm": "rms_norm",
    "use_bias": False,
    "post_layernorm_residual": False,
    "query_scale": 1.0,
    "scales_output": True,
    "start_id": 0,
}


@pytest.fixture
def t5(tmp_path):
    """A good folder of a T5."""
    return saved(EncoderDecoderLM(20, **T5), tmp_path, "t5")


def test_a_head_of_its_own_of_t5(t5):
    """Newer configs of version 1.1 say that it is tied, and that nothing is scaled."""
    assert from_pretrained(t5).arguments["tied_head"]
    change_tensors(t5, lambda tensors: tensors.update({"lm_head.weight": tensors["shared.weight"]}))
    assert from_pretrained(t5).arguments["tied_head"]
    change_config(t5, scale_decoder_outputs=False)
    assert not from_pretrained(t5).arguments["tied_head"]
    change_config(t5, scale_decoder_outputs=KeyError, tie_word_embeddings=False)
    network = from_pretrained(t5)
    assert not network.arguments["tied_head"] and not network.arguments["scales_output"]


@pytest.mark.parametrize(
    "fields, told",
    [
        ({"feed_forward_proj": "twice-relu"}, "feed_forward_proj is 'twice-relu'"),
        (
            {"feed_forward_proj": "gated-relu"},
            "it lacks encoder.block.0.layer.1.DenseReluDense.wi_0",
        ),
        ({"feed_forward_proj": "mish"}, "the activation 'mish' is none of"),
        ({"relative_attention_num_buckets": 16}, "bias.weight is [32, 4], not [16, 4]"),
        ({"relative_attention_max_distance": 4}, "`relative_max_distance=4` must be above"),
        ({"d_kv": KeyError}, "lacks the field 'd_kv'"),
        ({"tie_word_embeddings": False}, "it lacks lm_head.weight"),
        ({"num_decoder_layers": 2}, "it lacks decoder.block.1.layer.0.SelfAttention.q.weight"),
    ],
)
def test_a_config_of_t5_that_does_not_fit(t5, fields, told):
    change_config(t5, **fields)
    assert told in refusal(t5)


@pytest.mark.parametrize(
    "family, options, told",
    [
        ("bart", {}, "positions='relative', the published family 'learned'"),
        ("t5", {"query_scale": None}, "query_scale=None, the published family 1.0"),
        ("t5", {"use_bias": True}, "use_bias=True, the published family False"),
        ("t5", {"attention_dropout_rate": 0.3}, "'attention_dropout_rate': 0.3"),
        ("t5", {"gated": True}, "a gate of hidden_act='gelu' has no name"),
    ],
)
def test_an_encoder_decoder_that_is_no_t5(tmp_path, family, options, told):
    network = EncoderDecoderLM(20, **{**T5, **options})
    network.build()
    with pytest.raises(InputError, match=told):
        save_pretrained(network, tmp_path / "new", family)


def test_nothing_is_overwritten(folder):
    before = (folder / "model.safetensors").read_bytes()
    network = from_pretrained(folder)
    network.weights[0].assign_add(np.ones(network.weights[0].shape))
    with pytest.warns(UserWarning, match="already exists and was not changed"):
        assert save_pretrained(network, folder, "llama") == folder.parent / "llama-2"
    assert (folder / "model.safetensors").read_bytes() == before
