"""The manifest `checkpoint.json`: content of a checkpoint, and a checksum of every file."""

import dataclasses
import json
import pathlib
import time
import zlib

import keras
import pydantic
import tensorflow as tf

from dtransformer.errors import InputError, short_repr
from dtransformer.files import sync
from dtransformer.inputs.files import inside
from dtransformer.inputs.json_file import read_json, typed
from dtransformer.inputs.manifest import Manifest
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.runtime import job
from dtransformer.trainers.checkpoint.training_state import TrainingState
from dtransformer.version import __version__

MANIFEST = "checkpoint.json"
_VERSION = 1
_CHUNK_BYTES = 2**22


class _Document(pydantic.BaseModel):
    """The manifest and its checksum."""

    crc32: str
    checkpoint: dict


def describe_run(state: TrainingState) -> dict:
    """Return the manifest's entries about a run: step, seed, configs, versions and layout."""
    return {
        "dtransformer": __version__,
        "tensorflow": tf.__version__,
        "saved_at": time.time(),
        "step": int(state.optimizer.iterations),
        "seed": job.seed(),
        "network": _keras_config(state.network),
        "optimizer": _keras_config(state.optimizer),
        "parallel": dataclasses.asdict(get_parallel_config()),
        "ranks": job.size(),
        "devices_of_a_rank": job.topology().local_devices,
    }


def _keras_config(item):
    try:
        config = keras.saving.serialize_keras_object(item)
        return json.loads(json.dumps(config, allow_nan=False))
    except Exception:  # A custom `get_config` may raise any exception.
        return None


def describe_file(path: pathlib.Path) -> dict:
    """Flush a file to disk and return its manifest entry, `{"bytes": ..., "crc32": ...}`."""
    sync(path)
    return {"bytes": path.stat().st_size, "crc32": checksum(path)}


def checksum(path: pathlib.Path) -> str:
    """Return the CRC-32 of a file as eight hexadecimal digits."""
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return f"{value:08x}"


def write_manifest(folder: pathlib.Path, manifest: dict) -> None:
    """Write the manifest of a checkpoint with a checksum of its content, and flush it to disk.

    Raises:
        InputError: If the manifest could not be read again, for example because of an invalid file
            name.
    """
    body = json.dumps({"version": _VERSION, **manifest}, sort_keys=True)
    typed(json.loads(body), Manifest, MANIFEST)
    document = {"crc32": _crc32(body), "checkpoint": json.loads(body)}
    (folder / MANIFEST).write_text(json.dumps(document, indent=1, sort_keys=True))
    sync(folder / MANIFEST)


def read_manifest(folder: pathlib.Path) -> dict:
    """Return the manifest of a checkpoint, a dict.

    Raises:
        InputError: If the file is damaged, a field is missing or invalid, or a newer version wrote
            it.
    """
    path = inside(folder, MANIFEST)
    document = typed(read_json(path), _Document, path)
    body = document["checkpoint"]
    if document["crc32"] != _crc32(json.dumps(body, sort_keys=True)):
        raise InputError(f"{path} is damaged: its content does not match its checksum.")
    if body.get("version") != _VERSION:
        raise InputError(
            f"{path} has format version {short_repr(body.get('version'))}, but this version of "
            f"dtransformer reads version {_VERSION}. Update dtransformer."
        )
    return typed(body, Manifest, path)


def _crc32(text):
    return f"{zlib.crc32(text.encode()):08x}"
