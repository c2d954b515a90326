"""Checking a `.weights.h5` or `.keras` file of weights before Keras loads it."""

import os
import zipfile

import h5py
import numpy as np

from dtransformer.errors import InputError, to_one_line
from dtransformer.inputs.files import MEBIBYTE, FilePath, opened
from dtransformer.inputs.json_file import MAX_BYTES, parse_json

_SUFFIX = ".weights.h5"
_ARCHIVE = ".keras"
_MEMBER = "model.weights.h5"  # File in a `.keras` archive.
_MAX_OBJECTS = 10**5
_NUMBERS = "biuf"  # NumPy's kinds of numbers. bfloat16 is stored as void of two bytes.


def load_weights(network, path: FilePath, **options) -> None:
    """Check a file of weights, then load it as Keras does.

    Args:
        network: A built `keras.Model`.
        path: Path of a `.weights.h5` or `.keras` file. Other formats of Keras are loaded without a
            check.
        **options: Other arguments of `keras.Model.load_weights`.

    Raises:
        InputError: If the file is missing, damaged or malicious, has values that are not finite, or
            belongs to another network.
    """
    if str(path).endswith((_SUFFIX, _ARCHIVE)):
        check_weights(path)
    try:
        network.load_weights(path, **options)
    except InputError:
        raise
    except Exception as error:  # HDF5, Keras and TensorFlow raise many kinds of errors.
        raise InputError(
            f"{path}: These weights are damaged or belong to another model ({to_one_line(error, 160)})."
        ) from None


def read_class_name(path: FilePath) -> str | None:
    """Return the class name of the model in a `.keras` archive, or `None` if it cannot be read."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open("config.json") as member:
            return parse_json(member.read(MAX_BYTES), path)["class_name"]
    except Exception:  # `check_weights` reports damaged files.
        return None


def check_weights(path: FilePath) -> None:
    """Check that a file of weights contains only finite numbers, stored in the file itself.

    Args:
        path: Path of a `.weights.h5` file, or of a `.keras` archive, which contains one.

    Raises:
        InputError: If it contains links, other data or too many objects, or is damaged. The message
            names the problem.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
    try:
        problem = _find_problem_in_file(path, size)
    except InputError:
        raise
    except Exception as error:  # HDF5 and zipfile raise many kinds of errors.
        problem = to_one_line(error, 160)
    if problem:
        raise InputError(
            f"{path}: These weights are damaged or belong to another model ({problem}). Train again "
            "or use another file."
        )


def _find_problem_in_file(path, size):
    if not str(path).endswith(_ARCHIVE):
        with h5py.File(path, "r") as weights:
            return _find_problem(weights, size)
    with zipfile.ZipFile(path) as archive:
        if archive.getinfo(_MEMBER).compress_type != zipfile.ZIP_STORED:
            return f"{_MEMBER} is compressed, but Keras does not compress it"
        with archive.open(_MEMBER) as member:
            while member.read(MEBIBYTE):  # zipfile compares the checksum at the end.
                pass
        with archive.open(_MEMBER) as member, h5py.File(member, "r") as weights:
            return _find_problem(weights, size)


def _find_problem(file, size):
    """Return a description of the first problem in an open file, or ""."""
    pending = [file]
    num_objects = 0
    while pending:
        group = pending.pop()
        for name in group:
            num_objects += 1
            if num_objects > _MAX_OBJECTS:
                return f"more than {_MAX_OBJECTS:,} objects"
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                return f"{name} is a link"
            item = group[name]
            if isinstance(item, h5py.Group):
                pending.append(item)
                continue
            size -= item.nbytes if item.dtype.kind in _NUMBERS + "V" else size + 1
            if item.external or item.is_virtual or item.chunks or size < 0:
                return f"{item.name} is not an array of numbers stored in the file"
            if item.dtype.kind == "f" and not np.isfinite(item[...]).all():
                return f"{item.name} has values that are not finite"
    return ""
