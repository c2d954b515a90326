"""Weights from a file are finite numbers of a known type, or none are loaded."""

import json

import h5py
import keras
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtransformer.inputs.conversion import convert
from dtransformer.inputs.safetensors_file import SafetensorsFile
from dtransformer.inputs.weights_file import load_weights
from dtransformer.trainers import Trainer
from tests.inputs.bounded import BOUNDED, read_or_reject, refusal

VALUES = np.array([[0.5, -1.0, 2.0]], "float32")


def safetensors(tensors, data, about=None):
    """Return the bytes of a file with the tensors {name: (dtype, shape, offsets)}."""
    keys = ("dtype", "shape", "data_offsets")
    header = {name: dict(zip(keys, fields)) for name, fields in tensors.items()}
    header |= {"__metadata__": about} if about is not None else {}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("kind", ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"])
def test_floating_point_types_are_converted(path, kind):
    types = {"F64": "f8", "F32": "f4", "F16": "f2", "BF16": ml_dtypes.bfloat16,
             "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}  # fmt: skip
    data = VALUES.astype(types[kind]).tobytes()
    path.write_bytes(safetensors({"a": (kind, [1, 3], [0, len(data)])}, data, {"format": "x"}))
    file = SafetensorsFile(path)
    assert file.shapes == {"a": (1, 3)}
    np.testing.assert_array_equal(convert(file["a"], "float32", "a"), VALUES)


@pytest.mark.parametrize(
    "value, kind, expected_error",
    [
        (np.array([1], "uint8"), "float32", "uint8"),
        (np.array([True]), "float32", "bool"),
        (np.array([1], "int32"), "int64", "int32"),
        (np.array([np.nan], "float32"), "float32", "not finite"),
        (np.array([1e300]), "float32", "not finite"),
        (np.array([1e5], "float32"), "float16", "not finite"),
        (np.array([np.nan], ml_dtypes.float8_e4m3fn), "float32", "not finite"),
    ],
)
def test_other_types_and_values_are_refused(value, kind, expected_error):
    assert expected_error in refusal(convert, value, kind, "a")


@pytest.mark.parametrize(
    "content, expected_error",
    [
        (b"", "header"),
        (b"\xff" * 8, "header"),
        (b"\x02" + b"\0" * 7 + b"[]", "header"),
        (b"\x02" + b"\0" * 7 + b"{}" + b"more", "not fully covered"),
        (
            safetensors({"a": ("F32", [3], [0, 8])}, b"\0" * 8),
            "invalid shape, data type, or offset",
        ),
        (safetensors({"a": ("F32", [2], [4, 12])}, b"\0" * 12), "invalid offset for tensor"),
        (safetensors({"a": ("F32", [2**40], [0, 2**42])}, b""), "not fully covered"),
        (safetensors({"a": ("F32", [0, 2**62], [0, 0])}, b""), "dimensions that fit into memory"),
        (safetensors({"a": ("C64", [1], [0, 8])}, b"\0" * 8), "'a' is 'C64'"),
        (safetensors({"a": ("F32", [-1, -1], [0, 4])}, b"\0" * 4), "usize"),
        (safetensors({"a": ("F32", ["2"], [0, 8])}, b"\0" * 8), "usize"),
        (safetensors({"a": ("F32", [1] * 40, [0, 4])}, b"\0" * 4), "at most 32"),
        (safetensors({}, b"", {"format": 1}), "expected a string"),
    ],
)
def test_headers_are_checked(path, content, expected_error):
    path.write_bytes(content)
    assert expected_error in refusal(SafetensorsFile, path)


@BOUNDED
@given(data=st.data())
def test_file_damaged_anywhere_is_read_or_refused(path, data):
    good = safetensors({"a": ("F32", [1, 3], [0, 12]), "b": ("I8", [2], [12, 14])}, b"\1" * 14)
    place = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(bad)[: data.draw(st.sampled_from([len(bad), place]))])
    file = read_or_reject(SafetensorsFile, path)
    if file is not None:
        assert all(file[name].shape == shape for name, shape in file.shapes.items())


def network():
    return keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(3)])


def make_trainer(model):
    trainer = Trainer(model)
    trainer.compile("sgd", "mse")
    return trainer


def test_weights_stay_unchanged_after_an_error(path):
    model = network()
    before = model.get_weights()
    numbers = np.array([1, 2, 3, np.nan, 5, 6], "float32").tobytes()
    tensors = {"dense/kernel": ("F32", [1, 3], [0, 12]), "dense/bias": ("F32", [3], [12, 24])}
    path.write_bytes(safetensors(tensors, numbers))
    assert "dense/bias has values that are not finite" in refusal(
        make_trainer(model).load_weights, path
    )
    for item, other in zip(before, model.get_weights()):
        np.testing.assert_array_equal(item, other)


def linked(file):
    file["more"] = h5py.ExternalLink("other.h5", "/")


def not_finite(file):
    next(iter(arrays(file)))[0] = np.inf


def texts(file):
    file["more"] = np.array([b"text"], object)


def arrays(file):
    result = []
    file.visititems(lambda _, item: result.append(item) if isinstance(item, h5py.Dataset) else None)
    return result


@pytest.mark.parametrize(
    "harm, expected_error",
    [
        (
            lambda file: file.create_dataset("x", (2**20, 2**20), "f4", chunks=(1, 1)),
            "is not an array of numbers",
        ),
        (lambda file: file.create_dataset("x", (2**20, 2**20), "f4"), "is not an array of numbers"),
        (linked, "is a link"),
        (not_finite, "not finite"),
        (texts, "is not an array of numbers"),
        (lambda file: file.clear(), "belong to another model"),
    ],
)
def test_keras_weights_are_checked(tmp_path, harm, expected_error):
    path, model = tmp_path / "model.weights.h5", network()
    model.save_weights(path)
    load_weights(network(), path)
    with h5py.File(path, "a") as file:
        harm(file)
    assert expected_error in refusal(load_weights, model, path)


def test_weights_in_a_keras_archive_are_checked(tmp_path):
    path, model = tmp_path / "model.keras", network()
    model.save(path)
    before = model.get_weights()
    load_weights(model, path)
    model.set_weights([weight + np.nan for weight in before])
    model.save(path)
    model.set_weights(before)
    assert "not finite" in refusal(load_weights, model, path)
    for value, old_value in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, old_value)
    model.save(path)
    data = bytearray(path.read_bytes())
    data[data.index(before[0].tobytes())] ^= (
        1  # The value stays finite, but the archive has a checksum.
    )
    path.write_bytes(data)
    assert "CRC" in refusal(load_weights, model, path)
    path.write_bytes(path.read_bytes()[:200])
    assert "damaged" in refusal(load_weights, model, path)


@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
def test_trainer_loads_saved_weights_of_itself_or_its_network(tmp_path):
    model = network()
    make_trainer(model).save(tmp_path / "trainer.keras")
    model.save(tmp_path / "network.keras")
    for name in ("trainer", "network"):
        other = make_trainer(network())
        other.load_weights(tmp_path / f"{name}.keras")
        for value, loaded in zip(model.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_array_equal(value, loaded)


@BOUNDED
@given(data=st.data())
def test_keras_file_damaged_anywhere_is_read_or_refused(tmp_path, data):
    path, model = tmp_path / "model.weights.h5", network()
    model.save_weights(path)
    bad = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(bad) - 1) | st.integers(0, 200))
    bad[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(bad)[: data.draw(st.sampled_from([len(bad), place]))])
    read_or_reject(load_weights, model, path)
