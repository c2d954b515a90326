"""Promise: published models that label sequences or tokens compute, load and save as `transformers`."""

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
# Others of decoders, whose heads are alike: in the long suite.
ALIKE = {
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
ALIKE["Gemma3Text"] = ("Gemma3TextConfig", {**DECODER, "head_dim": 8, **IDS}, (SEQUENCE,))
ALIKE["GptOss"] = ("GptOssConfig", {**DECODER, "head_dim": 8, **IDS}, (SEQUENCE, TOKENS))
ALIKE["DeepseekV2"] = ("DeepseekV2Config", {**DECODER, **_LATENTS, **IDS}, (SEQUENCE,))
ALIKE["DeepseekV3"] = ("DeepseekV3Config", {**DECODER, **_LATENTS, **IDS}, (SEQUENCE, TOKENS))
ALIKE["HunYuanDenseV1"] = ("HunYuanDenseV1Config", {**DECODER, "head_dim": 8, **IDS}, (SEQUENCE,))
_OPT = {**DECODER, "ffn_dim": 32, "word_embed_proj_dim": 16, **IDS}
ALIKE["OPT"] = ("OPTConfig", _OPT, (SEQUENCE,))
ALIKE["Falcon"] = ("FalconConfig", {**DECODER, **IDS}, (SEQUENCE, TOKENS))
FORMS |= ALIKE
NAMES = [
    pytest.param(base + ending, marks=[pytest.mark.long] * (base in ALIKE))
    for base, (_, _, endings) in FORMS.items()
    for ending in endings
]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A function of a class' name that returns the folder of one with random weights."""

    def made(name):
        base = name.partition("For")[0]
        kind, sizes, _ = FORMS[base]
        torch.manual_seed(0)
        config = getattr(transformers, kind)(**sizes, id2label=LABELS)
        folder = tmp_path_factory.mktemp(name)
        getattr(transformers, name)(config).eval().save_pretrained(folder)
        return folder

    return made


def texts(pad_id):
    """Ids [3, 7] of texts of three lengths, and where there are tokens."""
    ids = np.random.default_rng(0).integers(3, 40, (3, 7))
    mask = np.arange(7) < np.array([[7], [4], [5]])
    return np.where(mask, ids, pad_id), mask.astype("int32")


def expected(folder, name, ids, mask):
    model = getattr(transformers, name).from_pretrained(folder).eval()
    with torch.no_grad():
        given = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
        return model(**given).logits.numpy(), model.config


@pytest.mark.parametrize("name", NAMES)
def test_logits_files_and_labels(name, folder_of, tmp_path):
    folder = folder_of(name)
    network = from_pretrained(folder)
    ids, mask = texts(network.pad_id)
    logits, _ = expected(folder, name, ids, mask)
    found = network({"tokens": ids, "attention_mask": mask}).numpy()
    is_seen = mask[..., None] if name.endswith(TOKENS) else np.ones((3, 1))
    np.testing.assert_allclose(found * is_seen, logits * is_seen, rtol=0, atol=PARITY_LOGITS)

    save_pretrained(network, tmp_path / "saved")
    again, config = expected(tmp_path / "saved", name, ids, mask)
    np.testing.assert_array_equal(again, logits)
    assert config.architectures == [name] and config.id2label == LABELS
    before, after = (load_file(x / "model.safetensors") for x in (folder, tmp_path / "saved"))
    assert before.keys() == after.keys()
    for key, value in before.items():
        np.testing.assert_array_equal(after[key], value, err_msg=key)


@pytest.mark.parametrize("mode, normalizes", [("mean_tokens", True), ("cls_token", False)])
@pytest.mark.parametrize("base", ["Bert", "XLMRoberta", "DistilBert", "Qwen3"])
def test_vectors_of_sentence_transformers(base, mode, normalizes, tmp_path):
    kind, sizes, _ = FORMS[base]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**sizes)
    folder = tmp_path / "given"
    model = getattr(transformers, f"{base}Model")(config).eval()
    model.save_pretrained(folder)
    modules = ["Transformer", "Pooling", *["Normalize"] * normalizes]
    paths = ["", "1_Pooling", "2_Normalize"]
    types = [f"sentence_transformers.models.{name}" for name in modules]
    listed = [{"type": name, "path": path} for name, path in zip(types, paths)]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    pooling = {f"pooling_mode_{mode}": True, "pooling_mode_max_tokens": False}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))

    network = from_pretrained(folder)
    ids, mask = texts(network.pad_id)
    with torch.no_grad():
        states = model(torch.tensor(ids), torch.tensor(mask)).last_hidden_state.numpy()
    weights = mask / mask.sum(1, keepdims=True) if "mean" in mode else np.eye(7)[[0, 0, 0]]
    vectors = np.einsum("bsh,bs->bh", states, weights)
    if normalizes:
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    inputs = {"tokens": ids, "attention_mask": mask}
    np.testing.assert_allclose(network(inputs), vectors, rtol=0, atol=PARITY_LOGITS)

    save_pretrained(network, tmp_path / "saved")
    again = getattr(transformers, f"{base}Model").from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        found = again(torch.tensor(ids), torch.tensor(mask)).last_hidden_state.numpy()
    np.testing.assert_array_equal(found, states)
    np.testing.assert_allclose(from_pretrained(tmp_path / "saved")(inputs), network(inputs))
    saved = json.loads((tmp_path / "saved/modules.json").read_text())
    assert [x["type"] for x in saved] == types


