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
    network = from_pretrained(published() / name.removesuffix("_dora"))
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
    tolerance = 1e-5 if name.endswith("_dora") else 1e-4
    np.testing.assert_allclose(losses, expected["losses"], rtol=tolerance)
    after = network_with(name, made() / f"{name}_after")
    assert all("lora" in weight.path for weight in network.trainable_variables)
    for own, theirs in zip(network.weights, after.weights, strict=True):
        scale = np.abs(theirs.numpy()).max()
        np.testing.assert_allclose(own.numpy(), theirs.numpy(), rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize(
    "names", [("gpt2", "glm", "llama_dora"), pytest.param(NAMES, marks=pytest.mark.long)]
)
def test_what_is_saved_is_loaded_by_peft(names, tmp_path):
    for name in names:
        network = network_with(name, made() / name)
        save_lora(network, tmp_path / name, family=name.removesuffix("_dora"))
        merge_lora(network)
        assert_logits(network, dict(np.load(made() / f"{name}.npz")))
    run("check", published(), made(), tmp_path)


@pytest.mark.parametrize("name", ["gaussian", "orthogonal", "mica", "patterns"])
@pytest.mark.filterwarnings("ignore:.*lora_dropout=0.5. is ignored")
def test_configs_that_are_computed_as_there(name, tmp_path):
    """What is saved again has the ranks and alphas of each kernel, too."""
    expected = dict(np.load(made() / f"{name}.npz"))
    network = from_pretrained(published() / "llama")
    assert load_lora(network, made() / name)
    assert_logits(network, expected)
    save_lora(network, tmp_path)
    again = from_pretrained(published() / "llama")
    load_lora(again, tmp_path)
    assert_logits(again, expected)


@pytest.mark.parametrize(
    "name, told",
    [
        ("pissa", "init_lora_weights='pissa'` are not supported. .*path_initial_model"),
        ("olora", "init_lora_weights='olora'` are not supported"),
        ("alora", "alora_invocation_tokens="),
    ],
)
def test_configs_that_would_compute_something_else(name, told):
    with pytest.raises(InputError, match=told):
        load_lora(from_pretrained(published() / "llama"), made() / name)


def test_what_is_not_built_is_refused(tmp_path):
    network = from_pretrained(published() / "llama")
    for path in (made() / "llama").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    names, usual = json.loads((made() / "fields.json").read_text())
    assert set(names) <= peft.KNOWN_FIELDS and not peft._REQUIRED_VALUES.keys() - set(names)
    others = {name: usual[name] for name in usual if name not in config}
    told = {field: f"with `{field}=" for field in peft._REQUIRED_VALUES if field != "lora_dropout"}
    told |= {"r": "`r` must be .* got 'other'", "of_tomorrow": "not a known field"}
    for field, words in {**told, "rank_pattern": "`rank_pattern` must be .* got 'other'"}.items():
        changed = {**others, **config, field: "other"}
        (tmp_path / "adapter_config.json").write_text(json.dumps(changed))
        with pytest.raises(InputError, match=words):
            load_lora(network, tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({**others, **config}))
    assert load_lora(network, tmp_path)
    with pytest.raises(
        InputError, match="`family` must be one of llama.*, got 'gpt2'. The adapters are in .*other"
    ):
        save_lora(network_with("llama", made() / "llama"), tmp_path / "other", family="gpt2")
