"""Contestant: dtransformer's `from_pretrained`, `load_lora` and `fit`."""

import dtransformer  # noqa: F401  # isort: skip  (before TensorFlow, so that oneDNN is on)

import keras
import tensorflow as tf
from fitted import fitted
from published import EPSILON, IGNORED, LEARNING_RATE, WEIGHT_DECAY
from workloads import serve

from dtransformer import Trainer
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import from_pretrained, load_lora


def make_run(workload):
    network = from_pretrained(workload.folder)
    if workload.rank:
        load_lora(network, workload.adapters)
    trainer = Trainer(network)
    optimizer = keras.optimizers.AdamW(LEARNING_RATE, weight_decay=WEIGHT_DECAY, epsilon=EPSILON)
    trainer.compile(optimizer, CrossEntropyLoss(ignore_id=IGNORED))
    batch = {name: tf.constant(ids, "int32") for name, ids in workload.batch().items()}
    labels = batch.pop("labels")
    return fitted(trainer, batch if len(batch) > 1 else batch["tokens"], labels)


if __name__ == "__main__":
    serve(make_run, num_first=3)
