"""Checkpoints on disk: a folder each, which is complete or not there at all.

    step-00000120/
      checkpoint.json               what is in it, with a checksum of every file
      checkpoint, state.index,
      state.data-00000-of-00002 …   TensorFlow's own checkpoint
      replicas/                     second copies of parts, where asked for
      tokenizer/ …                  what the user added

`tf.train.load_checkpoint("step-00000120").get_tensor(name)` reads any tensor whole.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import zlib

import tensorflow as tf

from dtransformer.errors import InputError
from dtransformer.trainers.checkpoint.boxes import spec_of

MANIFEST, PREFIX, REPLICAS = "checkpoint.json", "state", "replicas"
LATEST = "checkpoint"  # TensorFlow's own file with the prefix
_UNFINISHED, _REPLACED, _DAMAGED = ".unfinished", ".replaced", ".damaged"
_STEP = re.compile(r"step-(\d+)")
_VERSION = 1
_BYTES_AT_ONCE = 2**22


class Checkpoint:
    """A checkpoint that was written to the end.

    Args:
        path: its folder.

    Attributes:
        path: as given.
        manifest: dict, what checkpoint.json holds: `step`, `position` of the data, `seed`,
            `metrics`, `network` and `optimizer` (their Keras configs), `parallel` (the config
            of the job), `tensors` (name, and shape and type), `files` (name, and size, CRC-32
            and the rank that wrote it).

    Raises:
        InputError: there is no checkpoint, or its checkpoint.json is damaged.
    """

    def __init__(self, path):
        self.path = pathlib.Path(path)
        if not (self.path / MANIFEST).exists():
            aside = _aside(self.path)  # a kill came while it was replaced
            if not (aside / MANIFEST).exists():
                raise InputError(
                    f"{self.path}: there is no checkpoint here ({MANIFEST} is missing)"
                )
            self.path = aside
        self.manifest = _read_manifest(self.path / MANIFEST)

    @property
    def prefix(self):
        """The prefix of the files of TensorFlow's checkpoint."""
        return str(self.path / PREFIX)

    @property
    def step(self):
        """The number of updates before it was saved."""
        return self.manifest["step"]

    @property
    def shapes(self):
        """Dict of the names of all tensors and their shapes."""
        return {name: tuple(shape) for name, (shape, _) in self.manifest["tensors"].items()}

    def shapes_of(self, *kinds):
        """Return those of `shapes` whose names begin with one of some words."""
        return {name: shape for name, shape in self.shapes.items() if name.startswith(kinds)}

    def file_names(self):
        """Return the names of all files, in a fixed order."""
        return sorted(self.manifest["files"])

    def problem_with(self, name):
        """Return what is wrong with a file: "" where nothing is. It is read as a whole."""
        expected, path = self.manifest["files"][name], self.path / name
        try:
            size = path.stat().st_size
            if size != expected["bytes"]:
                return f"{path} has {size:,} bytes, {expected['bytes']:,} were written"
            found = checksum(path)
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
        if found != expected["crc32"]:
            return f"{path} is damaged: its checksum is {found}, {expected['crc32']} was written"
        return ""

    def problems(self, names=None):
        """Return what is wrong with files, by default all: a dict of names and texts."""
        names = self.file_names() if names is None else names
        found = {name: self.problem_with(name) for name in names}
        return {name: problem for name, problem in found.items() if problem}

    def repair(self, name):
        """Replace a lost or damaged part by its replica; return whether there is a good one."""
        replica = f"{REPLICAS}/{name}"
        if replica not in self.manifest["files"] or self.problem_with(replica):
            return False
        fresh = self.path / f"{name}{_UNFINISHED}"
        try:
            shutil.copyfile(self.path / replica, fresh)
            _sync(fresh)
            os.replace(fresh, self.path / name)
        except OSError:  # the disk is full, or may not be written
            fresh.unlink(missing_ok=True)
            return False
        return True


def open_or_latest(path):
    """Return the checkpoints that a path stands for, the one to take first first.

    Args:
        path: a checkpoint's folder, or a folder of checkpoints.

    Raises:
        InputError: there is none.
    """
    path = pathlib.Path(path)
    if (path / MANIFEST).exists() or (_aside(path) / MANIFEST).exists():
        return [path]
    found = [folder for _, folder in reversed(saved_steps(path))]
    if found:
        return found
    if not path.exists():
        raise InputError(f"{path}: there is no such folder; name a checkpoint or a folder of them")
    raise InputError(
        f"{path}: there is no checkpoint here; complete ones have a {MANIFEST}, folders of them are "
        "named step-NUMBER"
    )


def saved_steps(folder):
    """Return (step, path) of all complete checkpoints of a folder, the oldest first."""
    folder = pathlib.Path(folder)
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        name = path.name.removesuffix(_REPLACED)
        match = _STEP.fullmatch(name)
        if match and (path / MANIFEST).exists():
            found[int(match[1])] = folder / name
    return sorted(found.items())


