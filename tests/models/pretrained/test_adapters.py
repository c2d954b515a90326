"""Promise: adapters compute, learn, are loaded and saved as the package `peft` does it."""

import functools
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile

import keras
import numpy as np
import pytest

from dtransformer.errors import InputError
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import from_pretrained, load_lora, merge_lora, save_lora
from dtransformer.trainers import Trainer
from tests.models.pretrained.published import published

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None,
    reason="needs peft, transformers and PyTorch: pip install -e '.[reference]'",
)
NAMES = "llama", "mistral", "qwen2", "gpt2"


@functools.cache
def made() -> pathlib.Path:
    """Return the folder of the adapters; made once a process."""
    folder = tempfile.mkdtemp(prefix="adapters-")
    run("make", published(), folder)
    return pathlib.Path(folder)


def run(*arguments):
    script = pathlib.Path(__file__).with_name("reference_adapters.py")
    done = subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


def network_with(name, adapters):
    network = from_pretrained(published() / name)
    assert load_lora(network, adapters)
    return network


def assert_logits(network, expected):
    logits = np.asarray(network(expected["ids"].astype("int32")))
    error = np.abs(logits - expected["logits"]).max() / np.abs(expected["logits"]).max()
    assert error < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_three_steps_of_training(name):
    """All but the factors is frozen; their losses and they themselves are those of PyTorch."""
    expected = dict(np.load(made() / f"{name}.npz"))
    network = network_with(name, made() / name)
    assert_logits(network, expected)
    trainer = Trainer(network)
    trainer.compile(keras.optimizers.SGD(0.1), CrossEntropyLoss())
    ids = expected["ids"].astype("int32")
    step = lambda: trainer.train_on_batch(ids[:, :-1], ids[:, 1:], return_dict=True)
    losses = [float(step()["loss"]) for _ in range(3)]
    np.testing.assert_allclose(losses, expected["losses"], rtol=1e-4)
    after = network_with(name, made() / f"{name}_after")
    assert all("lora" in weight.path for weight in network.trainable_variables)
    for own, theirs in zip(network.weights, after.weights, strict=True):
        scale = np.abs(theirs.numpy()).max()
        np.testing.assert_allclose(own.numpy(), theirs.numpy(), rtol=0, atol=1e-4 * scale)


def test_what_is_saved_is_loaded_by_peft(tmp_path):
    for name in NAMES:
        network = network_with(name, made() / name)
        save_lora(network, tmp_path / name, family=name)
        merge_lora(network)
        assert_logits(network, dict(np.load(made() / f"{name}.npz")))
    run("check", published(), made(), tmp_path)


def test_what_is_not_built_is_refused(tmp_path):
    network = from_pretrained(published() / "llama")
    for path in (made() / "llama").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    for field, value in {"use_dora": True, "rank_pattern": {"q_proj": 2}, "r": 3}.items():
        (tmp_path / "adapter_config.json").write_text(json.dumps({**config, field: value}))
        with pytest.raises(InputError, match=field if field != "r" else "lora_A of .* of rank 3"):
            load_lora(network, tmp_path)
    with pytest.raises(InputError, match="gpt2 has no tensor for .*query_kernel alone"):
        save_lora(network_with("llama", made() / "llama"), tmp_path / "other", family="gpt2")
