"""Measure tokens per second, fraction of the peak and memory of models with 355M and 1.3B parameters."""

import pathlib
import subprocess
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf

import dtransformer
from benchmarks.gpu_parts import alone
from benchmarks.gpu_parts.kernels import read_kernels
from benchmarks.peers.fitted import fitted
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import CausalLM
from dtransformer.trainers import Trainer

VOCAB_SIZE = 50304
# Name -> (blocks, hidden size, heads, length, rows).
SIZES = {
    "355m": (24, 1024, 16, 1024, 8),
    "1.3b": (24, 2048, 16, 1024, 8),
    "tiny": (2, 64, 4, 64, 2),
}
_PEAK = 989e12  # Dense 16-bit operations per second of an H100.
_STEPS = 6


def flops(size):
    """Return the operations of a step's products, including the scores of future tokens."""
    blocks, hidden, _, length, rows = SIZES[size]
    tokens = rows * length
    forward = blocks * (24 * tokens * hidden**2 + 4 * tokens * length * hidden)
    return 3 * (forward + 2 * tokens * hidden * VOCAB_SIZE)


def make_trainer(size, compiled, attention, rows=None, recompute=False):
    """Return a trainer and a batch of ids."""
    dtransformer.init(dtransformer.TransformerOpParallelConfig(recompute=recompute))
    keras.config.set_dtype_policy("mixed_bfloat16")
    blocks, hidden, heads, length, default_rows = SIZES[size]
    network = CausalLM(
        VOCAB_SIZE,
        hidden_size=hidden,
        num_heads=heads,
        num_layers=blocks,
        ffn_hidden_size=4 * hidden,
        max_length=length,
        dropout_rate=0.0,
        pad_id=None,
        implementation=attention,
    )
    trainer = Trainer(network)
    trainer.compile(
        keras.optimizers.AdamW(1e-4),
        CrossEntropyLoss(),
        jit_compile={"none": False, "clusters": "auto", "whole": True}[compiled],
    )
    shape = (rows or default_rows, length)
    return trainer, tf.constant(np.random.default_rng(0).integers(0, VOCAB_SIZE, shape), "int32")


def ours(smoke, variant, **_):
    """Yield seconds of the first step and later steps, speed, fraction of the peak, and memory."""
    size, compiled, attention = variant.split("/")
    size = "tiny" if smoke else size
    start_time = time.perf_counter()
    trainer, ids = make_trainer(size, compiled, attention)
    run = fitted(trainer, ids, ids)
    first = run(1)[0]
    yield {"start": time.perf_counter() - start_time, "first_step": first}
    with alone():
        for _ in range(3):
            yield _rates(size, run(_STEPS)[1:])
    yield {"peak_GiB": peak_memory(), "loss": float(trainer.train_on_batch(ids, ids)[0])}
    rows = trainer.memory_report().rows
    yield {"planned": {row.what: row.planned for row in rows}}


def _rates(size, seconds):
    _, _, _, length, rows = SIZES[size]
    step = float(np.median(seconds))
    return {
        "step_seconds": [round(s, 5) for s in seconds],
        "tokens_per_second": rows * length / step,
        "share_of_989": flops(size) / step / _PEAK,
    }


def peak_memory():
    """Return the peak memory of TensorFlow on the first GPU in GiB, or `None` without a GPU."""
    if not tf.config.list_physical_devices("GPU"):
        return None
    return tf.config.experimental.get_memory_info("GPU:0")["peak"] / 2**30


def pytorch(smoke, variant, torch, **_):
    """Yield speed and memory of the same network in PyTorch. `torch` is a Python with PyTorch."""
    if torch is None:
        yield {"left_out": "no --torch"}
        return
    size, mode = variant.split("/")
    size = "tiny" if smoke else size
    script = pathlib.Path(__file__).parents[1] / "peers/pytorch_language_model.py"
    arguments = [mode, *map(str, SIZES[size]), str(VOCAB_SIZE), str(_STEPS)]
    completed = subprocess.run([torch, str(script), *arguments], capture_output=True, text=True)
    if completed.returncode:
        yield {"failed": completed.stderr[-400:]}
        return
    first, *rounds, peak = map(float, completed.stdout.split()[-5:])
    yield {"first_step": first, "peak_GiB": peak}
    for seconds in rounds:
        yield _rates(size, [seconds])


def profile(smoke, variant, **_):
    """Yield the idle time and the slowest kernels of three steps."""
    size, compiled, attention = variant.split("/")
    trainer, ids = make_trainer("tiny" if smoke else size, compiled, attention)
    run = fitted(trainer, ids, ids)
    run(1)
    run(3)
    with tempfile.TemporaryDirectory() as folder, alone():
        tf.profiler.experimental.start(folder)
        run(3)
        tf.profiler.experimental.stop()
        yield from read_kernels(next(pathlib.Path(folder).rglob("*.xplane.pb"), None))


def largest(smoke, **_):
    """Yield memory with and without recompute. Double the rows until memory runs out."""
    size = "tiny" if smoke else "355m"
    for recompute in (False, True):
        for rows in (8, 16) if smoke else (16, 32, 64):
            keras.backend.clear_session()
            if peak_memory():  # Ignore the peak of the previous run.
                tf.config.experimental.reset_memory_stats("GPU:0")
            try:
                trainer, ids = make_trainer(size, "clusters", "cudnn", rows, recompute)
                run = fitted(trainer, ids, ids)
                run(1)
                with alone():
                    step = float(np.median(run(3)))
            except tf.errors.ResourceExhaustedError as error:
                yield {"rows": rows, "recompute": recompute, "out_of_memory": str(error)[:200]}
                break
            yield {"rows": rows, "recompute": recompute, "step": step, "peak_GiB": peak_memory()}
