"""Program that makes or checks small random models of `transformers`.

    python -m tests.models.pretrained.reference_models make FOLDER
    python -m tests.models.pretrained.reference_models generate FOLDER
    python -m tests.models.pretrained.reference_models check MADE FOLDER

`make` saves models before and after three steps of SGD, and their float32 results. It generates
texts with a few models, and `generate` with the others.
`check` loads models of the same names from FOLDER and compares their results.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.auto import modeling_auto as auto

from tests.models.pretrained import family_rows
from tests.models.pretrained.reference_kinds import END, PADDING, VOCAB_SIZE, Masked, Pairs, Texts
from tests.models.pretrained.reference_searches import save_rules, search_results
from tests.models.pretrained.search_cases import SEARCHED

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": END,
    "pad_token_id": None,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}
GPT_2 = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 40,
    "resid_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": END,
}
BERT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": PADDING,
}
BART = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 24,
    "dropout": 0.0,
    "pad_token_id": PADDING,
    "eos_token_id": END,
    "decoder_start_token_id": END,
    "forced_eos_token_id": None,
}
MARIAN = {
    **BART,
    "scale_embedding": True,
    "activation_function": "swish",
    "decoder_start_token_id": PADDING,
}
T5 = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 1,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "dropout_rate": 0.0,
    "pad_token_id": PADDING,
    "eos_token_id": END,
    "decoder_start_token_id": PADDING,
}
T5_GATED = {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
# Each model has a class, a config and a kind with its inputs and losses.
MODELS = {
    "gpt2": (transformers.GPT2LMHeadModel, GPT_2, Texts()),
    "llama": (transformers.LlamaForCausalLM, SIZES, Texts()),
    "llama_3": (
        transformers.LlamaForCausalLM,
        {**SIZES, "rope_parameters": family_rows.LLAMA_3},
        Texts(),
    ),
    "llama_tied": (
        transformers.LlamaForCausalLM,
        {**SIZES, "tie_word_embeddings": True, "rope_parameters": LINEAR, "head_dim": 16},
        Texts(),
    ),
    "mistral": (transformers.MistralForCausalLM, {**SIZES, "sliding_window": 5}, Texts()),
    "qwen2": (transformers.Qwen2ForCausalLM, SIZES, Texts()),
    "bert": (transformers.BertForMaskedLM, {**BERT, "hidden_act": "gelu_new"}, Masked()),
    "bert_sentences": (transformers.BertForPreTraining, BERT, Masked(next_sentence=True)),
    "roberta": (
        transformers.RobertaForMaskedLM,
        {**BERT, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
        Masked(num_token_types=1),
    ),
    "bart": (transformers.BartForConditionalGeneration, BART, Pairs(END)),
    "marian": (transformers.MarianMTModel, MARIAN, Pairs(PADDING)),
    "t5": (transformers.T5ForConditionalGeneration, T5, Pairs(PADDING)),
    "t5_gated": (transformers.T5ForConditionalGeneration, T5_GATED, Pairs(PADDING)),
    "mixtral": (transformers.MixtralForCausalLM, {**SIZES, "num_local_experts": 4}, Texts()),
}
for _names, _defaults, _rows, _kind in (
    (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, SIZES, family_rows.TEXTS, lambda _: Texts()),
    (
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        BERT,
        family_rows.MASKED,
        lambda config: Masked(config.get("type_vocab_size")),
    ),
    (
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        BART,
        family_rows.PAIRS,
        lambda config: Pairs(config["decoder_start_token_id"]),
    ),
):
    for _name, _row in _rows.items():
        _class = getattr(transformers, _names[family_rows.FAMILIES[_name]])
        _config = {**_defaults, **_row.config}
        MODELS[_name] = (_class, _config, _kind(_row.config if _defaults is BERT else _config))
STEPS = 3
QUICKLY_GENERATED = "llama", "marian", "bart"  # The quick suite compares their texts.
FAMILIES = sorted({model_class.config_class.model_type for model_class, _, _ in MODELS.values()})


def save_fields(path):
    """Save the default fields of all config classes, and numbers of parameters."""
    kinds = {kind: transformers.CONFIG_MAPPING[kind]().to_dict() for kind in FAMILIES}
    generation = sorted(vars(transformers.GenerationConfig()))
    classes = {
        model_class.config_class.model_type: model_class for model_class, _, _ in MODELS.values()
    }
    with torch.device("meta"):
        models = {
            kind: classes[kind](classes[kind].config_class()) for kind in family_rows.DEFAULT_SIZES
        }
    parameter_counts = {
        kind: sum(x.numel() for x in model.parameters()) for kind, model in models.items()
    }
    fields = {"configs": kinds, "generation": generation, "parameters": parameter_counts}
    path.write_text(json.dumps(fields))


def save_mxfp4(path):
    """Save blocks with all bytes, their scales and their values."""
    blocks = torch.randperm(4096).reshape(2, 16, 8, 16).to(torch.uint8)
    scales = torch.randint(1, 252, (2, 16, 8)).to(torch.uint8)
    values = convert_moe_packed_tensors(blocks, scales).float()
    np.savez(path, blocks=blocks, scales=scales, values=values)


def save_fp8(path):
    """Save an FP8 matrix of two by three blocks and its values."""
    elements, scales = torch.randn(256, 384).to(torch.float8_e4m3fn), torch.rand(2, 3)
    values = Fp8Dequantize(None)._dequantize_one(elements, scales, torch.float32)
    np.savez(path, elements=elements.float(), scales=scales, values=values)


def make(folder):
    save_fields(folder / "fields.json")
    save_mxfp4(folder / "mxfp4.npz")
    save_fp8(folder / "fp8.npz")
    save_rules(folder / "rules.npz")
    for seed, (name, (model_class, options, kind)) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        config = model_class.config_class(**options, attn_implementation="eager")
        model = model_class(config).float()
        if options.get("tie_word_embeddings") is False:  # T5 ties its head despite the config.
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        with torch.no_grad():
            for weight in tensors_to_randomize(model):
                weight.add_(torch.randn_like(weight) * 0.1)
        # One model is saved in several files with an index.
        size = "20KB" if name == "llama" else "5GB"
        model.save_pretrained(folder / name, max_shard_size=size)
        batch = kind.batch()
        with torch.no_grad():
            outputs = kind.outputs(model, batch)
        padded = kind.padded(model)
        if name in QUICKLY_GENERATED:
            save_texts(model, folder, name)
        optimizer, losses = torch.optim.SGD(model.parameters(), kind.learning_rate), []
        for _ in range(STEPS):
            loss = kind.loss(model, batch)
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.save_pretrained(folder / f"{name}_after")
        arrays = {key: np.asarray(value) for key, value in {**batch, **outputs}.items()}
        scalars = {"losses": losses, "learning_rate": kind.learning_rate}
        np.savez(folder / f"{name}.npz", **arrays, **scalars, **padded)


def save_texts(model, folder, name):
    """Save the texts that a model generates."""
    texts = MODELS[name][-1].generate(model)
    if name == SEARCHED:
        texts |= search_results(model)
    np.savez(folder / f"{name}-texts.npz", **texts)


def generate(folder):
    """Save the texts of all models that `make` has not generated."""
    for seed, (name, (model_class, _, _)) in enumerate(MODELS.items()):
        if name not in QUICKLY_GENERATED:
            torch.manual_seed(seed)
            model = model_class.from_pretrained(folder / name, attn_implementation="eager")
            save_texts(model, folder, name)


def tensors_to_randomize(model):
    """Return all trained parameters, and the frozen biases of heads and routers."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    bias_names = "final_logits_bias", "e_score_correction_bias"
    return [*trained, *(x for name, x in model.named_buffers() if name.endswith(bias_names))]


def check(created, folder):
    for path in folder.iterdir():
        name = path.name
        model_class, _, kind = MODELS[name]
        model, info = model_class.from_pretrained(
            path, output_loading_info=True, attn_implementation="eager"
        )
        assert not any(info.values()), (name, info)
        expected = dict(np.load(created / f"{name}.npz"))
        batch = {key: torch.tensor(x) for key, x in expected.items() if x.dtype.kind in "ib"}
        with torch.no_grad():
            outputs = kind.outputs(model, batch)
        for key, value in outputs.items():
            np.testing.assert_allclose(value, expected[key], rtol=0, atol=1e-5)


if __name__ == "__main__":
    torch.set_num_threads(1)  # More threads would slow down models of this size.
    {"make": make, "generate": generate, "check": check}[sys.argv[1]](
        *map(pathlib.Path, sys.argv[2:])
    )
