"""`checkpoint.json`, the manifest: what a checkpoint holds, with a checksum of every file."""

import dataclasses
import json
import os
import pathlib
import time
import zlib

import keras
import tensorflow as tf

from dtransformer.errors import InputError
from dtransformer.parallel import job
from dtransformer.parallel.config import get_parallel_config
from dtransformer.trainers.checkpoint.training_state import TrainingState
from dtransformer.version import __version__

MANIFEST = "checkpoint.json"
_VERSION = 1
_CHUNK_BYTES = 2**22


def describe_run(state: TrainingState) -> dict:
    """Return what manifests say about a run: steps, configs, versions and layout."""
    return {
        "dtransformer": __version__,
        "tensorflow": tf.__version__,
        "saved_at": time.time(),
        "step": state.step,
        "seed": job.seed(),
        "network": _keras_config(state.network),
        "optimizer": _keras_config(state.optimizer),
        "parallel": dataclasses.asdict(get_parallel_config()),
        "ranks": job.size(),
        "devices_of_a_rank": job.topology().local_devices,
    }


def _keras_config(item):
    try:
        return json.loads(json.dumps(keras.saving.serialize_keras_object(item)))
    except Exception:  # whatever a user's get_config raises
        return None


def describe_file(path: pathlib.Path) -> dict:
    """Wait until a file is on the disk; return what manifests say about it: `bytes`, `crc32`."""
    sync(path)
    return {"bytes": path.stat().st_size, "crc32": checksum(path)}


def checksum(path: pathlib.Path) -> str:
    """Return the CRC-32 of a file, eight hexadecimal digits."""
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return _hexadecimal(value)


def write_manifest(folder: pathlib.Path, manifest: dict) -> None:
    """Write the manifest of a checkpoint, with a checksum of its own, and wait for the disk."""
    body = json.dumps({"version": _VERSION, **manifest}, sort_keys=True)
    document = {"crc32": _crc32_of(body), "checkpoint": json.loads(body)}
    (folder / MANIFEST).write_text(json.dumps(document, indent=1, sort_keys=True))
    sync(folder / MANIFEST)


def read_manifest(folder: pathlib.Path) -> dict:
    """Return the manifest of a checkpoint.

    Raises:
        InputError: the file is damaged, or was written by a newer version.
    """
    path = folder / MANIFEST
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        body = document["checkpoint"]
        is_intact = document["crc32"] == _crc32_of(json.dumps(body, sort_keys=True))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged: it cannot be read ({error})") from None
    if not is_intact:
        raise InputError(f"{path} is damaged: its content does not match its checksum")
    if body["version"] != _VERSION:
        raise InputError(
            f"{path} has format version {body['version']}, and this dtransformer reads version "
            f"{_VERSION}: update dtransformer"
        )
    return body


def sync(path: pathlib.Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _crc32_of(text):
    return _hexadecimal(zlib.crc32(text.encode()))


def _hexadecimal(value):
    return f"{value:08x}"
