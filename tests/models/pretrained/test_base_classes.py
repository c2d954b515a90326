"""Folders of classes without a head, such as `BertModel`, are loaded for any task."""

import json

import numpy as np
import pytest

from dtransformer.errors import InputError
from dtransformer.layers.heads import PoolingHead
from dtransformer.models import CausalLM, from_pretrained
from dtransformer.models.one_stack import with_task_head
from dtransformer.models.pretrained.load import read_architecture
from dtransformer.runs.loading import opened
from harness.byte_tokenizer import write_byte_tokenizer
from harness.tolerances import PARITY_LOGITS
from tests.models.pretrained.tiny_configs import DISTILBERT, ENCODER, T5

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
PADDED = {**ENCODER, "pad_token_id": 0}
DECODER = {**PADDED, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 2}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
# Each class has a config and a flag. If it is True, the head has no weights and vectors result.
CLASSES = {
    "BertModel": (PADDED, True),
    "RobertaModel": (ENCODER | {"pad_token_id": 1}, True),
    "XLMRobertaModel": (ENCODER | {"pad_token_id": 1}, True),
    "CamembertModel": (ENCODER | {"pad_token_id": 1}, True),
    "DistilBertModel": (DISTILBERT, True),
    "ModernBertModel": (PADDED | {"num_hidden_layers": 3}, True),
    "LlamaModel": (DECODER, True),
    "MistralModel": (DECODER, True),
    "GPTNeoXModel": (DECODER, True),
    "PhiModel": (DECODER | {"num_key_value_heads": 2}, True),
    "Gemma3TextModel": (DECODER | {"head_dim": 8}, False),
    "OPTModel": (
        {**DECODER, "ffn_dim": 32, "word_embed_proj_dim": 16, "pad_token_id": 1},
        False,
    ),
    "FalconModel": (DECODER, False),
    "GPT2Model": (GPT2, False),
}
IDS = np.random.default_rng(0).integers(3, 40, (3, 7))


def save_random_model(name, folder, sizes):
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**sizes)).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", CLASSES)
def test_hidden_states_match_transformers(name, tmp_path):
    sizes, gives_vectors = CLASSES[name]
    model = save_random_model(name, tmp_path, sizes)
    network = from_pretrained(tmp_path)
    assert network.has_task_head == gives_vectors
    with torch.no_grad():
        states = model(torch.tensor(IDS)).last_hidden_state.numpy()
    if gives_vectors:
        is_decoder = isinstance(network, CausalLM)
        vectors = states[:, -1] if is_decoder else states.mean(1)
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        np.testing.assert_allclose(network(IDS), vectors, rtol=0, atol=PARITY_LOGITS)
    with_task_head(network, PoolingHead("first", normalize=False))
    np.testing.assert_allclose(network(IDS), states[:, 0], rtol=0, atol=PARITY_LOGITS)


def test_missing_head_kernel_raises_an_error(tmp_path):
    """The class in the config has a head, but the file lacks its kernel."""
    save_random_model("LlamaModel", tmp_path, DECODER)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="missing lm_head.weight"):
        from_pretrained(tmp_path)


def test_decoder_without_a_head_cannot_generate_text(tmp_path):
    save_random_model("LlamaModel", tmp_path, DECODER | {"vocab_size": 290})
    write_byte_tokenizer(tmp_path, ["one"], "{{ messages }}")
    with pytest.raises(InputError, match="contains a CausalLM, which does not generate text"):
        opened(tmp_path, "float32")


def test_encoder_without_its_decoder_raises_an_error(tmp_path):
    save_random_model("T5EncoderModel", tmp_path, T5)
    for read in (read_architecture, from_pretrained):
        with pytest.raises(
            InputError,
            match="`architectures` names an encoder without its decoder. Use the files of T5For",
        ):
            read(tmp_path)
