"""Small random models that `transformers` made, in a process of its own, or checks there."""

import functools
import importlib.util
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import pytest

FAMILY_OF = {
    "gpt2": "gpt2",
    "llama": "llama",
    "llama_3": "llama",
    "llama_tied": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
}
# As `reference_models.py` has them.
PROMPTS = [[5, 9, 33], [7], [40, 41, 42, 43, 44, 45, 46], [8, 8]]
NEW_TOKENS, END = 20, 2
with_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="needs transformers and PyTorch: pip install -e '.[reference]'",
)


@functools.cache
def published() -> pathlib.Path:
    """Return the folder of the models; made once a process."""
    folder = tempfile.mkdtemp(prefix="published-")
    _run("make", folder)
    return pathlib.Path(folder)


def results(name) -> dict:
    """Return what `transformers` computed with a model: ids, logits and three steps' losses."""
    return dict(np.load(published() / f"{name}.npz"))


def check(folder) -> None:
    """Let `transformers` load models by the names of those made, and compare their logits."""
    _run("check", published(), folder)


def _run(*arguments):
    script = pathlib.Path(__file__).with_name("reference_models.py")
    done = subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
