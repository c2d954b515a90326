"""Program that computes preference, reward and classification losses with PyTorch, as a reference.

    python -m tests.runs.reference_tasks FOLDER

It saves a small Llama of `transformers` with adapters of `peft`, a BERT, and their losses, gradients and
logits in float32. Preference losses follow the papers. `reference_trl` computes them with `trl`.
"""

import pathlib
import sys

import numpy as np
import peft
import torch
import torch.nn.functional as F
import transformers

VOCAB_SIZE, ROWS, LENGTH, BETA, SMOOTHING = 61, 3, 12, 0.3, 0.1
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def pairs():
    """Return ids, labels and lengths of chosen and rejected sequences, [rows, 2, length]."""
    ids = torch.randint(4, VOCAB_SIZE, (ROWS, 2, LENGTH))
    lengths = torch.tensor([[12, 9], [7, 12], [10, 10]])
    prompts = torch.tensor([[3], [2], [5]])
    places = torch.arange(LENGTH)
    ids[:, 1] = torch.where(places < prompts, ids[:, 0], ids[:, 1])
    labels = torch.where((places >= prompts[..., None]) & (places < lengths[..., None]), ids, -100)
    ids = torch.where(places < lengths[..., None], ids, 0)
    return ids, labels, lengths


def log_probabilities(model, ids, labels, mean):
    """Return the sums or means of the labels' log probabilities in each sequence, [rows, 2]."""
    mask = (torch.arange(LENGTH) < (ids != 0).sum(-1, keepdim=True)).long()
    logits = model(ids.flatten(0, 1), attention_mask=mask.flatten(0, 1)).logits[:, :-1]
    next_labels = labels.flatten(0, 1)[:, 1:]
    result = torch.gather(logits.log_softmax(-1), 2, next_labels.clamp(min=0)[..., None])[..., 0]
    total = (result * (next_labels >= 0)).sum(-1)
    return (total / (next_labels >= 0).sum(-1) if mean else total).view(-1, 2)


KINDS = [
    ("sigmoid", 0.0),
    ("sigmoid", SMOOTHING),
    ("sigmoid_norm", 0.0),
    ("ipo", 0.0),
    ("hinge", 0.0),
    ("simpo", SMOOTHING),
    ("orpo", 0.0),
    ("kto", 0.0),
]
KTO_LABELS = (1.0, -1.0, 1.0)
KTO_WEIGHTS = (1.5, 0.5)  # Weights of desirable and undesirable answers.
MEANS = ("sigmoid_norm", "ipo", "simpo", "orpo")
GAMMA = 0.5


def preference(model, ids, labels, kind, smoothing):
    """Return the mean loss with the adapters off as the reference."""
    policy = log_probabilities(model, ids, labels, kind in MEANS)
    with torch.no_grad(), model.disable_adapter():
        reference = log_probabilities(model, ids, labels, kind in MEANS)
    if kind == "orpo":
        log_odds = policy - torch.log1p(-torch.exp(policy))
        ratio = F.logsigmoid(log_odds[:, 0] - log_odds[:, 1])
        return (-policy[:, 0] - BETA * ratio).mean(), reference
    if kind == "simpo":
        reference = torch.zeros_like(reference)
    h = (policy[:, 0] - policy[:, 1]) - (reference[:, 0] - reference[:, 1])
    if kind == "ipo":
        return ((h - 1 / (2 * BETA)) ** 2).mean(), reference
    if kind == "hinge":
        return torch.relu(1 - BETA * h).mean(), reference
    logit = BETA * h - (GAMMA if kind == "simpo" else 0)
    loss = -(1 - smoothing) * F.logsigmoid(logit) - smoothing * F.logsigmoid(-logit)
    return loss.mean(), reference


def kto(model, ids, labels):
    """Return the KTO loss of the first sequences, with the second ones as unrelated answers."""
    policy = log_probabilities(model, ids, labels, False)
    with torch.no_grad(), model.disable_adapter():
        reference = log_probabilities(model, ids, labels, False)
    gains = policy - reference
    divergence = gains[:, 1].mean().clamp(min=0).detach()
    sign = torch.tensor(KTO_LABELS)
    weights = torch.where(sign > 0, *KTO_WEIGHTS)
    return (
        weights * (1 - torch.sigmoid(BETA * sign * (gains[:, 0] - divergence)))
    ).mean(), reference


def first_gradients(model):
    """Return the gradients of the two factors of the first block's queries, by their letter."""
    return {
        name.split(".")[-3][-1]: weight.grad.clone()
        for name, weight in model.named_parameters()
        if "lora_" in name and "layers.0" in name and "q_proj" in name
    }


def main(folder):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, pad_token_id=0)
    base = transformers.LlamaForCausalLM(config).eval()
    base.save_pretrained(folder / "llama")
    result = {}

    rewarding = transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(**SIZES, num_key_value_heads=2, pad_token_id=0, num_labels=1)
    ).eval()
    rewarding.model.load_state_dict(base.model.state_dict())
    ids, labels, lengths = pairs()
    mask = (torch.arange(LENGTH) < lengths[..., None]).long()
    rewards = rewarding(ids.flatten(0, 1), attention_mask=mask.flatten(0, 1)).logits.view(-1, 2)
    margin = torch.tensor([0.0, 0.5, 1.0])
    result |= {
        "reward/rewards": rewards,
        "reward/score": rewarding.score.weight,
        "margin": margin,
    }
    for factor in (None, 0.01):
        loss = -F.logsigmoid(rewards[:, 0] - rewards[:, 1] - margin).mean()
        loss += (factor or 0) * (rewards.sum(1) ** 2).mean()
        (gradient,) = torch.autograd.grad(loss, rewarding.score.weight, retain_graph=True)
        result |= {f"reward/{factor}/loss": loss, f"reward/{factor}/gradient": gradient}

    model = peft.get_peft_model(
        base, peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"])
    ).eval()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder / "adapters")
    result |= {"ids": ids, "labels": labels, "lengths": lengths}
    for kind, smoothing in KINDS:
        model.zero_grad()
        if kind == "kto":
            loss, reference = kto(model, ids, labels)
        else:
            loss, reference = preference(model, ids, labels, kind, smoothing)
        loss.backward()
        key = f"{kind}/{smoothing}"
        result |= {f"{key}/loss": loss, f"{key}/reference": reference}
        result |= {f"{key}/{name}": x for name, x in first_gradients(model).items()}

    config = transformers.BertConfig(**SIZES, num_labels=4, pad_token_id=0)
    transformers.BertForPreTraining(config).save_pretrained(folder / "bert")
    full = transformers.BertForPreTraining.from_pretrained(folder / "bert").eval()
    bert = transformers.BertForSequenceClassification(config).eval()
    bert.bert.load_state_dict(full.bert.state_dict())
    torch.nn.init.normal_(bert.classifier.weight)
    row, mask = ids[:, 0], mask[:, 0]
    labels = torch.tensor([3, 0, 2])
    out = bert(row, attention_mask=mask, labels=labels)
    out.loss.backward()
    result |= {
        "bert/ids": row,
        "bert/mask": mask,
        "bert/labels": labels,
        "bert/logits": out.logits,
        "bert/loss": out.loss,
        "bert/kernel": bert.classifier.weight,
        "bert/bias": bert.classifier.bias,
        "bert/gradient": bert.bert.pooler.dense.weight.grad,
    }
    np.savez(folder / "found.npz", **{k: x.detach().numpy() for k, x in result.items()})


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
