"""Program that makes or checks random `peft` adapters on PyTorch.

    python reference_adapters.py make MODELS FOLDER
    python reference_adapters.py check MODELS REFERENCE FOLDER

`make` adds random adapters to the models of `reference_models.py`. It saves them before and after
three steps of SGD, and their float32 results. `check` loads adapters of the same names from FOLDER
and compares their logits with the results in REFERENCE.
"""

import dataclasses
import json
import pathlib
import sys

import numpy as np
import peft
import torch
import transformers

TARGETS = {
    "llama": {"target_modules": ["q_proj", "v_proj"]},
    "mistral": {"target_modules": "all-linear"},
    "qwen2": {"target_modules": ["k_proj", "o_proj", "lm_head"], "use_rslora": True},
    "gpt2": {"target_modules": ["attn.c_proj", "mlp.c_fc"], "fan_in_fan_out": True},
    "glm": {"target_modules": ["q_proj", "k_proj"]},
    "llama_dora": {"target_modules": "all-linear", "use_dora": True},
    "gpt2_dora": {
        "target_modules": ["attn.c_proj", "mlp.c_fc"],
        "fan_in_fan_out": True,
        "use_dora": True,
    },
    "glm_dora": {"target_modules": ["q_proj", "o_proj"], "use_dora": True},
}
STEPS, LEARNING_RATE = 3, 0.1
# Variants of adapters for the Llama model. The last three have unsupported fields.
BASE = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "up_proj"]}
VARIANTS = {
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "mica": {"init_lora_weights": "mica"},
    "patterns": {
        "rank_pattern": {"v_proj": 2, "layers.1.self_attn.q_proj": 8},
        "alpha_pattern": {"^model.layers.0.*q_proj": 3, "up_proj": 1},
        "use_rslora": True,
        "lora_dropout": 0.5,
    },
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "alora": {"alora_invocation_tokens": [3, 4]},
}


def load_base_model(folder, name):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder / name.removesuffix("_dora"), attn_implementation="eager"
    )


def compute_logits(model, ids):
    with torch.no_grad():
        return model(ids).logits.numpy()


def make(models, folder):
    for seed, (name, options) in enumerate(TARGETS.items()):
        torch.manual_seed(seed)
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, **options)
        model = peft.get_peft_model(load_base_model(models, name), config)
        factors = [x for x in model.parameters() if x.requires_grad]
        with torch.no_grad():
            for factor in factors:
                factor.copy_(torch.randn_like(factor) * 0.1)
        model.save_pretrained(folder / name)
        ids = torch.randint(0, 61, (3, 20))
        results = {"ids": ids.numpy(), "logits": compute_logits(model, ids)}
        optimizer, losses = torch.optim.SGD(factors, LEARNING_RATE), []
        for _ in range(STEPS):
            loss = model(ids, labels=ids).loss
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.save_pretrained(folder / f"{name}_after")
        np.savez(folder / f"{name}.npz", losses=losses, **results)
    make_variants(models, folder)


def make_variants(models, folder):
    """Save adapters of the Llama model by `VARIANTS`, and the logits of `peft` after loading them."""
    for seed, (name, options) in enumerate(VARIANTS.items()):
        torch.manual_seed(seed)
        config = peft.LoraConfig(task_type="CAUSAL_LM", **{**BASE, **options})
        model = peft.get_peft_model(load_base_model(models, "llama"), config)
        with torch.no_grad():
            for factor in (x for x in model.parameters() if x.requires_grad):
                factor.add_(torch.randn_like(factor) * 0.1)
        model.save_pretrained(folder / name)
        loaded = peft.PeftModel.from_pretrained(load_base_model(models, "llama"), folder / name)
        ids = torch.randint(0, 61, (2, 9))
        np.savez(folder / f"{name}.npz", ids=ids.numpy(), logits=compute_logits(loaded, ids))
    fields = {x.name for x in dataclasses.fields(peft.LoraConfig)}
    (folder / "fields.json").write_text(json.dumps([sorted(fields), peft.LoraConfig().to_dict()]))


def check(models, reference_folder, folder):
    for name in (path.name for path in folder.iterdir()):
        model = peft.PeftModel.from_pretrained(load_base_model(models, name), folder / name)
        expected = np.load(reference_folder / f"{name}.npz")
        logits = compute_logits(model, torch.tensor(expected["ids"]))
        np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-5)


if __name__ == "__main__":
    {"make": make, "check": check}[sys.argv[1]](*map(pathlib.Path, sys.argv[2:]))
