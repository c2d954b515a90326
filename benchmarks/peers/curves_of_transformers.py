"""Create and train a model of `transformers` on prepared batches.

    python benchmarks/peers/curves_of_transformers.py FOLDER FAMILY STEPS LEARNING_RATE

FOLDER contains `batches.npz`. The script writes `FOLDER/FAMILY`, the model before the first step, and
`FOLDER/FAMILY.npz`, the losses.
"""

import pathlib
import sys
import time

import numpy as np
import torch
import transformers

EPSILON = 1e-10


def make_model(family, vocab_size, length, pad_id, start_id, end_id):
    """Return a random model without dropout, with four blocks of 128 features."""
    ids = {"bos_token_id": start_id, "eos_token_id": end_id, "pad_token_id": pad_id}
    common = {"vocab_size": vocab_size, **ids}
    gpt2 = {"n_positions": length, "n_embd": 128, "n_layer": 4, "n_head": 4}
    rates = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
    sizes |= {"num_hidden_layers": 4, "max_position_embeddings": length}
    bert = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    t5 = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4}
    t5 |= {"dropout_rate": 0.0}
    kinds = {
        "gpt2": (transformers.GPT2LMHeadModel, {**gpt2, **rates}),
        "llama": (transformers.LlamaForCausalLM, {**sizes, "num_key_value_heads": 2}),
        "bert": (transformers.BertForMaskedLM, {**sizes, **bert}),
        "t5": (transformers.T5ForConditionalGeneration, {**t5, "decoder_start_token_id": pad_id}),
    }
    model_class, options = kinds[family]
    return model_class(model_class.config_class(**common, **options))


def compute_loss(family, model, batch, pad_id):
    """Return the mean cross entropy of a batch."""
    tensors = {name: torch.tensor(x, dtype=torch.long) for name, x in batch.items()}
    if family == "t5":
        inputs = {
            "input_ids": tensors["source"],
            "attention_mask": (tensors["source"] != pad_id).long(),
            "decoder_input_ids": tensors["target"],
        }
    else:
        mask = (tensors["tokens"] != pad_id).long()
        inputs = {"input_ids": tensors["tokens"], "attention_mask": mask}
    logits = model(**inputs).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tensors["labels"].flatten(), ignore_index=-100
    )


def main(folder, family, steps, learning_rate):
    torch.set_num_threads(1)  # More threads do not help such small products.
    torch.manual_seed(0)
    arrays = dict(np.load(folder / "batches.npz"))
    ids = {name: int(arrays.pop(name)) for name in ("vocab_size", "pad_id", "start_id", "end_id")}
    batches = {
        name.partition("/")[2]: x for name, x in arrays.items() if name.startswith(f"{family}/")
    }
    length = batches["labels"].shape[2]
    model = make_model(family, length=length, **ids)
    model.save_pretrained(folder / family)
    optimizer = torch.optim.Adam(model.parameters(), learning_rate, eps=EPSILON)
    losses, began = [], time.perf_counter()
    for step in range(steps):
        batch_index = step % len(batches["labels"])
        batch = {name: x[batch_index] for name, x in batches.items()}
        loss = compute_loss(family, model, batch, ids["pad_id"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    np.savez(folder / f"{family}.npz", losses=losses, seconds=time.perf_counter() - began)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
