"""Promise: weights of few bits are read as what `transformers` makes of them, and saved as floats."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dtransformer.errors import InputError
from dtransformer.models import from_pretrained, save_pretrained
from dtransformer.models.pretrained.folder import PretrainedFolder
from dtransformer.models.pretrained.quantized import fp8_values, mxfp4_values
from tests.models.pretrained.published import published, results, with_transformers

pytestmark = with_transformers
CONFIG = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}


@pytest.fixture
def folder(tmp_path):
    """A copy of the small gpt-oss whose experts are MXFP4, and theirs as floats, by names."""
    folder = tmp_path / "mxfp4"
    shutil.copytree(published() / "gpt_oss", folder)
    tensors, rng, floats = load_file(folder / "model.safetensors"), np.random.default_rng(0), {}
    for name in [x for x in tensors if x.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), "uint8")
        scales = rng.integers(118, 128, (experts, outputs, inputs // 32), "uint8")
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        floats[name] = np.stack([mxfp4_values(*both) for both in zip(blocks, scales)])
    save_file(tensors, folder / "model.safetensors")
    change_config(folder, **CONFIG)
    return folder, floats


def change_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_values_are_those_of_transformers():
    """All bytes, and scales up to the largest that values have."""
    saved = results("mxfp4")
    found = np.stack([mxfp4_values(*both) for both in zip(saved["blocks"], saved["scales"])])
    np.testing.assert_array_equal(found.astype("float32"), saved["values"])


def test_values_in_fp8_are_those_of_transformers():
    saved = results("fp8")
    found = fp8_values(saved["elements"], saved["scales"])
    np.testing.assert_array_equal(found, saved["values"])


def test_a_network_in_fp8_is_read(tmp_path):
    """Blocks at the ends of a matrix are smaller ones, as those of DeepSeek-V3's latents are."""
    folder = tmp_path / "fp8"
    shutil.copytree(published() / "deepseek_v3", folder)
    tensors, own = load_file(folder / "model.safetensors"), {}
    for number, name in enumerate([x for x in tensors if "_proj" in x]):
        elements = tensors[name].astype(ml_dtypes.float8_e4m3fn)
        own |= {name: elements, f"{name}_scale_inv": np.full((1, 1), 0.5 + number, "float32")}
        tensors[name] = elements.astype("float32") * np.float32(0.5 + number)
    save_file({**tensors, **own}, folder / "model.safetensors")
    change_config(
        folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}
    )
    save_pretrained(from_pretrained(folder), tmp_path / "floats")
    saved = load_file(tmp_path / "floats" / "model.safetensors")
    assert saved.keys() == tensors.keys()
    for name, values in tensors.items():
        np.testing.assert_array_equal(saved[name], values, err_msg=name)

    wide = np.random.default_rng(0).normal(size=(130, 300)).astype("float32")
    scales = np.arange(6, dtype="float32").reshape(2, 3)
    expected = wide * np.kron(scales, np.ones((128, 128)))[:130, :300]
    np.testing.assert_allclose(fp8_values(wide, scales), expected, rtol=1e-6)
    change_config(
        folder, quantization_config={"quant_method": "fp8", "weight_block_size": [64, 64]}
    )
    with pytest.raises(InputError, match="quantization_config=.*64.* is not supported"):
        from_pretrained(folder)


def test_a_network_is_read_and_saved_as_floats(folder, tmp_path):
    folder, floats = folder
    network = from_pretrained(folder)
    save_pretrained(network, tmp_path / "floats")
    saved = load_file(tmp_path / "floats" / "model.safetensors")
    for name, values in floats.items():
        np.testing.assert_array_equal(saved[name], values.astype("float32"))
    assert "quantization_config" not in json.loads((tmp_path / "floats/config.json").read_text())
    ids = np.arange(4, 24)[None]
    np.testing.assert_array_equal(network(ids), from_pretrained(tmp_path / "floats")(ids))


def test_experts_are_read_one_by_one(folder):
    folder, floats = folder
    content = PretrainedFolder(folder)
    for name, values in floats.items():
        assert content.shapes[name] == values.shape
        np.testing.assert_array_equal(content[name][1:3], values[1:3])


def test_what_does_not_fit_is_refused(folder):
    folder, floats = folder
    path, name = folder / "model.safetensors", next(iter(floats))
    change_config(folder, quantization_config={"quant_method": "awq"})
    with pytest.raises(InputError, match="quantization_config=.*awq.* is not supported"):
        from_pretrained(folder)
    change_config(folder, **CONFIG)
    tensors = load_file(path)
    save_file({**tensors, f"{name}_scales": tensors[f"{name}_scales"][:1]}, path)
    with pytest.raises(InputError, match=r"_blocks has shape \(4, .*_scales with shape \(1, "):
        from_pretrained(folder)
    tensors[f"{name}_scales"][0, 0, 0] = 255  # which is no number
    save_file(tensors, path)
    with pytest.raises(InputError, match=f"{name} has values that are not finite"):
        from_pretrained(folder)
