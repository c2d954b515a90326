"""Train, save and load adapters of a small Llama, also from the files of other layouts."""

import pathlib

import numpy as np
import tensorflow as tf
from safetensors.numpy import load_file

import dtransformer
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import load_lora, merge_lora, save_lora, save_pretrained
from dtransformer.trainers import Trainer
from harness.batches import EVEN, batches, replica_share
from harness.layouts import ALONE
from harness.networks import make
from harness.training import Record

SEED, OTHER_SEED, STEPS = 7, 99, 3


def checkpoint_path(folder, layout):
    return pathlib.Path(folder) / f"adapters-{layout.name}.checkpoint"


def adapters_path(folder, layout):
    return pathlib.Path(folder) / f"adapters-{layout.name}"


def new_trainer(network="llama_lora", seed=SEED):
    dtransformer.set_seed(seed)
    model, optimizer = make(network)
    model.build()
    optimizer.learning_rate = 0.02  # Few steps change the generated tokens.
    trainer = Trainer(model)
    trainer.compile(optimizer, CrossEntropyLoss(0.1, ignore_id=0))
    return trainer


def losses(trainer, start=0):
    """Train `STEPS` steps on batches of one shape and return their losses."""
    all_batches = batches(start + STEPS, trainer.network.vocab_size, 0, (EVEN,))[start:]
    data = replica_share(all_batches, EVEN[0]).map(lambda x, y: (x["target"], y))
    data = data.apply(tf.data.experimental.assert_cardinality(STEPS))
    record = Record()
    trainer.fit(data, callbacks=[record], verbose=0, shard=False)
    return record["step_loss"]


def predict_logits(trainer):
    inputs, _ = batches(1, trainer.network.vocab_size, seed=2)[0]
    return trainer.predict(inputs["target"], verbose=0)[..., :61]


def generate(network):
    return network.generate([[5, 9, 33], [7], [40, 41, 42, 43]], max_new_tokens=6).numpy()


def train_and_use(folder, layout):
    alone = layout == ALONE
    trainer = new_trainer()
    network = trainer.network
    results = {"losses": losses(trainer), "logits": predict_logits(trainer)}
    results["generated"] = generate(network)
    trainer.save(checkpoint_path(folder, layout))
    save_lora(network, adapters_path(folder, layout))
    results["after"] = losses(trainer, STEPS)
    for name, saved in {"resumed": layout, "restored": ALONE}.items():
        if name == "resumed" or not alone:
            restored_trainer = new_trainer(seed=OTHER_SEED)  # Frozen weights must be restored.
            restored_trainer.restore(checkpoint_path(folder, saved))
            results[name] = losses(restored_trainer, STEPS)
    loaded = new_trainer("llama")
    load_lora(loaded.network, adapters_path(folder, ALONE))
    results["generated_loaded"] = generate(loaded.network)
    merge_lora(loaded.network)
    results["generated_merged"] = generate(loaded.network)
    results["logits_merged"] = predict_logits(Trainer(loaded.network))
    results["paths_merged"] = sorted(weight.path for weight in loaded.network.variables)
    published = pathlib.Path(folder) / f"published-{layout.name}"
    tensors = load_file(save_pretrained(loaded.network, published, "mistral") / "model.safetensors")
    results["published"] = np.concatenate([tensors[name].ravel() for name in sorted(tensors)])
    results["sizes"] = np.array([weight.numpy().size for weight in network.trainable_variables])
    return results


TASKS = {"train_and_use": train_and_use}
