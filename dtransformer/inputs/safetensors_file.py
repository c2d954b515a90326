"""Reading safetensors files, of which the library checks the header before a tensor is touched.

The format: eight bytes with the length of the header, a JSON header, and the tensors' bytes.
Reference: https://huggingface.co/docs/safetensors, "Format".
"""

import math
import os
import pathlib

import numpy as np
import safetensors

from dtransformer.errors import InputError, one_line, shown
from dtransformer.inputs.conversion import FLOATS
from dtransformer.inputs.files import FilePath, opened
from dtransformer.inputs.json_file import parse_json

_TYPES = FLOATS | {
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    "BOOL": np.bool_,
}
_MAX_DIMENSIONS = 32  # that NumPy takes
_OF_ALL_ERRORS = "Error while deserializing header: "


class SafetensorsFile:
    """A file of tensors: `file[name]` is one, an array that is read where it is used.

    Args:
        path: the file.

    Attributes:
        shapes: dict of the tensors' names and shapes.

    Raises:
        InputError: it cannot be read, is damaged, or has types that are no weights'.
    """

    def __init__(self, path: FilePath):
        with opened(path) as file:
            try:
                if not os.fstat(file.fileno()).st_size:  # a pipe, which the library would wait for
                    raise OSError("header too small")
                with safetensors.safe_open(
                    path, "np"
                ):  # that tensors follow each other, and fill it
                    length = int.from_bytes(file.read(8), "little")
            except (safetensors.SafetensorError, OSError) as error:
                reason = one_line(str(error).removeprefix(_OF_ALL_ERRORS), 100)
                raise InputError(
                    f"{path}: is not a safetensors file, or damaged: its header: {reason}"
                ) from None
            self._tensors = parse_json(file.read(length), path)
        self._path, self._start = pathlib.Path(path), 8 + length
        self._tensors.pop("__metadata__", None)
        self.shapes = {name: tuple(about["shape"]) for name, about in self._tensors.items()}
        for name, about in self._tensors.items():
            is_array = len(about["shape"]) <= _MAX_DIMENSIONS and max([0, *about["shape"]]) < 2**48
            if about["dtype"] not in _TYPES or not is_array:
                raise InputError(
                    f"{path}: {shown(name)} is {shown(about['dtype'])} of {len(about['shape'])} "
                    f"dimensions, expected {', '.join(_TYPES)} of at most {_MAX_DIMENSIONS}, of a size "
                    "that memory may have"
                )

    def __getitem__(self, name: str) -> np.ndarray:
        about = self._tensors[name]
        shape, kind = self.shapes[name], np.dtype(_TYPES[about["dtype"]])
        if not math.prod(shape):
            return np.zeros(shape, kind)
        offset = self._start + about["data_offsets"][0]
        return np.memmap(self._path, kind, "r", offset, shape)
