"""Small random models that a separate process with `transformers` makes or checks."""

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

MODEL_FAMILIES = {
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
# `reference_kinds.py` has the same values.
PROMPTS = [[5, 9, 33], [7], [40, 41, 42, 43, 44, 45, 46], [8, 8]]
NEW_TOKENS, END = 20, 2
with_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="needs transformers and PyTorch: pip install -e '.[reference]'",
)


@functools.cache
def published() -> pathlib.Path:
    """Return the folder of the models. The first worker of a test run makes them."""
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
    """Return inputs, outputs and losses of three steps that `transformers` computed with a model."""
    return dict(np.load(published() / f"{name}.npz"))


def generated_texts(name) -> dict:
    """Return the texts that `transformers` generated with a model."""
    path = published() / f"{name}-texts.npz"
    with open(published() / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not path.exists():
            _run("generate", published())
    return dict(np.load(path))


def get_batch(expected) -> tuple:
    """Return inputs and labels from `results` in the form that our networks accept."""
    return tuple(_nested(expected, kind) for kind in ("inputs", "labels"))


def _nested(expected, kind):
    """Return a dict of the arrays with this prefix, or the array itself if it is the only one."""
    arrays = {
        name.removeprefix(f"{kind}/"): x.astype("int32")
        for name, x in expected.items()
        if name.startswith(f"{kind}/")
    }
    return next(iter(arrays.values())) if len(arrays) == 1 else arrays


def errors(outputs, expected) -> dict:
    """Return the largest error of each output, relative to the largest expected value.

    Padding is not compared.
    """
    outputs = outputs if isinstance(outputs, dict) else {"": outputs}
    result, is_token = {}, expected.get("is_token", ...)
    for name, output in outputs.items():
        reference = expected[f"outputs/{name}"]
        output = np.asarray(output)[..., : reference.shape[-1]]
        if output.ndim == 3:
            output, reference = output[is_token], reference[is_token]
        result[name] = np.abs(output - reference).max() / np.abs(reference).max()
    return result


def check(folder) -> None:
    """Load saved models with `transformers` and compare their logits with `results`."""
    _run("check", published(), folder)


def _run(*arguments):
    command = [sys.executable, "-m", "tests.models.pretrained.reference_models", *arguments]
    root = pathlib.Path(__file__).parents[3]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=root)
    assert process.returncode == 0, process.stderr[-3000:]