def test_a_name_that_is_taken_keeps_its_modules(folder_of, tmp_path):
    """Other pooling, of the same weights, is a folder beside it, whole; nothing is left half."""
    target, pooling = tmp_path / "saved", "1_Pooling/config.json"
    for number, way in enumerate(("mean", "first", "mean")):
        network = from_pretrained(folder_of("BertForTokenClassification"))
        with_task_head(network, PoolingHead(way, normalize=False))
        if number == 1:
            with pytest.warns(UserWarning, match="already exists and was not changed"):
                assert save_pretrained(network, target) == tmp_path / "saved-2"
        else:
            assert save_pretrained(network, target) == target
    for folder, mode in ((target, "mean_tokens"), (tmp_path / "saved-2", "cls_token")):
        assert json.loads((folder / pooling).read_text())[f"pooling_mode_{mode}"]
    assert {path.name for path in tmp_path.iterdir()} == {"saved", "saved-2"}
    assert sorted(path.name for path in target.iterdir() if path.is_dir()) == ["1_Pooling"]


def test_modules_that_are_not_built_are_named(folder_of):
    folder = folder_of("BertForTokenClassification")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["BertModel"]}))
    listed = [{"type": f"x.{name}", "path": ""} for name in ("Transformer", "Pooling", "Dense")]
    (folder / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(InputError, match="the modules are Transformer, Pooling, Dense, expected"):
        from_pretrained(folder)


def test_a_head_of_another_form_is_refused(folder_of, tmp_path):
    network = from_pretrained(folder_of("BertForTokenClassification"))
    with_task_head(network, SequenceHead(3, pooling="mean"))
    with pytest.raises(InputError, match="no head of the kind SequenceHead, which has"):
        save_pretrained(network, tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_a_class_without_a_form_is_refused(folder_of):
    folder = folder_of("Olmo2ForSequenceClassification")
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Olmo2ForTokenClassification"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="Olmo2ForTokenClassification: its head is not built here"):
        from_pretrained(folder)


def test_padding_that_is_the_end_token(folder_of, tmp_path):
    """No padding for attention, but for pooling; and it is written again."""
    name, folder = "LlamaForSequenceClassification", tmp_path / "given"
    shutil.copytree(folder_of(name), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": 2}))
    network = from_pretrained(folder)
    ids, mask = texts(2)
    ids[0, -2:] = 2  # an end that is no padding
    logits, _ = expected(folder, name, ids, mask)
    for inputs in (ids, {"tokens": ids, "attention_mask": mask}):
        np.testing.assert_allclose(network(inputs), logits, rtol=0, atol=PARITY_LOGITS)
    again, config = expected(save_pretrained(network, tmp_path / "saved"), name, ids, mask)
    np.testing.assert_array_equal(again, logits)
    assert config.pad_token_id == 2
    with_task_head(network, new_head(network, SEQUENCE, ["bad", "good"]))
    _, config = expected(save_pretrained(network, tmp_path / "new"), name, ids, mask)
    assert config.pad_token_id == network.end_id == 2


DROPOUTS = {  # of networks whose configs say nothing of it
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
def test_dropout_before_labels(name, folder_of, tmp_path):
    """Of each class its own rate there, in the folder that is saved, too."""
    rate, fields = DROPOUTS[name]
    folder = tmp_path / "given"
    shutil.copytree(folder_of(name), folder)
    config = json.loads((folder / "config.json").read_text())
    for field in ("classifier_dropout", "seq_classif_dropout"):
        config.pop(field, None)
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    model = getattr(transformers, name).from_pretrained(folder)
    layers = {x: y for x, y in model.named_children() if isinstance(y, torch.nn.Dropout)}
    assert [x.p for x in layers.values()] == ([rate] if layers else [])
    network = from_pretrained(folder)
    assert network.head.dropout_rate == rate
    again = from_pretrained(save_pretrained(network, tmp_path / "saved"))
    assert again.head.dropout_rate == rate
    assert again.arguments["dropout_rate"] == network.arguments["dropout_rate"]


def test_the_kind_of_labels_is_written_again(folder_of, tmp_path):
    """Logits are the same whatever it is; pipelines of `transformers` ask for it."""
    folder = tmp_path / "given"
    shutil.copytree(folder_of("BertForSequenceClassification"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["problem_type"] = "multi_label_classification"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "sentence_bert_config.json").write_text("{}")
    (folder / "config_sentence_transformers.json").write_text("{}")
    saved = save_pretrained(from_pretrained(folder), tmp_path / "saved")
    again = json.loads((saved / "config.json").read_text())
    assert again["problem_type"] == "multi_label_classification"
    assert len([*saved.glob("*sentence_*.json")]) == 2
