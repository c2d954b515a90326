"""A folder that cannot be loaded or a network that cannot be saved raises a one-line error."""

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


def save_network(network, path, family):
    network.build()
    save_pretrained(network, path / family, family)
    return path / family


@pytest.fixture
def folder(tmp_path):
    """Valid folder of a Llama."""
    return save_network(CausalLM(20, **LLAMA), tmp_path, "llama")


def load_error(path):
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


def test_valid_folder_is_loaded_bit_for_bit(folder):
    network = CausalLM(20, **LLAMA)
    network.build()
    loaded = from_pretrained(folder)
    for weight, loaded_weight in zip(network.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(weight.numpy(), loaded_weight.numpy())


def test_missing_folder_raises_an_error(tmp_path):
    assert "is not an existing folder" in load_error(tmp_path / "none")
    assert "does not exist" in load_error(tmp_path)


def test_weights_in_another_format_raise_an_error(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "found pytorch_model.bin" in load_error(folder)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"model_type": "mamba"}, "`model_type` must be one of gpt2, opt, llama"),
        ({"model_type": KeyError}, "got None."),
        ({"hidden_size": KeyError}, "The field 'hidden_size' is missing"),
        ({"hidden_act": "mish"}, "got 'mish'."),
        ({"attention_bias": True}, "`attention_bias=true` is not supported"),
        ({"is_causal": False}, "`is_causal=false` is not supported for LlamaForCausalLM"),
        ({"rope_parameters": {"rope_type": "su", "factor": 2.0}}, "'su', expected one of"),
        ({"num_hidden_layers": 10**9}, "must be at most 10,000, got 1,000,000,000."),
        ({"num_hidden_layers": 2}, "missing model.layers.1.input_layernorm.weight"),
        ({"intermediate_size": 32}, r"gate_proj.weight has shape [24, 16], not [32, 16]"),
        ({"vocab_size": 21}, "embed_tokens.weight has shape [20, 16], not [21, 16]"),
        ({"num_key_value_heads": 3}, "`num_kv_heads=3` must divide `num_heads=4`"),
        ({"tie_word_embeddings": "yes"}, "`tied_head` must be a bool, got 'yes'"),
        ({"num_attention_heads": 0, "head_dim": KeyError}, "num_attention_heads=0, num_key"),
        (
            {"num_attention_heads": [4], "head_dim": KeyError},
            "num_attention_heads=[4], num_key",
        ),
        ({"architectures": [True]}, "`architectures` must be a list of names, got [True]"),
        (
            {"architectures": ["LlamaForSequenceClassification"], "id2label": ["a"]},
            "`id2label` must be a dict from indices to names, got ['a']",
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"], "num_labels": "2"},
            "num_labels must be an integer of at least 1, got '2'",
        ),
        ({"hidden_act": {}}, "hidden_act={} has an invalid value"),
        ({"model_type": ["llama"]}, "got ['llama']."),
        (
            {"model_type": "gpt2", "n_embd": 16, "scale_attn_weights": False},
            "`scale_attn_weights=false` is not supported",
        ),
    ],
)
def test_invalid_config_raises_an_error(folder, fields, message):
    change_config(folder, **fields)
    assert message in load_error(folder)


