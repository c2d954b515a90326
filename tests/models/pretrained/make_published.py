"""Makes small random models with `transformers` and PyTorch, for the tests: run by itself.

    python make_published.py FOLDER

Of each it saves a folder before and after three steps of SGD, and what it computes (float32).
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


def main(folder):
    for number, (name, (config, options)) in enumerate(MODELS.items()):
        torch.manual_seed(number)
        options = {**options, "attn_implementation": "eager"}
        model = transformers.AutoModelForCausalLM.from_config(config(**options)).float()
        with torch.no_grad():
            for weight in model.parameters():  # biases and norms, too, are drawn
                weight.add_(torch.randn_like(weight) * 0.1)
        # Several files, with an index, of one of them.
        size = "20KB" if name == "llama" else "5GB"
        model.save_pretrained(folder / name, max_shard_size=size)
        ids = torch.randint(0, 61, (3, 20))
        with torch.no_grad():
            logits = model(ids).logits.numpy()
        optimizer, losses = torch.optim.SGD(model.parameters(), LEARNING_RATE), []
        for _ in range(STEPS):
            loss = model(ids, labels=ids).loss
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.save_pretrained(folder / f"{name}_after")
        np.savez(folder / f"{name}.npz", ids=ids.numpy(), logits=logits, losses=losses)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
