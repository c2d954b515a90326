"""Adapters compute, train, load and are saved as in the package `peft`."""

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
from dtransformer.models.pretrained import peft
from dtransformer.trainers import Trainer
from tests.models.pretrained.family_rows import ADAPTERS
from tests.models.pretrained.published import published

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None,
    reason="needs peft, transformers and PyTorch: pip install -e '.[reference]'",
)
NAMES = *ADAPTERS, "llama_dora", "gpt2_dora", "glm_dora"


@functools.cache
def reference_folder() -> pathlib.Path:
    """Return the folder of the reference adapters, which each process makes once."""
    folder = tempfile.mkdtemp(prefix="adapters-")
    run_reference("make", published(), folder)
    return pathlib.Path(folder)


def run_reference(*arguments):
    script = pathlib.Path(__file__).with_name("reference_adapters.py")
    process = subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr[-3000:]


def load_with_adapters(name, adapters):
    network = from_pretrained(published() / name.removesuffix("_dora"))
    assert load_lora(network, adapters)
    return network


def assert_logits(network, expected):
    logits = np.asarray(network(expected["ids"].astype("int32")))
    error = np.abs(logits - expected["logits"]).max() / np.abs(expected["logits"]).max()
    assert error < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_training_steps_match_peft(name):
    """Only the low-rank factors are trained."""
    expected = dict(np.load(reference_folder() / f"{name}.npz"))
    network = load_with_adapters(name, reference_folder() / name)
    assert_logits(network, expected)
    trainer = Trainer(network)
    trainer.compile(keras.optimizers.SGD(0.1), CrossEntropyLoss())
    ids = expected["ids"].astype("int32")
    step = lambda: trainer.train_on_batch(ids[:, :-1], ids[:, 1:], return_dict=True)
    losses = [float(step()["loss"]) for _ in range(3)]
    tolerance = 1e-5 if name.endswith("_dora") else 1e-4
    np.testing.assert_allclose(losses, expected["losses"], rtol=tolerance)
    after = load_with_adapters(name, reference_folder() / f"{name}_after")
    assert all("lora" in weight.path for weight in network.trainable_variables)
    for weight, reference in zip(network.weights, after.weights, strict=True):
        scale = np.abs(reference.numpy()).max()
        np.testing.assert_allclose(
            weight.numpy(), reference.numpy(), rtol=0, atol=tolerance * scale
        )


@pytest.mark.parametrize(
    "names", [("gpt2", "glm", "llama_dora"), pytest.param(NAMES, marks=pytest.mark.long)]
)
def test_peft_loads_saved_adapters(names, tmp_path):
    for name in names:
        network = load_with_adapters(name, reference_folder() / name)
        save_lora(network, tmp_path / name, family=name.removesuffix("_dora"))
        merge_lora(network)
        assert_logits(network, dict(np.load(reference_folder() / f"{name}.npz")))
    run_reference("check", published(), reference_folder(), tmp_path)


@pytest.mark.parametrize("name", ["gaussian", "orthogonal", "mica", "patterns"])
@pytest.mark.filterwarnings("ignore:.*lora_dropout=0.5. is ignored")
def test_adapter_configs_match_peft(name, tmp_path):
    """Saving keeps the rank and alpha of each kernel."""
    expected = dict(np.load(reference_folder() / f"{name}.npz"))
    network = from_pretrained(published() / "llama")
    assert load_lora(network, reference_folder() / name)
    assert_logits(network, expected)
    save_lora(network, tmp_path)
    reloaded = from_pretrained(published() / "llama")
    load_lora(reloaded, tmp_path)
    assert_logits(reloaded, expected)


@pytest.mark.parametrize(
    "name, message",
    [
        ("pissa", "init_lora_weights='pissa'` are not supported. .*path_initial_model"),
        ("olora", "init_lora_weights='olora'` are not supported"),
        ("alora", "alora_invocation_tokens="),
    ],
)
def test_unsupported_adapter_configs_raise_an_error(name, message):
    with pytest.raises(InputError, match=message):
        load_lora(from_pretrained(published() / "llama"), reference_folder() / name)


def test_unsupported_adapter_fields_raise_an_error(tmp_path):
    network = from_pretrained(published() / "llama")
    for path in (reference_folder() / "llama").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    names, defaults = json.loads((reference_folder() / "fields.json").read_text())
    assert set(names) <= peft.KNOWN_FIELDS and not peft._REQUIRED_VALUES.keys() - set(names)
    missing_fields = {name: defaults[name] for name in defaults if name not in config}
    messages = {
        field: f"with `{field}=" for field in peft._REQUIRED_VALUES if field != "lora_dropout"
    }
    messages |= {"r": "`r` must be .* got 'other'", "of_tomorrow": "not a known field"}
    for field, message in {
        **messages,
        "rank_pattern": "`rank_pattern` must be .* got 'other'",
    }.items():
        changed = {**missing_fields, **config, field: "other"}
        (tmp_path / "adapter_config.json").write_text(json.dumps(changed))
        with pytest.raises(InputError, match=message):
            load_lora(network, tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({**missing_fields, **config}))
    assert load_lora(network, tmp_path)
    with pytest.raises(
        InputError, match="`family` must be one of llama.*, got 'gpt2'. The adapters are in .*other"
    ):
        save_lora(
            load_with_adapters("llama", reference_folder() / "llama"),
            tmp_path / "other",
            family="gpt2",
        )
