"""Test training, evaluation, weights files, generation and a second `init` on a GPU."""

import os
import pathlib
import subprocess
import sys
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf

import dtransformer
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import CausalLM
from dtransformer.trainers import Trainer

_GENERATE = """
import sys, numpy as np, dtransformer
from benchmarks.gpu_parts.uses import made
trainer, ids = made()
trainer.load_weights(sys.argv[1])
np.save(sys.argv[2], trainer.network.generate(ids[:2, :8], max_new_tokens=16))
"""


def made():
    """Return the trainer of a small language model and a batch of ids."""
    network = CausalLM(
        300, hidden_size=64, num_heads=4, num_layers=2, ffn_hidden_size=128, dropout_rate=0.0
    )
    network.build()
    trainer = Trainer(network)
    trainer.compile(keras.optimizers.AdamW(1e-3), CrossEntropyLoss())
    return trainer, np.random.default_rng(0).integers(3, 300, [8, 32]).astype("int32")


def use(**_):
    """Yield the result of each use."""
    dtransformer.init(dtransformer.TransformerOpParallelConfig())
    trainer, ids = made()
    data = tf.data.Dataset.from_tensors((ids, ids)).repeat()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        start_time = time.perf_counter()
        history = trainer.fit(data, steps_per_epoch=20, epochs=2, verbose=0).history
        yield {"fit": time.perf_counter() - start_time, "loss": history["loss"]}
        evaluated = trainer.evaluate(data, steps=2, verbose=0, return_dict=True)
        yield {"evaluate": {name: float(value) for name, value in evaluated.items()}}
        trainer.save_weights(folder / "trained.weights.h5")
        generated = trainer.network.generate(ids[:2, :8], max_new_tokens=16).numpy()
        start_time = time.perf_counter()
        trainer.network.generate(ids[:2, :8], max_new_tokens=16)
        yield {"generate": time.perf_counter() - start_time}
        command = [
            sys.executable,
            "-c",
            _GENERATE,
            folder / "trained.weights.h5",
            folder / "ids.npy",
        ]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
        completed = subprocess.run(command, env=environment, capture_output=True, text=True)
        same = not completed.returncode and np.array_equal(np.load(folder / "ids.npy"), generated)
        yield {
            "cpu_reads_and_generates_the_same": bool(same),
            "said": completed.stderr[-200:] * (not same),
        }
        beams = trainer.network.generate(ids[:2, :8], max_new_tokens=8, beam_size=3)
        yield {"beam_search": beams.numpy().shape}
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    dtransformer.init(dtransformer.TransformerOpParallelConfig(recompute=True))
    trainer, ids = made()
    loss = trainer.train_on_batch(ids, ids)
    yield {
        "second_init": float(np.ravel(loss)[0]),
        "visible": [gpu.name for gpu in tf.config.get_visible_devices("GPU")],
        "threads": [threads, tf.config.threading.get_intra_op_parallelism_threads()],
    }
