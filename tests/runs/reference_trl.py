"""Program that computes the losses of `reference_tasks` with `trl`, as a second reference.

    python -m tests.runs.reference_trl FOLDER

It reads the files of `reference_tasks`, and saves losses and gradients in float32 with the same names.
"""

import pathlib
import sys

import datasets
import numpy as np
import peft
import tokenizers
import torch
import transformers
import trl

from tests.runs.reference_tasks import BETA, VOCAB_SIZE, first_gradients


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
    of_trl = {}
    for factor in (None, 0.01):
        results = rewards(folder, result, full, factor)
        of_trl |= {f"reward/{factor}/{name}": x for name, x in results.items()}
    for kind in ("sigmoid", "ipo", "hinge"):
        of_trl |= {f"{kind}/0.0/{x}": y for x, y in preference(folder, kind, pairs).items()}
    np.savez(folder / "of_trl.npz", **{k: x.detach().numpy() for k, x in of_trl.items()})


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
