"""Looking at a file of weights, `.weights.h5` or `.keras`, before Keras loads it, and loading it."""

import os
import zipfile

import h5py
import numpy as np

from dtransformer.errors import InputError, one_line
from dtransformer.inputs.files import MEBIBYTE, FilePath, opened
from dtransformer.inputs.json_file import MAX_BYTES, parse_json

_ENDING = ".weights.h5"
_ARCHIVE = ".keras"
_MEMBER = "model.weights.h5"  # of an archive of Keras
_MAX_OBJECTS = 10**5
_NUMBERS = "biuf"  # NumPy's kinds; bfloat16 is kept as numbers of two bytes


def load_weights(network, path: FilePath, **options) -> None:
    """Load weights as Keras does, from a file that was looked at first.

    Args:
        network: a built `keras.Model`.
        path: a `.weights.h5` or `.keras` file, or another one that Keras takes, which Keras alone
            looks at.
        **options: as in `keras.Model.load_weights`.

    Raises:
        InputError: the file is missing, damaged or hostile, has values that are not finite, or is of
            another network.
    """
    if str(path).endswith((_ENDING, _ARCHIVE)):
        check_weights(path)
    try:
        network.load_weights(path, **options)
    except InputError:
        raise
    except Exception as error:  # whatever HDF5, Keras and TensorFlow raise
        raise InputError(
            f"{path}: these weights are damaged, or of another model ({one_line(error, 160)})"
        ) from None


def class_of(path: FilePath) -> str | None:
    """Return the name of the class of the model of a `.keras` archive; None where it says none."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open("config.json") as member:
            return parse_json(member.read(MAX_BYTES), path)["class_name"]
    except Exception:  # what is wrong with it `check_weights` tells
        return None


def check_weights(path: FilePath) -> None:
    """Check that a file of weights holds finite numbers, as many as it has bytes for.

    Args:
        path: a `.weights.h5` file, or a `.keras` archive, which has one inside.

    Raises:
        InputError: it does not; says what it holds instead.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
    try:
        problem = _problem_of_file(path, size)
    except InputError:
        raise
    except Exception as error:  # whatever HDF5 and zipfile raise
        problem = one_line(error, 160)
    if problem:
        raise InputError(
            f"{path}: these weights are damaged, or of another model ({problem}): train again, or "
            "give another file"
        )


def _problem_of_file(path, size):
    if not str(path).endswith(_ARCHIVE):
        with h5py.File(path, "r") as weights:
            return _problem(weights, size)
    with zipfile.ZipFile(path) as archive:
        if archive.getinfo(_MEMBER).compress_type != zipfile.ZIP_STORED:
            return f"{_MEMBER} is compressed, which Keras does not do"
        with archive.open(_MEMBER) as member:
            while member.read(MEBIBYTE):  # to its end, where its checksum is compared
                pass
        with archive.open(_MEMBER) as member, h5py.File(member, "r") as weights:
            return _problem(weights, size)


def _problem(file, size):
    """Return what is wrong with an open file; "" where nothing is."""
    todo, num_objects = [file], 0
    while todo:
        group = todo.pop()
        for name in group:
            num_objects += 1
            if num_objects > _MAX_OBJECTS:
                return f"more than {_MAX_OBJECTS:,} objects"
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                return f"{name} is a link"
            item = group[name]
            if isinstance(item, h5py.Group):
                todo.append(item)
                continue
            size -= item.nbytes if item.dtype.kind in _NUMBERS + "V" else size + 1
            if item.external or item.is_virtual or item.chunks or size < 0:
                return f"{item.name} is no array of numbers that the file holds"
            if item.dtype.kind == "f" and not np.isfinite(item[...]).all():
                return f"{item.name} has values that are not finite"
    return ""
