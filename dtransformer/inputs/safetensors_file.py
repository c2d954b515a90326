"""Reading safetensors files. The library checks the header before any tensor is read.

The format consists of eight bytes with the length of the header, a JSON header, and the bytes of
the tensors.

Reference:
    https://huggingface.co/docs/safetensors, "Format".
"""

import math
import os
import pathlib

import numpy as np
import safetensors

from dtransformer.errors import InputError, short_repr, to_one_line
from dtransformer.inputs.conversion import FLOATS
from dtransformer.inputs.files import FilePath, opened
from dtransformer.inputs.json_file import parse_json

_TYPES = FLOATS | {
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    "BOOL": np.bool_,
}
_MAX_DIMENSIONS = 32  # Limit of NumPy.
_ERROR_PREFIX = "Error while deserializing header: "


class SafetensorsFile:
    """A safetensors file. `file[name]` is a tensor as a NumPy array, read from disk on access.

    Args:
        path: Path of the file.

    Attributes:
        shapes: Dict of the names and shapes of the tensors.

    Raises:
        InputError: If the file cannot be read or is damaged, or a tensor has an unsupported type or
            size.
    """

    def __init__(self, path: FilePath):
        with opened(path) as file:
            try:
                # The library would wait for a pipe, whose size is 0.
                if not os.fstat(file.fileno()).st_size:
                    raise OSError("header too small")
                # The library checks that the tensors are contiguous and fill the file.
                with safetensors.safe_open(path, "np"):
                    length = int.from_bytes(file.read(8), "little")
            except (safetensors.SafetensorError, OSError) as error:
                reason = to_one_line(str(error).removeprefix(_ERROR_PREFIX), 100)
                raise InputError(
                    f"{path} is not a safetensors file, or its header is damaged ({reason}). Copy it "
                    "again."
                ) from None
            self._tensors = parse_json(file.read(length), path)
        self._path = pathlib.Path(path)
        self._start = 8 + length
        self._tensors.pop("__metadata__", None)
        self.shapes = {name: tuple(entry["shape"]) for name, entry in self._tensors.items()}
        for name, entry in self._tensors.items():
            is_array = len(entry["shape"]) <= _MAX_DIMENSIONS and max([0, *entry["shape"]]) < 2**48
            if entry["dtype"] not in _TYPES or not is_array:
                raise InputError(
                    f"{path}: {short_repr(name)} is {short_repr(entry['dtype'])} with "
                    f"{len(entry['shape'])} dimensions, expected {', '.join(_TYPES)} with at most "
                    f"{_MAX_DIMENSIONS} dimensions that fit into memory."
                )

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self._tensors[name]
        shape = self.shapes[name]
        kind = np.dtype(_TYPES[entry["dtype"]])
        if not math.prod(shape):
            return np.zeros(shape, kind)
        offset = self._start + entry["data_offsets"][0]
        return np.memmap(self._path, kind, "r", offset, shape)
