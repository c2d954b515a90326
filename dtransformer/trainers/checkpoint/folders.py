"""Folders of checkpoints: a checkpoint is complete, or it is not there at all.

    step-00000120/
      checkpoint.json               the manifest: what it holds, with a checksum of every file
      checkpoint, state.index,
      state.data-00000-of-00002 …   TensorFlow's own checkpoint
      replicas/                     second copies of some files, where asked for
      tokenizer/ …                  what the user added

While it is written its name ends with `.unfinished`; a damaged one that was renamed, so that it is
not counted, with `.damaged`; and one that is being replaced, for a moment, with `.replaced`.
"""

import contextlib
import os
import pathlib
import re
import shutil

from dtransformer.errors import InputError
from dtransformer.trainers.checkpoint.manifest import MANIFEST, sync, write_manifest

_UNFINISHED, _REPLACED, _DAMAGED = ".unfinished", ".replaced", ".damaged"
_STEP = re.compile(r"step-(\d+)")


def step_folder(step: int) -> str:
    """Return the name of the folder with a step's checkpoint.

    Example:

    >>> step_folder(120)
    'step-00000120'
    """
    return f"step-{step:08d}"


def find_checkpoint(path: str | os.PathLike) -> pathlib.Path | None:
    """Return the folder of the checkpoint of a path; None where there is none.

    A kill may have come while it was replaced: then it is the one that was being replaced.
    """
    path = pathlib.Path(path)
    for folder in (path, replaced(path)):
        if (folder / MANIFEST).exists():
            return folder
    return None


def checkpoints_of(path: str | os.PathLike) -> list[pathlib.Path]:
    """Return the checkpoints that a path names, the one to use first first.

    Args:
        path: a checkpoint's folder, or a folder of checkpoints, of which the newest comes first.

    Raises:
        InputError: there is none.
    """
    path = pathlib.Path(path)
    if find_checkpoint(path) is not None:
        return [path]
    found = [folder for _, folder in reversed(saved_steps(path))]
    if found:
        return found
    if not path.exists():
        raise InputError(
            f"{path}: there is no such folder; give a checkpoint's folder, or a folder of checkpoints"
        )
    raise InputError(
        f"{path}: there is no checkpoint here; a complete one has a {MANIFEST}, and in a folder of "
        "checkpoints each is named step-NUMBER"
    )


def saved_steps(folder: str | os.PathLike) -> list[tuple[int, pathlib.Path]]:
    """Return (step, path) of all complete checkpoints in a folder, the oldest first."""
    folder = pathlib.Path(folder)
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        name = path.name.removesuffix(_REPLACED)
        match = _STEP.fullmatch(name)
        if match and (path / MANIFEST).exists():
            found[int(match[1])] = folder / name
    return sorted(found.items())


def folders_without_manifest(folder: str | os.PathLike) -> list[pathlib.Path]:
    """Return the checkpoints in a folder that have lost their manifest."""
    folder = pathlib.Path(folder)
    return [
        path
        for path in sorted(folder.iterdir() if folder.is_dir() else ())
        if _STEP.fullmatch(path.name) and path.is_dir() and not (path / MANIFEST).exists()
    ]


def begin(path: pathlib.Path, num_bytes: int, overwrite: bool) -> None:
    """Make the folder that a checkpoint is written to, `unfinished(path)`.

    What earlier jobs left unfinished next to it is removed.

    Args:
        path: the checkpoint's folder.
        num_bytes: size of the checkpoint.
        overwrite: whether it may replace a checkpoint.

    Raises:
        InputError: the path is taken, the folder cannot be written, or the disk is too full.
    """
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
            f"{path.parent}: a checkpoint cannot be written here ({error.strerror}); choose a folder "
            "that you may write to"
        ) from None
    if free < num_bytes:
        shutil.rmtree(fresh)
        raise InputError(
            f"{path.parent}: the disk has {free / 2**20:,.0f} MiB left, and a checkpoint takes "
            f"{num_bytes / 2**20:,.0f} MiB: make room, or keep fewer checkpoints"
        )


def unfinished(path: pathlib.Path) -> pathlib.Path:
    """Return the folder that a checkpoint is written to until it is complete."""
    return path.with_name(path.name + _UNFINISHED)


def replaced(path: pathlib.Path) -> pathlib.Path:
    """Return where a checkpoint lies for the moment in which another one takes its place."""
    return path.with_name(path.name + _REPLACED)


def commit(path: pathlib.Path, manifest: dict) -> None:
    """Complete a checkpoint that was written to `unfinished(path)`, and rename it to `path`.

    Args:
        path: the checkpoint's folder.
        manifest: see `saved_checkpoint.Checkpoint`.
    """
    fresh, old = unfinished(path), replaced(path)
    write_manifest(fresh, manifest)
    for folder in (fresh, *(inner for inner in fresh.rglob("*") if inner.is_dir())):
        sync(folder)
    if path.exists():
        if old.exists():
            shutil.rmtree(old)
        os.rename(path, old)
    os.rename(fresh, path)
    sync(path.parent)
    if old.exists():
        shutil.rmtree(old)


def remove(path: pathlib.Path) -> None:
    """Remove a checkpoint; a kill meanwhile leaves nothing that looks like a complete one."""
    shutil.rmtree(replaced(path), ignore_errors=True)
    doomed = unfinished(path)
    shutil.rmtree(doomed, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, doomed)
        shutil.rmtree(doomed)


def set_aside(path: str | os.PathLike) -> None:
    """Rename a damaged checkpoint, so that it is not counted among the others."""
    path = pathlib.Path(path)
    target = path.with_name(path.name + _DAMAGED)
    if target.exists():
        shutil.rmtree(target)
    os.rename(path if path.exists() else replaced(path), target)
