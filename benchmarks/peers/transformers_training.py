"""Contestant: a published model of `transformers` on PyTorch, with adapters of `peft`.

    python transformers_training.py WORKLOAD eager|compiled

The arguments `make FOLDER WORKLOAD...` write the initial weights and adapters of workloads.
"""

import os
import sys

import torch
import transformers
from published import EPSILON, FOLDER, IGNORED, LEARNING_RATE, PUBLISHED, WEIGHT_DECAY
from workloads import serve, time_each_step

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def make(workload):
    """Write the random weights of a workload, and adapters with nonzero second factors."""
    from published import END, PAD, START

    torch.manual_seed(0)
    model_class = getattr(transformers, workload.model_class)
    ids = {"pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END}
    config = model_class.config_class(vocab_size=workload.vocab_size, **ids, **workload.sizes)
    model_class(config).save_pretrained(workload.folder)
    if workload.rank:
        import peft

        lora_config = peft.LoraConfig(
            r=workload.rank,
            lora_alpha=2 * workload.rank,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        model = peft.get_peft_model(model_class.from_pretrained(workload.folder), lora_config)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.02)
        model.save_pretrained(workload.adapters)


def make_run(workload, mode):
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model_class = getattr(transformers, workload.model_class)
    model = model_class.from_pretrained(
        workload.folder, attn_implementation="sdpa", dtype=torch.float32
    )
    if workload.rank:
        import peft

        model = peft.PeftModel.from_pretrained(model, workload.adapters, is_trainable=True)
    model.train()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, LEARNING_RATE, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True
    )
    batch = {name: torch.from_numpy(ids) for name, ids in workload.batch().items()}
    labels = batch.pop("labels").flatten()
    if workload.kind == "seq2seq":
        batch = {"input_ids": batch["source"], "decoder_input_ids": batch["target"]}
    else:
        batch = {"input_ids": batch["tokens"]}
    if workload.kind != "masked":
        batch["use_cache"] = False
    forward = torch.compile(model) if mode == "compiled" else model
    losses = []

    def step():
        optimizer.zero_grad(set_to_none=True)
        logits = forward(**batch).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORED)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        return losses

    return time_each_step(step)


if __name__ == "__main__":
    if sys.argv[1] == "make":
        os.environ[FOLDER] = sys.argv[2]
        for name in sys.argv[3:]:
            make(PUBLISHED[name])
    else:
        serve(make_run, num_first=3)