@pytest.mark.parametrize(
    "modules, pooling, message",
    [
        (
            [{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": 1}],
            {},
            "a list of modules",
        ),
        ([{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "x"}], {}, "got none."),
        (
            [{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "x"}],
            [],
            "a JSON object",
        ),
        ({"modules": []}, {}, "a list of modules"),
    ],
)
def test_invalid_sentence_transformers_modules_raise_an_error(folder, modules, pooling, message):
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "x").mkdir()
    (folder / "x" / "config.json").write_text(json.dumps(pooling))
    assert message in load_error(folder)


def test_config_must_be_a_json_object(folder):
    (folder / "config.json").write_text("[]")
    assert "must contain a JSON object" in load_error(folder)


def test_missing_and_unexpected_tensors_are_named(folder):
    change_tensors(folder, lambda tensors: tensors.pop("model.norm.weight"))
    change_tensors(folder, lambda tensors: tensors.update(other=np.zeros(3, "float32")))
    text = load_error(folder)
    assert "missing model.norm.weight; unexpected other" in text


def test_values_that_are_not_finite_raise_an_error(folder):
    def spoil(tensors):
        tensors["model.norm.weight"][3] = np.nan

    change_tensors(folder, spoil)
    with pytest.raises(InputError, match="model.norm.weight has values that are not finite"):
        from_pretrained(folder)


def test_arguments_that_need_missing_weights_raise_an_error(folder):
    with pytest.raises(InputError, match="missing lm_head.bias"):
        from_pretrained(folder, head_bias=True)


@pytest.mark.parametrize(
    "pad_id, expected", [(None, None), (0, 0), (3, None), (2, None), (-1, None)]
)
def test_padding_id_with_another_meaning_is_ignored(folder, pad_id, expected):
    """Many published models pad with their end token, which also occurs in texts."""
    change_config(folder, pad_token_id=pad_id, bos_token_id=2, eos_token_id=3)
    assert from_pretrained(folder).pad_id == expected


def test_mistral_without_a_window_field_has_the_default_window(folder):
    for fields, window in (
        ({}, 4096),
        ({"sliding_window": None}, None),
        ({"sliding_window": 7}, 7),
    ):
        change_config(folder, **{"model_type": "mistral", "sliding_window": KeyError, **fields})
        assert from_pretrained(folder).arguments["window"] == window


def test_invalid_index_raises_an_error(folder):
    index = {"weight_map": {"model.norm.weight": "model.safetensors", "x": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks x (1 missing tensors), which model.safetensors.index.json lists." in load_error(
        folder / ""
    )
    index = {"weight_map": {"x": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "`weight_map` must contain file names" in load_error(folder)


@pytest.mark.parametrize(
    "family, options, message",
    [
        ("mamba", {}, "`family` must be one of .*, got 'mamba'"),
        ("bert", {}, "is a CausalLM, but the family 'bert' needs a MaskedLM"),
        ("gpt2", {}, "`num_kv_heads=2`, but the family needs `num_kv_heads=None`"),
        ("llama", {"window": 3}, "`window=3`, but the family needs `window=None`"),
        (
            "llama",
            {"embedding_scale": None},
            "`embedding_scale=None`, but the family needs `embedding_scale=1.0`",
        ),
        ("qwen2", {}, "`qkv_bias=False`, but the family needs `qkv_bias=True`"),
        ("llama", {"soft_cap": 30.0}, "`soft_cap=30.0`, but the family needs `soft_cap=None`"),
        (
            "llama",
            {"qk_norm": "rms_norm"},
            "`qk_norm='rms_norm'`, but the family needs `qk_norm=None`",
        ),
        ("llama", {"hidden_act": "tanh"}, "`hidden_act='tanh'` has no name in configs"),
        (
            "llama",
            {"rotary_fraction": 0.5},
            "`rotary_fraction=0.5`, but the family needs `rotary_fraction=1.0`",
        ),
        ("mistral", {"qkv_bias": True}, "`qkv_bias=True`, but the family needs `qkv_bias=False`"),
        (
            "gpt2",
            {**GPT_2, "num_kv_heads": 2},
            "`num_kv_heads=2`, but the family needs `num_kv_heads=None`",
        ),
        ("gpt2", {**GPT_2, "head_dim": 8}, "`head_dim=8`, but the family needs `head_dim=None`"),
        ("gpt2", {**GPT_2, "window": 8}, "`window=8`, but the family needs `window=None`"),
    ],
)
def test_saving_a_causal_lm_as_another_family_raises_an_error(tmp_path, family, options, message):
    network = CausalLM(20, **{**LLAMA, **options})
    network.build()
    with pytest.raises(InputError, match=message):
        save_pretrained(network, tmp_path / "new", family)
    assert not (tmp_path / "new").exists()


def test_failed_save_leaves_no_files(tmp_path, monkeypatch):
    network = CausalLM(20, **LLAMA)
    network.build()
    monkeypatch.setattr(
        "json.dumps", lambda *_, **__: "\ud800"
    )  # A lone surrogate is not valid UTF-8.
    with pytest.raises(ValueError):
        save_pretrained(network, tmp_path / "new", "llama")
    assert not list(tmp_path.iterdir())


def test_constants_of_apertus_have_one_supported_value(tmp_path):
    changes = {"hidden_act": "xielu", "gated": False, "qk_norm": "rms_norm"}
    folder = save_network(CausalLM(20, **{**LLAMA, **changes}), tmp_path, "apertus")
    from_pretrained(folder)
    name = "model.layers.0.mlp.act_fn.beta"
    change_tensors(folder, lambda tensors: tensors.update({name: np.asarray(0.75, "float32")}))
    assert f"{name} is 0.75, but only 0.5 is supported" in load_error(folder)


BERT = {"hidden_size": 16, "num_heads": 4, "num_layers": 1, "ffn_hidden_size": 24, "max_length": 9}


@pytest.fixture
def bert(tmp_path):
    """Valid folder of a BERT."""
    return save_network(MaskedLM(20, **BERT, next_sentence=True), tmp_path, "bert")


def test_files_of_the_first_bert_are_loaded(bert):
    """The norms have older names. Without next sentences, some tensors are unused."""

    def use_older_names(tensors):
        for name in [name for name in tensors if "LayerNorm" in name]:
            older = name.replace("weight", "gamma").replace("bias", "beta")
            tensors[older] = tensors.pop(name)
        table = tensors["bert.embeddings.word_embeddings.weight"]
        tensors["cls.predictions.decoder.weight"] = table.copy()

    expected = from_pretrained(bert)
    change_tensors(bert, use_older_names)
    change_config(bert, architectures=["BertForMaskedLM"])
    assert not from_pretrained(bert).arguments["next_sentence"]
    loaded = from_pretrained(bert, next_sentence=True)
    for weight, loaded_weight in zip(expected.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(weight.numpy(), loaded_weight.numpy())


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"is_decoder": True}, "`is_decoder=true` is not supported for BertForMaskedLM"),
        ({"position_embedding_type": "relative_key"}, "is not supported"),
        ({"tie_word_embeddings": False}, "missing cls.predictions.decoder.weight"),
        ({"type_vocab_size": 3}, "token_type_embeddings.weight has shape [2, 16], not [3, 16]"),
        ({"model_type": "roberta"}, '`hidden_act="gelu_new"` is not supported for Roberta'),
    ],
)
def test_invalid_bert_config_raises_an_error(bert, fields, message):
    change_config(bert, hidden_act="gelu_new")
    change_config(bert, **fields)
    assert message in load_error(bert)


@pytest.mark.parametrize("pad_id", [None, KeyError])
def test_roberta_positions_need_a_padding_id(bert, pad_id):
    change_config(bert, model_type="roberta", pad_token_id=pad_id)
    assert "pad_token_id" in load_error(bert)


@pytest.mark.parametrize(
    "family, options, message",
    [
        ("llama", {}, "is a MaskedLM, but the family 'llama' needs a CausalLM"),
        (
            "bert",
            {"position_offset": 2},
            "`position_offset=2`, but the family needs `position_offset=0`",
        ),
        ("roberta", {}, "`position_offset=0`, but the family needs `position_offset=1`"),
        ("roberta", {"position_offset": 1, "hidden_act": "relu"}, "hidden_act='relu'"),
    ],
)
def test_saving_a_masked_lm_as_another_family_raises_an_error(tmp_path, family, options, message):
    network = MaskedLM(20, **{**BERT, **options})
    network.build()
    with pytest.raises(InputError, match=message):
        save_pretrained(network, tmp_path / "new", family)


SIZES = {"hidden_size": 16, "num_heads": 4, "encoder_layers": 1, "decoder_layers": 1}
FROZEN = {"head_bias": True, "trains_head_bias": False, "max_length": 9}
BART = {**SIZES, **FROZEN, "position_offset": 2, "embedding_norm": True, "pad_id": 1, "end_id": 2}


@pytest.fixture
def bart(tmp_path):
    """Valid folder of a BART."""
    return save_network(EncoderDecoderLM(20, **BART), tmp_path, "bart")


def test_special_tokens_may_be_equal(bart):
    """BART starts with its end token and Marian with its padding."""
    network = from_pretrained(bart)
    assert (network.pad_id, network.start_id, network.end_id) == (1, 2, 2)
    change_config(bart, pad_token_id=2)
    assert from_pretrained(bart).pad_id == 2


def test_bart_file_without_a_head_is_loaded(bart):
    """The names have no prefix, and the head bias is missing."""

    def remove_head(tensors):
        tensors.pop("final_logits_bias")
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    change_tensors(bart, remove_head)
    network = from_pretrained(bart)
    assert not network.arguments["head_bias"]
    save_pretrained(network, bart.parent / "new", "bart")
    assert "model.shared.weight" in load_file(bart.parent / "new" / "model.safetensors")


def test_copies_of_the_shared_table_are_accepted(bart):
    def copy_table(tensors):
        for name in ("lm_head", "model.encoder.embed_tokens", "model.decoder.embed_tokens"):
            tensors[f"{name}.weight"] = tensors["model.shared.weight"].copy()

    change_tensors(bart, copy_table)
    from_pretrained(bart)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"normalize_before": True}, "`normalize_before=true` is not supported for Bart"),
        ({"normalize_embedding": False}, "`normalize_embedding=false` is not supported"),
        ({"decoder_ffn_dim": 24}, "`encoder_ffn_dim=64` and `decoder_ffn_dim=24` must be equal"),
        (
            {"decoder_attention_heads": 2},
            "attention_heads=4` and `decoder_attention_heads=2` must be equal",
        ),
        ({"decoder_layers": KeyError}, "The field 'decoder_layers' is missing"),
        ({"decoder_layers": 2}, "missing decoder.layers.1.self_attn_layer_norm.weight"),
        ({"vocab_size": 21}, "shared.weight has shape [20, 16], not [21, 16]"),
        (
            {"decoder_start_token_id": 20},
            "`start_id` must be in the vocabulary of 20 entries, got 20",
        ),
        ({"pad_token_id": None}, "`pad_token_id` is missing"),
        ({"decoder_start_token_id": KeyError}, "`decoder_start_token_id` is missing"),
        (
            {"model_type": "marian", "share_encoder_decoder_embeddings": False},
            "`share_encoder_decoder_embeddings=false` is not supported for MarianMTModel",
        ),
        ({"model_type": "marian"}, "`normalize_embedding=true` is not supported for MarianMTModel"),
    ],
)
def test_invalid_bart_config_raises_an_error(bart, fields, message):
    change_config(bart, **fields)
    assert message in load_error(bart)


