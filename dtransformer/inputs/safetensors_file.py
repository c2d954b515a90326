"""Reading safetensors files, of which the header is checked before a tensor is touched.

The format: eight bytes with the length of the header, a JSON header, and the tensors' bytes.
Reference: https://huggingface.co/docs/safetensors, "Format".
"""

import math
import os
import pathlib
from typing import Annotated, Literal

import ml_dtypes
import numpy as np
import pydantic
from pydantic import Field, Strict

from dtransformer.errors import InputError
from dtransformer.inputs.checked import STRICT
from dtransformer.inputs.files import opened
from dtransformer.inputs.json_file import MAX_BYTES, parse_json, typed
from dtransformer.inputs.manifest import Count, Name
from dtransformer.inputs.paths import FilePath

_FLOATS = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
_TYPES = _FLOATS | {
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    "BOOL": np.bool_,
}
_FLOAT_TYPES = {np.dtype(kind) for kind in _FLOATS.values()}


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


def convert(value: np.ndarray, kind: np.dtype, name: str) -> np.ndarray:
    """Return a stored value in the type of the weight that it is for.

    A floating-point type becomes another one, rounded; any other type stays what it is.

    Args:
        value: the value.
        kind: the weight's type.
        name: what it is, for messages.

    Raises:
        InputError: it has another kind of type; or values that are not finite in the new type.
    """
    kind = np.dtype(kind)
    if value.dtype != kind and not {value.dtype, kind} <= _FLOAT_TYPES:
        raise InputError(f"{name} is {value.dtype}, expected {kind}: convert it first")
    with np.errstate(over="ignore", invalid="ignore"):
        converted = value.astype(kind)
        is_finite = kind not in _FLOAT_TYPES or np.isfinite(converted.astype(np.float64)).all()
    if not is_finite:
        raise InputError(
            f"{name} has values that are not finite in {kind} (NaN, infinity, or too large): take "
            "other weights"
        )
    return converted
