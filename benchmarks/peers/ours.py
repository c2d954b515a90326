"""Contestant: dtransformer's models, trained by `Trainer.fit`, with XLA if the mode is `xla`."""

import dtransformer  # noqa: F401  # isort: skip  (before TensorFlow, so that oneDNN is on)

import keras
import tensorflow as tf
from fitted import fitted
from workloads import serve

from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import CausalLM, TranslationTransformer
from dtransformer.trainers import Trainer


def compiled_trainer(workload, jit_compile="auto", **loss_options):
    """Return a compiled trainer for the network of the workload."""
    sizes = {
        "hidden_size": workload.hidden_size,
        "ffn_hidden_size": workload.ffn_hidden_size,
        "num_heads": workload.num_heads,
        "positions": "learned",
        "hidden_act": "relu",
    }
    if workload.encoder_layers:
        network = TranslationTransformer(
            workload.vocab_size,
            encoder_layers=workload.encoder_layers,
            decoder_layers=workload.decoder_layers,
            max_source_length=workload.length,
            max_target_length=workload.length,
            **sizes,
        )
    else:
        sizes["max_length"] = workload.length
        network = CausalLM(workload.vocab_size, num_layers=workload.decoder_layers, **sizes)
    trainer = Trainer(network)
    loss = CrossEntropyLoss(**loss_options)
    trainer.compile(keras.optimizers.AdamW(1e-4), loss, jit_compile=jit_compile)
    return trainer


def make_run(workload, mode=None):
    source, target, labels = (
        None if ids is None else tf.constant(ids, "int32") for ids in workload.batch()
    )
    inputs = target if source is None else {"source": source, "target": target}
    return fitted(compiled_trainer(workload, mode == "xla" or "auto"), inputs, labels)


if __name__ == "__main__":
    serve(make_run)
