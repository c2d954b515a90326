"""Schema of `checkpoint.json`. All fields are checked before use."""

import math
from typing import Annotated, Literal

import pydantic
from pydantic import Field, JsonValue, Strict

from dtransformer.errors import to_one_line
from dtransformer.inputs.files import check_name
from dtransformer.inputs.json_file import STRICT

INDEX = "state.index"
DATA = "state.data-{:05d}-of-{:05d}"
_MAX_FILES = 10**5
_ITEM_BYTES = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}


def _printable(text):
    if not text or to_one_line(text, None) != text:
        raise ValueError("expected a name without control characters")
    return text


Count = Annotated[int, Field(ge=0, lt=2**53)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Degree = Annotated[int, Field(ge=1, le=10**6)]
Name = Annotated[str, Field(max_length=1000), pydantic.AfterValidator(_printable)]
FileName = Annotated[str, pydantic.AfterValidator(check_name)]
Tensor = Annotated[tuple[list[Count], Literal[tuple(_ITEM_BYTES)]], Strict(False)]


class File(pydantic.BaseModel):
    """Size, checksum and writing rank of a file of a checkpoint."""

    model_config = STRICT
    bytes: Count
    crc32: Annotated[str, Field(pattern="^[0-9a-f]{8}$")]
    rank: Count


class Position(pydantic.BaseModel):
    """Epoch and batch that come next."""

    model_config = STRICT
    epoch: Count
    batch: Count


class Manifest(pydantic.BaseModel):
    """Content of a checkpoint. Additional fields are allowed."""

    model_config = STRICT
    version: Literal[1]
    step: Count
    seed: Count
    saved_at: Annotated[float, Field(ge=0, lt=253402300800)]  # Up to the year 9999.
    position: Position | None = None
    metrics: dict[Name, float | None]
    ranks: Degree
    devices_of_a_rank: Degree
    parallel: dict[Name, JsonValue]
    network: dict[str, JsonValue] | None
    optimizer: dict[str, JsonValue] | None
    tensors: dict[Name, Tensor]
    files: Annotated[dict[FileName, File], Field(max_length=_MAX_FILES)]

    @pydantic.model_validator(mode="after")
    def _sizes_agree(self):
        """Check that the files have the size of all tensors before memory is allocated."""
        data = [name for name in self.files if name.startswith(DATA.partition("{")[0])]
        expected = {DATA.format(index, len(data)) for index in range(len(data))}
        if INDEX not in self.files or set(data) != expected:
            raise ValueError(f"expected all of TensorFlow's files, including {INDEX}")
        needed = sum(math.prod(shape) * _ITEM_BYTES[kind] for shape, kind in self.tensors.values())
        if needed != sum(self.files[name].bytes for name in data):
            raise ValueError("expected files with the size of the tensors")
        return self
