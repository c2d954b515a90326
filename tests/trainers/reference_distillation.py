"""Program that computes distillation losses of stored logits with PyTorch, or with `trl`.

    python -m tests.trainers.reference_distillation FOLDER (torch|trl)

It reads FOLDER/logits.npz and writes the losses and the gradients of the student's logits.
"""

import pathlib
import sys

import numpy as np
import torch
import torch.nn.functional as F

KINDS = ("forward_kl", "reverse_kl")
TEMPERATURES = (1.0, 2.5)
HARD_LOSS_WEIGHT = 0.3


def torch_divergence(student, teacher, labels, kind, temperature):
    """Return the mean divergence over all labels, from `torch.nn.functional.kl_div`."""
    log_p = F.log_softmax(teacher / temperature, -1)
    log_q = F.log_softmax(student / temperature, -1)
    pair = (log_q, log_p) if kind == "forward_kl" else (log_p, log_q)
    terms = F.kl_div(*pair, reduction="none", log_target=True)
    return terms.sum(-1)[labels >= 0].mean()


def trl_divergence(student, teacher, labels, kind, temperature):
    """Return the divergence of `GKDTrainer`."""
    from trl.experimental.gkd import GKDTrainer

    beta = KINDS.index(kind)
    return GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta, temperature)


def main(folder, library):
    arrays = np.load(folder / "logits.npz")
    teacher, labels = torch.tensor(arrays["teacher"]), torch.tensor(arrays["labels"])
    divergence = {"torch": torch_divergence, "trl": trl_divergence}[library]
    results = {}
    for kind in KINDS:
        for temperature in TEMPERATURES:
            student = torch.tensor(arrays["student"], requires_grad=True)
            hard = F.cross_entropy(student.flatten(0, 1), labels.flatten(), ignore_index=-100)
            kl = divergence(student, teacher, labels, kind, temperature)
            soft_weight = (1 - HARD_LOSS_WEIGHT) * temperature**2
            loss = HARD_LOSS_WEIGHT * hard + soft_weight * kl
            (gradient,) = torch.autograd.grad(loss, student)
            values = {"hard": hard, "kl": kl, "loss": loss, "gradient": gradient}
            results |= {f"{kind}/{temperature}/{name}": x for name, x in values.items()}
    np.savez(folder / f"{library}.npz", **{name: x.detach() for name, x in results.items()})


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2])