@pytest.mark.parametrize(
    "family, options, message",
    [
        (
            "marian",
            {},
            "`embedding_norm=True`, but the family needs `embedding_norm=False`",
        ),
        (
            "bart",
            {"embedding_scale": 2.0},
            "`embedding_scale=2.0`, but the family needs `embedding_scale=1.0 or None`",
        ),
        (
            "bart",
            {"norm": "rms_norm"},
            "`norm='rms_norm'`, but the family needs `norm='layer_norm'`",
        ),
        ("llama", {}, "is a EncoderDecoderLM, but the family 'llama'"),
    ],
)
def test_saving_an_encoder_decoder_as_another_family_raises_an_error(
    tmp_path, family, options, message
):
    network = EncoderDecoderLM(20, **{**BART, **options})
    network.build()
    with pytest.raises(InputError, match=message):
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
    """Valid folder of a T5."""
    return save_network(EncoderDecoderLM(20, **T5), tmp_path, "t5")


def test_untied_head_of_t5_is_detected(t5):
    """Newer configs of T5 1.1 claim a tied head, but their outputs are not scaled."""
    assert from_pretrained(t5).arguments["tied_head"]
    change_tensors(t5, lambda tensors: tensors.update({"lm_head.weight": tensors["shared.weight"]}))
    assert from_pretrained(t5).arguments["tied_head"]
    change_config(t5, scale_decoder_outputs=False)
    assert not from_pretrained(t5).arguments["tied_head"]
    change_config(t5, scale_decoder_outputs=KeyError, tie_word_embeddings=False)
    network = from_pretrained(t5)
    assert not network.arguments["tied_head"] and not network.arguments["scales_output"]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"feed_forward_proj": "twice-relu"}, "got 'twice-relu'"),
        (
            {"feed_forward_proj": "gated-relu"},
            "missing encoder.block.0.layer.1.DenseReluDense.wi_0",
        ),
        ({"feed_forward_proj": "mish"}, "got 'mish'."),
        ({"relative_attention_num_buckets": 16}, "bias.weight has shape [32, 4], not [16, 4]"),
        ({"relative_attention_max_distance": 4}, "`relative_max_distance=4` must be above"),
        ({"d_kv": KeyError}, "The field 'd_kv' is missing"),
        ({"tie_word_embeddings": False}, "missing lm_head.weight"),
        ({"num_decoder_layers": 2}, "missing decoder.block.1.layer.0.SelfAttention.q.weight"),
    ],
)
def test_invalid_t5_config_raises_an_error(t5, fields, message):
    change_config(t5, **fields)
    assert message in load_error(t5)


