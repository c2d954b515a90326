"""Models of `transformers` on PyTorch, for the tests: a program that is run by itself.

    python reference_models.py make FOLDER
    python reference_models.py check MADE FOLDER

`make` saves small random models, before and after three steps of SGD, and what they compute in
float32. `check` loads models of the same names from FOLDER, and compares what they compute.
"""

import pathlib
import sys

import numpy as np
import torch
import transformers

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}
GPT_2 = {
    "vocab_size": 61,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 40,
    "resid_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "gpt2": (transformers.GPT2Config, GPT_2),
    "llama": (transformers.LlamaConfig, SIZES),
    "llama_3": (transformers.LlamaConfig, {**SIZES, "rope_parameters": LLAMA_3}),
    "llama_tied": (
        transformers.LlamaConfig,
        {**SIZES, "tie_word_embeddings": True, "rope_parameters": LINEAR, "head_dim": 16},
    ),
    "mistral": (transformers.MistralConfig, {**SIZES, "sliding_window": 5}),
    "qwen2": (transformers.Qwen2Config, SIZES),
}
STEPS, LEARNING_RATE = 3, 0.5
PROMPTS = [[5, 9, 33], [7], [40, 41, 42, 43, 44, 45, 46], [8, 8]]
NEW_TOKENS, END = 20, 2


def make(folder):
    for number, (name, (config, options)) in enumerate(MODELS.items()):
        torch.manual_seed(number)
        options = {**options, "attn_implementation": "eager"}
        model = transformers.AutoModelForCausalLM.from_config(config(**options)).float()
        with torch.no_grad():
            for weight in model.parameters():  # biases and norms, too, are drawn
                weight.add_(torch.randn_like(weight) * 0.1)
        # One of them in several files, with an index.
        size = "20KB" if name == "llama" else "5GB"
        model.save_pretrained(folder / name, max_shard_size=size)
        ids = torch.randint(0, 61, (3, 20))
        with torch.no_grad():
            logits = model(ids).logits.numpy()
        generated = generate(model)
        optimizer, losses = torch.optim.SGD(model.parameters(), LEARNING_RATE), []
        for _ in range(STEPS):
            loss = model(ids, labels=ids).loss
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.save_pretrained(folder / f"{name}_after")
        np.savez(folder / f"{name}.npz", ids=ids.numpy(), logits=logits, losses=losses, **generated)


def generate(model):
    """Return what comes after prompts of different lengths, greedily and by three beams."""
    longest = max(map(len, PROMPTS))
    rows = [[0] * (longest - len(row)) + row for row in PROMPTS]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in PROMPTS]
    found = {}
    for beams in (1, 3):
        ids = model.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            max_new_tokens=NEW_TOKENS,
            num_beams=beams,
            do_sample=False,
            length_penalty=0.0,
            pad_token_id=END,
        )
        found[f"generated_{beams}"] = ids[:, longest:].numpy()
    return found


def check(made, folder):
    for name in MODELS:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder / name, output_loading_info=True, attn_implementation="eager"
        )
        assert not any(info.values()), (name, info)
        expected = np.load(made / f"{name}.npz")
        with torch.no_grad():
            logits = model(torch.tensor(expected["ids"])).logits.numpy()
        np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-5)


if __name__ == "__main__":
    {"make": make, "check": check}[sys.argv[1]](*map(pathlib.Path, sys.argv[2:]))
