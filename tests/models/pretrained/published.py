"""Small random models that `transformers` made, in a process of its own, or checks there."""

import fcntl
import functools
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import uuid

import numpy as np
import pytest

from tests.models.pretrained import family_rows

FAMILY_OF = {
    "gpt2": "gpt2",
    "llama": "llama",
    "llama_3": "llama",
    "llama_tied": "llama",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "qwen2": "qwen2",
    "bert": "bert",
    "bert_sentences": "bert",
    "roberta": "roberta",
    "bart": "bart",
    "marian": "marian",
    "t5": "t5",
    "t5_gated": "t5",
    **family_rows.FAMILIES,
}
TEXTS = "gpt2", "llama", "llama_3", "llama_tied", "mistral", "mixtral", "qwen2", *family_rows.TEXTS
PAIRS = "bart", "marian", "t5", "t5_gated", *family_rows.PAIRS
# As `reference_kinds.py` has them.
PROMPTS = [[5, 9, 33], [7], [40, 41, 42, 43, 44, 45, 46], [8, 8]]
NEW_TOKENS, END = 20, 2
with_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="needs transformers and PyTorch: pip install -e '.[reference]'",
)


@functools.cache
def published() -> pathlib.Path:
    """Return the folder of the models; made once a run of the suite, by the worker that asks first."""
    suite = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex
    folder = pathlib.Path(tempfile.gettempdir(), f"published-{suite}")
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            _run("make", folder)
            (folder / "made").touch()
    return folder


def results(name) -> dict:
    """Return what `transformers` computed with a model: outputs and three steps' losses."""
    return dict(np.load(published() / f"{name}.npz"))


def batch_of(expected) -> tuple:
    """Return inputs and labels of `results` as our networks take them."""
    return tuple(_nested(expected, kind) for kind in ("inputs", "labels"))


def _nested(expected, kind):
    """Return a dict of what there is of a kind; or, where it is one, an array."""
    found = {
        name.removeprefix(f"{kind}/"): x.astype("int32")
        for name, x in expected.items()
        if name.startswith(f"{kind}/")
    }
    return next(iter(found.values())) if len(found) == 1 else found


def errors(outputs, expected) -> dict:
    """Return how far outputs are from those of `results`, relative to the largest, by name.

    Where texts are padded nothing is compared.
    """
    outputs = outputs if isinstance(outputs, dict) else {"": outputs}
    found, is_token = {}, expected.get("is_token", ...)
    for name, own in outputs.items():
        theirs = expected[f"outputs/{name}"]
        own = np.asarray(own)[..., : theirs.shape[-1]]
        if own.ndim == 3:
            own, theirs = own[is_token], theirs[is_token]
        found[name] = np.abs(own - theirs).max() / np.abs(theirs).max()
    return found


def check(folder) -> None:
    """Let `transformers` load models by the names of those made, and compare their logits."""
    _run("check", published(), folder)


def _run(*arguments):
    command = [sys.executable, "-m", "tests.models.pretrained.reference_models", *arguments]
    root = pathlib.Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
