"""Program that computes the losses of `reference_tasks` with `trl`, as a second reference.

    python -m tests.runs.reference_trl FOLDER

It reads the files of `reference_tasks`, and saves losses and gradients in float32 with the same names.
"""

import pathlib
import sys
import types

import datasets
import numpy as np
import peft
import tokenizers
import torch
import transformers
import trl
import trl.experimental.cpo
import trl.experimental.orpo

from tests.runs.reference_tasks import (
    BETA,
    GAMMA,
    KINDS,
    KTO_LABELS,
    KTO_WEIGHTS,
    VOCAB_SIZE,
    first_gradients,
    log_probabilities,
)


def tokenizer():
    """Return a tokenizer with words that are equal to their ids."""
    words = tokenizers.models.WordLevel({str(i): i for i in range(VOCAB_SIZE)}, unk_token="3")
    fast = tokenizers.Tokenizer(words)
    fast.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "0", "bos_token": "1", "eos_token": "2", "unk_token": "3"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=fast, **special)


def options(folder):
    """Return the arguments of both trainers: no saving, no reports, one batch of all pairs."""
    return {
        "output_dir": str(folder / "trl"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "per_device_train_batch_size": 3,
    }


def preference(folder, kind, examples):
    """Return loss and gradients of a preference loss. The reference is the network without adapters."""
    trainer = trl.DPOTrainer(
        transformers.LlamaForCausalLM.from_pretrained(folder / "llama"),
        args=trl.DPOConfig(beta=BETA, loss_type=[kind], **options(folder)),
        train_dataset=datasets.Dataset.from_list([{"prompt": "5", "chosen": "6", "rejected": "7"}]),
        processing_class=tokenizer(),
        peft_config=peft.LoraConfig.from_pretrained(folder / "adapters"),
    )
    peft.set_peft_model_state_dict(
        trainer.model, peft.utils.load_peft_weights(folder / "adapters", device="cpu")
    )
    for name, weight in trainer.model.named_parameters():
        weight.requires_grad_("lora_" in name)
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(examples))
    loss.backward()
    return {"loss": loss} | first_gradients(trainer.model)


def adapted_llama(folder):
    """Return the Llama with trainable adapters; its other weights are frozen."""
    base = transformers.LlamaForCausalLM.from_pretrained(folder / "llama").eval()
    return peft.PeftModel.from_pretrained(base, folder / "adapters", is_trainable=True).eval()


def reference_free(folder, kind, smoothing, result):
    """Return loss and gradients of a loss without a reference, from `trl`'s function for it."""
    model = adapted_llama(folder)
    ids, labels = (torch.tensor(result[name]) for name in ("ids", "labels"))
    chosen, rejected = log_probabilities(model, ids, labels, mean=True).unbind(1)
    trainer = types.SimpleNamespace(
        beta=BETA,
        simpo_gamma=GAMMA,
        alpha=0.0,
        label_smoothing=smoothing,
        loss_type=kind,
        accelerator=types.SimpleNamespace(device="cpu"),
    )
    if kind == "orpo":
        ratio = trl.experimental.orpo.ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)[0]
        loss = (-chosen - ratio).mean()
    else:
        loss = trl.experimental.cpo.CPOTrainer.cpo_loss(trainer, chosen, rejected)[0].mean()
    loss.backward()
    return {"loss": loss} | first_gradients(model)


def kto(folder, pairs):
    """Return loss and gradients of KTO: the rejected answers are the unrelated ones."""
    examples = [
        {
            "prompt_ids": pair["prompt_ids"],
            "completion_ids": pair["chosen_ids"],
            "KL_completion_ids": pair["rejected_ids"],
            "label": label > 0,
        }
        for pair, label in zip(pairs, KTO_LABELS, strict=True)
    ]
    desirable, undesirable = KTO_WEIGHTS
    rows = [{"prompt": "5", "completion": "6", "label": True}] * 2
    trainer = trl.KTOTrainer(
        transformers.LlamaForCausalLM.from_pretrained(folder / "llama"),
        args=trl.KTOConfig(
            beta=BETA,
            desirable_weight=desirable,
            undesirable_weight=undesirable,
            **options(folder),
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
        peft_config=peft.LoraConfig.from_pretrained(folder / "adapters"),
    )
    peft.set_peft_model_state_dict(
        trainer.model, peft.utils.load_peft_weights(folder / "adapters", device="cpu")
    )
    for name, weight in trainer.model.named_parameters():
        weight.requires_grad_("lora_" in name)
    loss = trainer.compute_loss(trainer.model.eval(), trainer.data_collator(examples))
    loss.backward()
    return {"loss": loss} | first_gradients(trainer.model)


def rewards(folder, result, examples, factor):
    """Return loss and gradients of a network that rates sequences, with margins.

    Args:
        factor: `center_rewards_coefficient`, which draws the mean reward to 0, or `None`.
    """
    config = transformers.LlamaConfig.from_pretrained(folder / "llama", num_labels=1)
    model = transformers.LlamaForSequenceClassification(config)
    base = transformers.LlamaForCausalLM.from_pretrained(folder / "llama")
    model.model.load_state_dict(base.model.state_dict())
    model.score.weight.data = torch.tensor(result["reward/score"])
    trainer = trl.RewardTrainer(
        model,
        args=trl.RewardConfig(center_rewards_coefficient=factor, **options(folder)),
        train_dataset=datasets.Dataset.from_list([{"chosen": "5 6", "rejected": "5 7"}]),
        processing_class=tokenizer(),
    )
    loss = trainer.compute_loss(trainer.model.eval(), trainer.data_collator(examples))
    loss.backward()
    return {"loss": loss, "gradient": trainer.model.score.weight.grad}


def main(folder):
    result = np.load(folder / "found.npz")
    pairs, full = [], []
    for ids, labels, lengths, margin in zip(
        result["ids"], result["labels"], result["lengths"], result["margin"], strict=True
    ):
        start = int(np.argmax(labels[0] >= 0))
        chosen, rejected = (ids[i, : lengths[i]].tolist() for i in range(2))
        pairs.append({"prompt_ids": chosen[:start], "chosen_ids": chosen[start:]})
        pairs[-1]["rejected_ids"] = rejected[start:]
        full.append({"chosen_ids": chosen, "rejected_ids": rejected, "margin": float(margin)})
    trl_values = {}
    for factor in (None, 0.01):
        results = rewards(folder, result, full, factor)
        trl_values |= {f"reward/{factor}/{name}": x for name, x in results.items()}
    for kind, smoothing in KINDS:
        if kind in ("simpo", "orpo"):
            values = reference_free(folder, kind, smoothing, result)
        elif kind == "kto":
            values = kto(folder, pairs)
        elif smoothing:
            continue  # `trl` has another formula for noisy labels.
        else:
            values = preference(folder, kind, pairs)
        trl_values |= {f"{kind}/{smoothing}/{name}": x for name, x in values.items()}
    np.savez(folder / "trl.npz", **{k: x.detach().numpy() for k, x in trl_values.items()})


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
