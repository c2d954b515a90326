"""`dtransformer doctor --warm`: compile GPU kernels into CUDA's cache before the first training.

TensorFlow's wheel has no machine code for GPUs of compute capability 9.0 and later. Their driver
compiles each kernel on its first use, and caches it for all processes of the host. A single process
fills the cache here, so that the ranks of a training run do not all wait or compile the same kernels.
"""

import os
import pathlib
import time

import numpy as np

import dtransformer
from dtransformer.cli.checks import check
from dtransformer.models import CausalLM
from dtransformer.parallel.runtime.devices import device_type
from dtransformer.trainers import Trainer

_POLICIES = "float32", "mixed_bfloat16", "mixed_float16"
_SIZES = {
    "hidden_size": 64,
    "num_heads": 2,
    "num_layers": 1,
}  # The compiled kernels do not depend on sizes.
_VOCAB_SIZE = 64
_ROWS = 4
_LENGTH = 64
_DEFAULT_CACHE = "~/.nv/ComputeCache"  # CUDA's default without CUDA_CACHE_PATH


def warm() -> list[dict]:
    """Train a small network and generate text with each dtype policy, to compile their kernels.

    Returns:
        A list of checks, see `checks.check`.
    """
    if device_type() == "CPU":
        why = "TensorFlow finds no GPU whose driver could compile kernels"
        return [check("kernels", False, why, "run dtransformer doctor to see the cause")]
    folder = pathlib.Path(os.environ.get("CUDA_CACHE_PATH") or os.path.expanduser(_DEFAULT_CACHE))
    before = _megabytes(folder)
    dtransformer.init(dtransformer.TransformerOpParallelConfig())
    checks = [_warm_policy(policy) for policy in _POLICIES]
    state = f"{folder} has {_megabytes(folder):.0f} MB, {before:.0f} before"
    return [*checks, check("CUDA's cache", True, state)]


def _warm_policy(policy):
    """Train with TensorFlow's and with XLA's kernels, generate text, and return the check."""
    start = time.monotonic()
    ids = np.random.default_rng(0).integers(1, _VOCAB_SIZE, (_ROWS, _LENGTH))
    for jit_compile in (False, "auto"):
        network = CausalLM(_VOCAB_SIZE, **_SIZES, dtype=policy)
        trainer = Trainer(network)
        trainer.compile("adamw", jit_compile=jit_compile)
        losses = [trainer.train_on_batch(ids[:, :-1], ids[:, 1:]) for _ in range(2)]
    network.generate(ids[:, :4], max_new_tokens=2)
    is_finite = bool(np.all(np.isfinite([np.ravel(loss)[0] for loss in losses])))
    text = f"{policy}: first steps and tokens took {time.monotonic() - start:.0f} s"
    fix = "the loss is not finite; check whether other programs use the GPU"
    return check("kernels", is_finite, text, fix)


def _megabytes(folder):
    """Return the total size of a folder's files in 10^6 bytes, or 0 if it does not exist."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6
