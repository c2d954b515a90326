"""Train a small decoder on the logits of a larger one, with dropout in neither of them."""

import keras
import numpy as np

import dtransformer
from dtransformer.layers import DistillationLoss
from dtransformer.models import CausalLM
from dtransformer.parallel.runtime import job
from dtransformer.trainers import Trainer

STEPS, ROWS, LENGTH, VOCAB_SIZE = 20, 8, 12, 61
SIZES = {"num_heads": 2, "num_layers": 2, "tied_head": False}


def _train(divergence):
    """Return the losses of all steps, and the gradients of the teacher that stages send."""
    dtransformer.set_seed(3)
    student = CausalLM(VOCAB_SIZE, hidden_size=16, dropout_rate=0.0, **SIZES)
    teacher = CausalLM(VOCAB_SIZE, hidden_size=32, dropout_rate=0.5, **SIZES)
    trainer = Trainer(student)
    loss = DistillationLoss(1.5, 0.3, divergence, ignore_id=-100)
    trainer.compile(keras.optimizers.SGD(0.5, momentum=0.9), loss, teacher=teacher)
    ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, (ROWS, LENGTH + 1), "int32")
    labels = np.where(np.arange(LENGTH) < 5 + np.arange(ROWS)[:, None], ids[:, 1:], -100)
    batch = ids[:, :-1], labels.astype("int32")
    logs = [trainer.train_on_batch(*batch, return_dict=True) for _ in range(STEPS)]
    logs.append(trainer.evaluate(*batch, batch_size=ROWS, verbose=0, return_dict=True))
    names = ("loss", "hard_loss", "kl_loss")
    results = {"losses": [[float(log[name]) for name in names] for log in logs]}
    if job.stage()[1] > 1:
        dataflow = trainer._program.engine._last_dataflow
        for key, tensors in (
            ("sent", dataflow.sent_after(0)),
            ("back", dataflow.gradients_after(0)),
        ):
            results[key] = sum(tensor.name.startswith("teacher/") for tensor in tensors)
    return results


TASKS = {kind: lambda kind=kind: _train(kind) for kind in ("forward_kl", "reverse_kl")}
