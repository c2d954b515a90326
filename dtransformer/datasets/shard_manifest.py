"""The files of a folder of token shards: `shards.json` and the arrays of each shard."""

import hashlib
import json
import pathlib
import typing
from typing import Annotated, Literal

import numpy as np
import pydantic
from pydantic import Field

from dtransformer.errors import InputError
from dtransformer.inputs.files import MEBIBYTE, FilePath, check_path, inside, opened
from dtransformer.inputs.json_file import STRICT, read_json, typed
from dtransformer.inputs.manifest import Count, FileName, Sha256

MANIFEST = "shards.json"
TOKENIZER = "tokenizer"
KINDS = "tokens", "documents", "parts"
FORMAT = "dtransformer.TokenShards"
VERSION = 1
_MAX_BYTES = 64 * MEBIBYTE
_Id = Annotated[int, Field(ge=0, lt=2**31)]


class _File(pydantic.BaseModel):
    """Size and checksum of a file."""

    model_config = STRICT
    bytes: Count
    sha256: Sha256


class _Shard(pydantic.BaseModel):
    """Number of tokens, documents and parts of a shard."""

    model_config = STRICT
    tokens: Annotated[int, Field(ge=1, lt=2**53)]
    documents: Annotated[int, Field(ge=1, lt=2**53)]
    parts: Count | None


class Manifest(pydantic.BaseModel):
    """Schema of `shards.json`."""

    model_config = STRICT
    format: Literal[FORMAT]
    version: Literal[VERSION]
    dtype: Literal["uint16", "uint32"]
    vocab_size: Annotated[int, Field(ge=1, lt=2**31)]
    special_ids: dict[str, _Id]
    tokenizer: Sha256
    left_out: Count
    shards: Annotated[list[_Shard], Field(min_length=1, max_length=10**5)]
    files: dict[FileName, _File]

    @pydantic.model_validator(mode="after")
    def _names_all_files(self):
        expected = set()
        for index, shard in enumerate(self.shards):
            kinds = KINDS if shard.parts is not None else KINDS[:2]
            expected |= {shard_file(index, kind) for kind in kinds}
        if expected - self.files.keys():
            raise ValueError(f"expected {min(expected - self.files.keys())} among the files")
        return self


class Shard(typing.NamedTuple):
    """The arrays of a shard.

    Args:
        tokens: uint [T], the tokens of all documents, concatenated.
        documents: int64 [D + 1]. Document d is `tokens[documents[d]:documents[d + 1]]`.
        parts: int64 [P + 1]. Part p is `tokens[parts[p]:parts[p + 1]]`. `None` if documents have no
            parts.
    """

    tokens: np.ndarray
    documents: np.ndarray
    parts: np.ndarray | None


def shard_file(index: int, kind: str) -> str:
    """Return the file name of an array of a shard.

    Args:
        index: Index of the shard, from 0.
        kind: `"tokens"`, `"documents"` or `"parts"`.

    Example:

    >>> shard_file(3, "tokens")
    'shard-00003.tokens.npy'
    """
    return f"shard-{index:05d}.{kind}.npy"


def read_manifest(folder: FilePath) -> dict:
    """Read and check the manifest of a folder of token shards.

    Returns:
        Dict with the fields of `Manifest`.

    Raises:
        InputError: If the folder contains no token shards, or its manifest is damaged.
    """
    path = check_path(folder) / MANIFEST
    if not path.is_file():
        raise InputError(
            f"{folder} contains no token shards ({MANIFEST} is missing). Write them with "
            "'dtransformer prepare --lm'."
        )
    return typed(read_json(path, _MAX_BYTES), Manifest, path)


def write_manifest(folder: pathlib.Path, manifest: dict) -> None:
    """Write `shards.json` with the sizes and checksums of all files in the folder.

    Args:
        folder: Path of the folder, which contains the shards and the tokenizer.
        manifest: Dict with the other fields of `Manifest`.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": file_digest(path),
        }
        for path in paths
    }
    text = json.dumps({"format": FORMAT, "version": VERSION, **manifest, "files": files}, indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def file_digest(path: FilePath) -> str:
    """Return the SHA-256 of a file, 64 hexadecimal digits."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(manifest: dict) -> str:
    """Return 16 hexadecimal digits that identify the tokens and the tokenizer of a manifest."""
    text = json.dumps(manifest, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def open_shard(folder: FilePath, manifest: dict, index: int) -> Shard:
    """Map the arrays of a shard into memory and check their types, shapes and bounds.

    Args:
        folder: Path of the folder.
        manifest: Dict that `read_manifest` returned.
        index: Index of the shard, from 0.

    Returns:
        A `Shard`. Its tokens are read from disk on access.

    Raises:
        InputError: If a file is missing or contradicts the manifest.
    """
    sizes = manifest["shards"][index]
    dtype = manifest["dtype"]
    lengths = {"tokens": sizes["tokens"], "documents": sizes["documents"] + 1}
    if sizes["parts"] is not None:
        lengths["parts"] = sizes["parts"] + 1
    arrays = {}
    for kind, length in lengths.items():
        path = inside(folder, shard_file(index, kind))
        array = _map_array(path)
        if array.dtype != (dtype if kind == "tokens" else "int64") or array.shape != (length,):
            raise InputError(
                f"{path} contains {array.dtype.name} {list(array.shape)}, but {MANIFEST} specifies "
                f"{length} elements. Copy the folder again."
            )
        ends = [0, sizes["tokens"]]
        if kind != "tokens" and (array[[0, -1]].tolist() != ends or (np.diff(array) < 1).any()):
            raise InputError(
                f"{path} is damaged: its bounds do not match the tokens. Copy it again."
            )
        arrays[kind] = array
    if "parts" in arrays:
        parts = arrays["parts"]
        documents = arrays["documents"]
        if (parts[np.searchsorted(parts, documents)] != documents).any():
            raise InputError(f"{path} is damaged: its parts do not match documents. Copy it again.")
    return Shard(arrays["tokens"], arrays["documents"], arrays.get("parts"))


def _map_array(path):
    try:
        with opened(path):  # Raises an error with the reason if the file cannot be read.
            # Small slices of a plain array are faster than slices of NumPy's memmap.
            return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except InputError:
        raise
    except Exception:  # NumPy and Python's parser of the header raise many kinds of errors.
        raise InputError(f"{path} is damaged or not a NumPy array. Copy it again.") from None
