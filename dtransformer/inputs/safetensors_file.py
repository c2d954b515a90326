"""Reading safetensors files, of which the header is checked before a tensor is touched.

The format: eight bytes with the length of the header, a JSON header, and the tensors' bytes.
Reference: https://huggingface.co/docs/safetensors, "Format".
"""

import math
import os
import pathlib
from typing import Annotated, Literal

import numpy as np
import pydantic
from pydantic import Field, Strict

from dtransformer.errors import InputError
from dtransformer.inputs.checked import STRICT
from dtransformer.inputs.conversion import FLOATS
from dtransformer.inputs.files import opened
from dtransformer.inputs.json_file import MAX_BYTES, parse_json, typed
from dtransformer.inputs.manifest import Count, Name
from dtransformer.inputs.paths import FilePath

_TYPES = FLOATS | {
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    "BOOL": np.bool_,
}


class _Tensor(pydantic.BaseModel):
    """What the header says of a tensor."""

    model_config = STRICT
    dtype: Literal[tuple(_TYPES)]
    shape: Annotated[list[Count], Field(max_length=32)]
    data_offsets: Annotated[tuple[Count, Count], Strict(False)]


class _Header(pydantic.BaseModel):
    """The header: tensors, and what the writer wanted to say."""

    model_config = STRICT
    about: dict[str, str]
    tensors: dict[Name, _Tensor]


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
            length = int.from_bytes(file.read(8), "little")
            start, size = 8 + length, os.fstat(file.fileno()).st_size
            if not 2 <= length <= min(MAX_BYTES, size - 8):
                raise InputError(f"{path}: is not a safetensors file, or damaged (its header)")
            content = parse_json(file.read(length), path)
        if not isinstance(content, dict):
            raise InputError(f"{path}: is not a safetensors file, or damaged (its header)")
        about = content.pop("__metadata__", {})
        typed({"about": about, "tensors": content}, _Header, path)
        _check_offsets(path, content, size - start)
        self._path, self._start, self._tensors = pathlib.Path(path), start, content
        self.shapes = {name: tuple(about["shape"]) for name, about in content.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        about = self._tensors[name]
        shape, kind = self.shapes[name], np.dtype(_TYPES[about["dtype"]])
        if not math.prod(shape):
            return np.zeros(shape, kind)
        offset = self._start + about["data_offsets"][0]
        return np.memmap(self._path, kind, "r", offset, shape)


def _check_offsets(path, tensors, size):
    """Check that the tensors lie one after the other, and fill the file."""
    place = 0
    for name, about in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = about["data_offsets"]
        num_bytes = math.prod(about["shape"]) * np.dtype(_TYPES[about["dtype"]]).itemsize
        if start != place or stop - start != num_bytes:
            raise InputError(
                f"{path}: is damaged: {name} lies at {start} to {stop}, expected {place} to "
                f"{place + num_bytes}"
            )
        place = stop
    if place != size:
        raise InputError(f"{path}: is damaged: {size:,} bytes of tensors, expected {place:,}")
