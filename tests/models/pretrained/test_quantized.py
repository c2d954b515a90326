"""Quantized weights are read with the values of `transformers` and saved as floats."""

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
    """Folder of a small gpt-oss model with MXFP4 experts, and a dict of their float values."""
    folder = tmp_path / "mxfp4"
    shutil.copytree(published() / "gpt_oss", folder)
    tensors, rng, floats = load_file(folder / "model.safetensors"), np.random.default_rng(0), {}
    for name in [x for x in tensors if x.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), "uint8")
        scales = rng.integers(118, 128, (experts, outputs, inputs // 32), "uint8")
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        floats[name] = np.stack([mxfp4_values(*pair) for pair in zip(blocks, scales)])
    save_file(tensors, folder / "model.safetensors")
    change_config(folder, **CONFIG)
    return folder, floats


def change_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_mxfp4_values_match_transformers():
    """The values include all bytes, and scales up to the largest."""
    saved = results("mxfp4")
    actual = np.stack([mxfp4_values(*pair) for pair in zip(saved["blocks"], saved["scales"])])
    np.testing.assert_array_equal(actual.astype("float32"), saved["values"])


def test_fp8_values_match_transformers():
    saved = results("fp8")
    actual = fp8_values(saved["elements"], saved["scales"])
    np.testing.assert_array_equal(actual, saved["values"])


def test_fp8_network_is_read_and_saved_as_floats(tmp_path):
    """Blocks at the edges of a matrix may be smaller, as in the latents of DeepSeek-V3."""
    folder = tmp_path / "fp8"
    shutil.copytree(published() / "deepseek_v3", folder)
    tensors, stored = load_file(folder / "model.safetensors"), {}
    for index, name in enumerate([x for x in tensors if "_proj" in x]):
        elements = tensors[name].astype(ml_dtypes.float8_e4m3fn)
        stored |= {name: elements, f"{name}_scale_inv": np.full((1, 1), 0.5 + index, "float32")}
        tensors[name] = elements.astype("float32") * np.float32(0.5 + index)
    save_file({**tensors, **stored}, folder / "model.safetensors")
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


def test_mxfp4_network_is_read_and_saved_as_floats(folder, tmp_path):
    folder, floats = folder
    network = from_pretrained(folder)
    save_pretrained(network, tmp_path / "floats")
    saved = load_file(tmp_path / "floats" / "model.safetensors")
    for name, values in floats.items():
        np.testing.assert_array_equal(saved[name], values.astype("float32"))
    assert "quantization_config" not in json.loads((tmp_path / "floats/config.json").read_text())
    ids = np.arange(4, 24)[None]
    np.testing.assert_array_equal(network(ids), from_pretrained(tmp_path / "floats")(ids))


def test_mxfp4_experts_can_be_read_separately(folder):
    folder, floats = folder
    content = PretrainedFolder(folder)
    for name, values in floats.items():
        assert content.shapes[name] == values.shape
        np.testing.assert_array_equal(content[name][1:3], values[1:3])


def test_unsupported_or_invalid_quantization_raises_an_error(folder):
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
    tensors[f"{name}_scales"][0, 0, 0] = 255  # The scale 255 means NaN.
    save_file(tensors, path)
    with pytest.raises(InputError, match=f"{name} has values that are not finite"):
        from_pretrained(folder)