def folder_of(step):
    """Return the name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


def begin(path, num_bytes, overwrite):
    """Make the folder that a checkpoint is written to, `unfinished(path)`.

    What earlier jobs left unfinished beside it is removed.

    Args:
        path: of the checkpoint.
        num_bytes: its size.
        overwrite: whether there may be a checkpoint already, which it replaces.

    Raises:
        InputError: the folder cannot be written, the disk is full, or there is something
            already.
    """
    path = pathlib.Path(path)
    if path.exists() and not (overwrite and (path / MANIFEST).exists()):
        kind = "a checkpoint" if (path / MANIFEST).exists() else "something that is no checkpoint"
        raise InputError(f"{path}: there is {kind} already; choose another path")
    fresh = unfinished(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in {fresh, *path.parent.glob(f"step-*{_UNFINISHED}")}:
            shutil.rmtree(left, ignore_errors=not left.exists())
        fresh.mkdir()
        free = shutil.disk_usage(path.parent).free
    except OSError as error:
        raise InputError(
            f"{path.parent}: a checkpoint cannot be written here ({error.strerror}); give a folder "
            "that may be written"
        ) from None
    if free < num_bytes:
        shutil.rmtree(fresh)
        raise InputError(
            f"{path.parent}: the disk has {free / 2**20:,.0f} MiB left, and a checkpoint takes "
            f"{num_bytes / 2**20:,.0f} MiB: make room, or keep fewer checkpoints"
        )


def unfinished(path):
    """Return where a checkpoint is written until it is complete."""
    return path.with_name(path.name + _UNFINISHED)


def commit(path, manifest):
    """Let a checkpoint that is written be the one of its path, at once.

    Args:
        path: of the checkpoint.
        manifest: dict; see `Checkpoint`.
    """
    fresh = unfinished(path)
    body = json.dumps({"version": _VERSION, **manifest}, sort_keys=True)
    document = {"crc32": _hex(zlib.crc32(body.encode())), "checkpoint": json.loads(body)}
    (fresh / MANIFEST).write_text(json.dumps(document, indent=1, sort_keys=True))
    _sync(fresh / MANIFEST)
    for folder in (fresh, *(path for path in fresh.rglob("*") if path.is_dir())):
        _sync(folder)
    aside = _aside(path)
    if path.exists():
        if aside.exists():
            shutil.rmtree(aside)
        os.rename(path, aside)
    os.rename(fresh, path)
    _sync(path.parent)
    if aside.exists():
        shutil.rmtree(aside)


def remove(path):
    """Remove a checkpoint; what a kill leaves of it is not taken for one."""
    shutil.rmtree(_aside(path), ignore_errors=True)
    doomed = unfinished(path)
    shutil.rmtree(doomed, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, doomed)
        shutil.rmtree(doomed)


def data_file(number, count):
    """Return the name that TensorFlow gives one of several files of data."""
    return f"{PREFIX}.data-{number:05d}-of-{count:05d}"


def set_aside(path):
    """Rename a damaged checkpoint, so that it is not counted among the others."""
    path = pathlib.Path(path)
    doomed = path.with_name(path.name + _DAMAGED)
    if doomed.exists():
        shutil.rmtree(doomed)
    os.rename(path if path.exists() else _aside(path), doomed)


def headless_steps(folder):
    """Return the paths of a folder's checkpoints that have lost their checkpoint.json."""
    folder = pathlib.Path(folder)
    return [
        path
        for path in sorted(folder.iterdir() if folder.is_dir() else ())
        if _STEP.fullmatch(path.name) and path.is_dir() and not (path / MANIFEST).exists()
    ]


def describe(path):
    """Bring a file to the disk; return its size and checksum, as manifests have them."""
    _sync(path)
    return {"bytes": path.stat().st_size, "crc32": checksum(path)}


def checksum(path):
    """Return the CRC-32 of a file, eight hexadecimal digits."""
    value = 0
    with open(path, "rb") as file:
        while block := file.read(_BYTES_AT_ONCE):
            value = zlib.crc32(block, value)
    return _hex(value)


def _hex(value):
    return f"{value:08x}"


def _aside(path):
    return path.with_name(path.name + _REPLACED)


def _sync(path):
    """Wait until a file, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_manifest(path):
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        body = document["checkpoint"]
        is_whole = document["crc32"] == _hex(zlib.crc32(json.dumps(body, sort_keys=True).encode()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged: it cannot be read ({error})") from None
    if not is_whole:
        raise InputError(f"{path} is damaged: its checksum is not that of its content")
    if body["version"] != _VERSION:
        raise InputError(
            f"{path} is of format {body['version']}, this version reads {_VERSION}: update dtransformer"
        )
    return body


def read_part(checkpoint, held):
    """Return a rank's part of a tensor, read from a `Checkpoint`; see `state.Held`."""
    return held.put_together(lambda box: read_box(checkpoint, held.name, spec_of(held.shape, box)))


def read_box(checkpoint, name, spec=""):
    """Return a box of a tensor; TensorFlow compares its own checksum of what it reads.

    Args:
        checkpoint: a `Checkpoint`.
        name: of the tensor.
        spec: see `boxes.spec_of`.
    """
    dtype = checkpoint.manifest["tensors"][name][1]
    with tf.device("CPU:0"):
        (value,) = tf.raw_ops.RestoreV2(
            prefix=checkpoint.prefix,
            tensor_names=[name],
            shape_and_slices=[spec],
            dtypes=[tf.as_dtype(dtype)],
        )
    return value
