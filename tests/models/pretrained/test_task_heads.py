"""Classifiers and embedding models compute, load and are saved as in `transformers`."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from dtransformer.errors import InputError
from dtransformer.layers.heads import PoolingHead, SequenceHead
from dtransformer.models import from_pretrained, save_pretrained
from dtransformer.models.one_stack import with_task_head
from dtransformer.models.pretrained.families.task_heads import new_head
from harness.tolerances import PARITY_LOGITS
from tests.models.pretrained.tiny_configs import DISTILBERT, ENCODER

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
IDS = {"bos_token_id": 1, "eos_token_id": 2}
DECODER = {**ENCODER, "num_key_value_heads": 1, "pad_token_id": 0}
SEQUENCE, TOKENS = "ForSequenceClassification", "ForTokenClassification"
LABELS = {0: "bad", 1: "fair", 2: "good"}
FORMS = {
    "Bert": ("BertConfig", ENCODER, (SEQUENCE, TOKENS)),
    "Roberta": ("RobertaConfig", ENCODER, (SEQUENCE, TOKENS)),
    "XLMRoberta": ("XLMRobertaConfig", ENCODER, (SEQUENCE,)),
    "Camembert": ("CamembertConfig", ENCODER, (TOKENS,)),
    "DistilBert": ("DistilBertConfig", DISTILBERT, (SEQUENCE, TOKENS)),
    "ModernBert": (
        "ModernBertConfig",
        {**ENCODER, "num_hidden_layers": 3, "pad_token_id": 0, "classifier_pooling": "mean"},
        (SEQUENCE, TOKENS),
    ),
    "Llama": ("LlamaConfig", DECODER, (SEQUENCE, TOKENS)),
    "Qwen3": ("Qwen3Config", {**DECODER, "head_dim": 8}, (SEQUENCE,)),
    "GPT2": (
        "GPT2Config",
        {"vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 2, "pad_token_id": 0, **IDS},
        (SEQUENCE, TOKENS),
    ),
}
# Decoders with the same kinds of heads belong to the long suite.
LONG_FORMS = {
    base: (f"{base}Config", {**DECODER, "head_dim": 8, **IDS}, endings)
    for endings, names in (
        ((SEQUENCE,), ("Olmo2", "Olmo3")),
        (
            (SEQUENCE, TOKENS),
            ("Mistral", "Qwen2", "Phi3", "StableLm", "Gemma2", "Glm4", "SmolLM3"),
        ),
        (
            (SEQUENCE, TOKENS),
            ("GPTNeoX", "Phi", "Arcee", "Nemotron", "Helium", "Exaone4", "Ministral3"),
        ),
    )
    for base in names
}
_LATENTS = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
_LATENTS |= {"num_key_value_heads": 2, "q_lora_rank": None, "num_experts_per_tok": 2}
_LATENTS |= {"n_routed_experts": 4, "moe_intermediate_size": 8, "n_group": 2, "topk_group": 1}
LONG_FORMS["Gemma3Text"] = ("Gemma3TextConfig", {**DECODER, "head_dim": 8, **IDS}, (SEQUENCE,))
LONG_FORMS["GptOss"] = ("GptOssConfig", {**DECODER, "head_dim": 8, **IDS}, (SEQUENCE, TOKENS))
LONG_FORMS["DeepseekV2"] = ("DeepseekV2Config", {**DECODER, **_LATENTS, **IDS}, (SEQUENCE,))
LONG_FORMS["DeepseekV3"] = ("DeepseekV3Config", {**DECODER, **_LATENTS, **IDS}, (SEQUENCE, TOKENS))
LONG_FORMS["HunYuanDenseV1"] = (
    "HunYuanDenseV1Config",
    {**DECODER, "head_dim": 8, **IDS},
    (SEQUENCE,),
)
_OPT = {**DECODER, "ffn_dim": 32, "word_embed_proj_dim": 16, **IDS}
LONG_FORMS["OPT"] = ("OPTConfig", _OPT, (SEQUENCE,))
LONG_FORMS["Falcon"] = ("FalconConfig", {**DECODER, **IDS}, (SEQUENCE, TOKENS))
FORMS |= LONG_FORMS
NAMES = [
    pytest.param(base + ending, marks=[pytest.mark.long] * (base in LONG_FORMS))
    for base, (_, _, endings) in FORMS.items()
    for ending in endings
]


@pytest.fixture(scope="module")
def save_random_model(tmp_path_factory):
    """Function that saves a random model of a class by name and returns its folder."""

    def save(name):
        base = name.partition("For")[0]
        kind, sizes, _ = FORMS[base]
        torch.manual_seed(0)
        config = getattr(transformers, kind)(**sizes, id2label=LABELS)
        folder = tmp_path_factory.mktemp(name)
        getattr(transformers, name)(config).eval().save_pretrained(folder)
        return folder

    return save


def padded_ids(pad_id):
    """Return ids [3, 7] of texts of three lengths, and a mask that is 1 at tokens."""
    ids = np.random.default_rng(0).integers(3, 40, (3, 7))
    mask = np.arange(7) < np.array([[7], [4], [5]])
    return np.where(mask, ids, pad_id), mask.astype("int32")


def run_transformers(folder, name, ids, mask):
    model = getattr(transformers, name).from_pretrained(folder).eval()
    with torch.no_grad():
        inputs = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
        return model(**inputs).logits.numpy(), model.config


@pytest.mark.parametrize("name", NAMES)
def test_logits_files_and_labels_match_transformers(name, save_random_model, tmp_path):
    folder = save_random_model(name)
    network = from_pretrained(folder)
    ids, mask = padded_ids(network.pad_id)
    logits, _ = run_transformers(folder, name, ids, mask)
    actual = network({"tokens": ids, "attention_mask": mask}).numpy()
    is_compared = mask[..., None] if name.endswith(TOKENS) else np.ones((3, 1))
    np.testing.assert_allclose(
        actual * is_compared, logits * is_compared, rtol=0, atol=PARITY_LOGITS
    )

    save_pretrained(network, tmp_path / "saved")
    reloaded, config = run_transformers(tmp_path / "saved", name, ids, mask)
    np.testing.assert_array_equal(reloaded, logits)
    assert config.architectures == [name] and config.id2label == LABELS
    before, after = (load_file(x / "model.safetensors") for x in (folder, tmp_path / "saved"))
    assert before.keys() == after.keys()
    for key, value in before.items():
        np.testing.assert_array_equal(after[key], value, err_msg=key)


@pytest.mark.parametrize("mode, normalizes", [("mean_tokens", True), ("cls_token", False)])
@pytest.mark.parametrize("base", ["Bert", "XLMRoberta", "DistilBert", "Qwen3"])
def test_sentence_transformers_vectors_match(base, mode, normalizes, tmp_path):
    kind, sizes, _ = FORMS[base]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**sizes)
    folder = tmp_path / "given"
    model = getattr(transformers, f"{base}Model")(config).eval()
    model.save_pretrained(folder)
    modules = ["Transformer", "Pooling", *["Normalize"] * normalizes]
    paths = ["", "1_Pooling", "2_Normalize"]
    types = [f"sentence_transformers.models.{name}" for name in modules]
    module_list = [{"type": name, "path": path} for name, path in zip(types, paths)]
    (folder / "modules.json").write_text(json.dumps(module_list))
    (folder / "1_Pooling").mkdir()
    pooling = {f"pooling_mode_{mode}": True, "pooling_mode_max_tokens": False}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))

    network = from_pretrained(folder)
    ids, mask = padded_ids(network.pad_id)
    with torch.no_grad():
        states = model(torch.tensor(ids), torch.tensor(mask)).last_hidden_state.numpy()
    weights = mask / mask.sum(1, keepdims=True) if "mean" in mode else np.eye(7)[[0, 0, 0]]
    vectors = np.einsum("bsh,bs->bh", states, weights)
    if normalizes:
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    inputs = {"tokens": ids, "attention_mask": mask}
    np.testing.assert_allclose(network(inputs), vectors, rtol=0, atol=PARITY_LOGITS)

    save_pretrained(network, tmp_path / "saved")
    reloaded = getattr(transformers, f"{base}Model").from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        actual = reloaded(torch.tensor(ids), torch.tensor(mask)).last_hidden_state.numpy()
    np.testing.assert_array_equal(actual, states)
    np.testing.assert_allclose(from_pretrained(tmp_path / "saved")(inputs), network(inputs))
    saved = json.loads((tmp_path / "saved/modules.json").read_text())
    assert [x["type"] for x in saved] == types


def test_different_pooling_is_saved_to_a_second_folder(save_random_model, tmp_path):
    """A network with other pooling is saved to a second folder, even if its weights are the same."""
    target, pooling = tmp_path / "saved", "1_Pooling/config.json"
    for index, pooling_mode in enumerate(("mean", "first", "mean")):
        network = from_pretrained(save_random_model("BertForTokenClassification"))
        with_task_head(network, PoolingHead(pooling_mode, normalize=False))
        if index == 1:
            with pytest.warns(UserWarning, match="already exists and was not changed"):
                assert save_pretrained(network, target) == tmp_path / "saved-2"
        else:
            assert save_pretrained(network, target) == target
    for folder, mode in ((target, "mean_tokens"), (tmp_path / "saved-2", "cls_token")):
        assert json.loads((folder / pooling).read_text())[f"pooling_mode_{mode}"]
    assert {path.name for path in tmp_path.iterdir()} == {"saved", "saved-2"}
    assert sorted(path.name for path in target.iterdir() if path.is_dir()) == ["1_Pooling"]


def test_unsupported_modules_raise_an_error(save_random_model):
    folder = save_random_model("BertForTokenClassification")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["BertModel"]}))
    module_list = [
        {"type": f"x.{name}", "path": ""} for name in ("Transformer", "Pooling", "Dense")
    ]
    (folder / "modules.json").write_text(json.dumps(module_list))
    with pytest.raises(InputError, match="The modules must be .*, got Transformer, Pooling, Dense"):
        from_pretrained(folder)


def test_saving_an_unsupported_head_raises_an_error(save_random_model, tmp_path):
    network = from_pretrained(save_random_model("BertForTokenClassification"))
    with_task_head(network, SequenceHead(3, pooling="mean"))
    with pytest.raises(InputError, match="have no SequenceHead with"):
        save_pretrained(network, tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_loading_an_unsupported_head_class_raises_an_error(save_random_model):
    folder = save_random_model("Olmo2ForSequenceClassification")
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Olmo2ForTokenClassification"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        InputError, match="The head of Olmo2ForTokenClassification is not supported"
    ):
        from_pretrained(folder)


def test_end_token_as_padding_matches_transformers(save_random_model, tmp_path):
    """Attention includes the token and pooling ignores it. The id is saved with the network."""
    name, folder = "LlamaForSequenceClassification", tmp_path / "given"
    shutil.copytree(save_random_model(name), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": 2}))
    network = from_pretrained(folder)
    ids, mask = padded_ids(2)
    ids[0, -2:] = 2  # These end tokens belong to the text.
    logits, _ = run_transformers(folder, name, ids, mask)
    for inputs in (ids, {"tokens": ids, "attention_mask": mask}):
        np.testing.assert_allclose(network(inputs), logits, rtol=0, atol=PARITY_LOGITS)
    reloaded, config = run_transformers(
        save_pretrained(network, tmp_path / "saved"), name, ids, mask
    )
    np.testing.assert_array_equal(reloaded, logits)
    assert config.pad_token_id == 2
    with_task_head(network, new_head(network, SEQUENCE, ["bad", "good"]))
    _, config = run_transformers(save_pretrained(network, tmp_path / "new"), name, ids, mask)
    assert config.pad_token_id == network.end_id == 2


# Dropout rates before the head if the config has only the given fields.
DROPOUTS = {
    "LlamaForSequenceClassification": (0.0, {}),
    "LlamaForTokenClassification": (0.1, {}),
    "GPT2ForSequenceClassification": (0.0, {}),
    "GPT2ForTokenClassification": (0.1, {"classifier_dropout": None}),
    "DistilBertForSequenceClassification": (0.2, {"dropout": 0.3}),
    "DistilBertForTokenClassification": (0.3, {"dropout": 0.3, "seq_classif_dropout": 0.4}),
    "BertForSequenceClassification": (0.1, {}),
    "ModernBertForTokenClassification": (0.0, {}),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_classifier_dropout_is_read_and_saved(name, save_random_model, tmp_path):
    """Classes have different default rates in `transformers`. Saving keeps the rate."""
    rate, fields = DROPOUTS[name]
    folder = tmp_path / "given"
    shutil.copytree(save_random_model(name), folder)
    config = json.loads((folder / "config.json").read_text())
    for field in ("classifier_dropout", "seq_classif_dropout"):
        config.pop(field, None)
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    model = getattr(transformers, name).from_pretrained(folder)
    layers = {x: y for x, y in model.named_children() if isinstance(y, torch.nn.Dropout)}
    assert [x.p for x in layers.values()] == ([rate] if layers else [])
    network = from_pretrained(folder)
    assert network.head.dropout_rate == rate
    reloaded = from_pretrained(save_pretrained(network, tmp_path / "saved"))
    assert reloaded.head.dropout_rate == rate
    assert reloaded.arguments["dropout_rate"] == network.arguments["dropout_rate"]


def test_problem_type_and_sentence_configs_are_saved(save_random_model, tmp_path):
    """The problem type does not change logits, but pipelines of `transformers` read it."""
    folder = tmp_path / "given"
    shutil.copytree(save_random_model("BertForSequenceClassification"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["problem_type"] = "multi_label_classification"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "sentence_bert_config.json").write_text("{}")
    (folder / "config_sentence_transformers.json").write_text("{}")
    saved = save_pretrained(from_pretrained(folder), tmp_path / "saved")
    reloaded = json.loads((saved / "config.json").read_text())
    assert reloaded["problem_type"] == "multi_label_classification"
    assert len([*saved.glob("*sentence_*.json")]) == 2