@pytest.mark.parametrize(
    "family, options, message",
    [
        ("bart", {}, "`query_scale=1.0`, but the family needs `query_scale=None`"),
        ("t5", {"query_scale": None}, "`query_scale=None`, but the family needs `query_scale=1.0`"),
        ("t5", {"use_bias": True}, "`use_bias=True`, but the family needs `use_bias=False`"),
        ("t5", {"attention_dropout_rate": 0.3}, "'attention_dropout_rate': 0.3"),
        ("t5", {"gated": True}, "A gated `hidden_act='gelu'` has no name"),
    ],
)
def test_saving_another_encoder_decoder_as_t5_raises_an_error(tmp_path, family, options, message):
    network = EncoderDecoderLM(20, **{**T5, **options})
    network.build()
    with pytest.raises(InputError, match=message):
        save_pretrained(network, tmp_path / "new", family)


def test_existing_folder_is_not_overwritten(folder):
    before = (folder / "model.safetensors").read_bytes()
    network = from_pretrained(folder)
    network.weights[0].assign_add(np.ones(network.weights[0].shape))
    with pytest.warns(UserWarning, match="already exists and was not changed"):
        assert save_pretrained(network, folder, "llama") == folder.parent / "llama-2"
    assert (folder / "model.safetensors").read_bytes() == before
