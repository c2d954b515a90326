"""Folders of checkpoints. A folder without an ending always contains a complete checkpoint.

    step-00000120/
      checkpoint.json               manifest: content, and a checksum of every file
      checkpoint, state.index,
      state.data-00000-of-00002 …   TensorFlow's checkpoint
      replicas/                     optional second copies of some files
      tokenizer/ …                  the user's assets

Other folders end with `.unfinished` while a checkpoint is being written, with `.replaced` while
another checkpoint takes its place, and with `.damaged` if it was renamed to be ignored. The step of
a checkpoint is read from its manifest, so renaming a folder does not make it newer.
"""

import contextlib
import itertools
import os
import pathlib
import re
import shutil

from dtransformer.errors import InputError
from dtransformer.files import append_to_name, convert_write_errors, free_path, sync, warn_occupied
from dtransformer.trainers.checkpoint.manifest import MANIFEST, read_manifest, write_manifest

_UNFINISHED = ".unfinished"
_REPLACED = ".replaced"
_DAMAGED = ".damaged"
_STEP = re.compile(r"step-(\d+)(?:-\d+)?")  # A second number follows if the name was taken.


def step_folder(step: int) -> str:
    """Return the folder name of a step's checkpoint.

    Example:

    >>> step_folder(120)
    'step-00000120'
    """
    return f"step-{step:08d}"


def find_checkpoint(path: str | os.PathLike) -> pathlib.Path | None:
    """Return the folder of the complete checkpoint with a path, or `None`.

    If the process was killed while replacing a checkpoint, this is the folder of the old one.
    """
    path = pathlib.Path(path)
    return next((folder for folder in (path, replaced_path(path)) if _is_complete(folder)), None)


def list_checkpoints(path: str | os.PathLike) -> list[pathlib.Path]:
    """Return the checkpoints at a path, in the order to try them.

    Args:
        path: Folder of a checkpoint. Or a folder of checkpoints, which are returned from newest to
            oldest. Checkpoints without a manifest are included, so that errors name them.

    Raises:
        InputError: If there is no checkpoint.
    """
    path = pathlib.Path(path)
    if find_checkpoint(path) is not None:
        return [path]
    checkpoints = saved_steps(path)
    checkpoints += [(parse_step(folder), folder) for folder in folders_without_manifest(path)]
    if checkpoints:
        return [folder for _, folder in sorted(checkpoints, reverse=True)]
    if not os.path.exists(path):
        raise InputError(
            f"{path} does not exist. Pass the folder of a checkpoint, or a folder of checkpoints."
        )
    raise InputError(
        f"{path} contains no checkpoint. A checkpoint contains a {MANIFEST}, and a folder of "
        "checkpoints contains folders named step-NUMBER."
    )


def saved_steps(folder: str | os.PathLike) -> list[tuple[int, pathlib.Path]]:
    """Return `(step, path)` tuples of all complete checkpoints in a folder, from oldest to newest.

    The step is read from the manifest, or from the folder's name if the manifest is damaged.
    """
    folder = pathlib.Path(folder)
    names = {
        path.name.removesuffix(_REPLACED) for path in _list_folder(folder) if _is_complete(path)
    }
    paths = [folder / name for name in names if _STEP.fullmatch(name)]
    return sorted((_saved_step(path), path) for path in paths)


def _saved_step(path):
    try:
        return int(read_manifest(find_checkpoint(path))["step"])
    except (InputError, KeyError, TypeError, ValueError):
        return parse_step(path)


def parse_step(path: str | os.PathLike) -> int:
    """Return the step in the name of a checkpoint's folder, or -1 for other names.

    Example:

    >>> parse_step("checkpoints/step-00000120")
    120
    """
    match = _STEP.fullmatch(pathlib.Path(path).name)
    return int(match[1]) if match else -1


def folders_without_manifest(folder: str | os.PathLike) -> list[pathlib.Path]:
    """Return the checkpoints in a folder whose manifest is missing or inaccessible."""
    return [
        path
        for path in sorted(_list_folder(folder))
        if _STEP.fullmatch(path.name)
        and (path.is_symlink() or os.path.isdir(path))
        and not _is_complete(path)
    ]


def _is_complete(path):
    return os.path.exists(path / MANIFEST)  # False without permission to read.


def _list_folder(folder):
    """Return the paths in a folder, or an empty list if it is not a folder.

    Raises:
        InputError: If the folder cannot be read.
    """
    try:
        return list(pathlib.Path(folder).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise InputError(f"{folder} cannot be read ({error.strerror}).") from None


def create_folder(path: pathlib.Path, num_bytes: int, overwrite: bool) -> pathlib.Path:
    """Create the folder `unfinished_path(path)`, which a checkpoint is written to.

    Folders of unfinished checkpoints beside it are removed. If the path is taken, a warning names
    another path, which is used instead.

    Args:
        path: Folder of the new checkpoint.
        num_bytes: Size of the checkpoint in bytes.
        overwrite: Whether a complete checkpoint at the path may be replaced.

    Returns:
        The path of the new checkpoint.

    Raises:
        InputError: If the folder cannot be written, or if the disk has less than `num_bytes` left.
    """
    if os.path.lexists(path) and not (overwrite and _is_complete(path)):
        requested = path
        path = free_path(path)
        warn_occupied(requested, path)
    new_folder = unfinished_path(path)
    with convert_write_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in {new_folder, *path.parent.glob(f"step-*{_UNFINISHED}")}:
            _remove_all(folder)
        new_folder.mkdir()
        free = shutil.disk_usage(path.parent).free
    if free < num_bytes:
        shutil.rmtree(new_folder)
        raise InputError(
            f"{path.parent}: the disk has {free / 2**20:,.0f} MiB left, but a checkpoint needs "
            f"{num_bytes / 2**20:,.0f} MiB. Free disk space, or keep fewer checkpoints."
        )
    return path


def unfinished_path(path: pathlib.Path) -> pathlib.Path:
    """Return the path of a checkpoint's folder while it is being written."""
    return append_to_name(path, _UNFINISHED)


def replaced_path(path: pathlib.Path) -> pathlib.Path:
    """Return the path of a checkpoint's folder while another checkpoint takes its place."""
    return append_to_name(path, _REPLACED)


def commit(path: pathlib.Path, manifest: dict) -> None:
    """Complete the checkpoint in `unfinished_path(path)` and rename it to `path`.

    Args:
        path: Folder of the checkpoint.
        manifest: Dict, see `saved_checkpoint.Checkpoint`.
    """
    new_folder = unfinished_path(path)
    old_folder = replaced_path(path)
    write_manifest(new_folder, manifest)
    sync(new_folder)
    for inner in new_folder.rglob("*"):
        if inner.is_dir():
            sync(inner)
    if path.exists():
        _remove_all(old_folder)
        os.rename(path, old_folder)
    os.rename(new_folder, path)
    sync(path.parent)
    _remove_all(old_folder)


def remove(path: pathlib.Path) -> None:
    """Remove a checkpoint, or a link to one.

    If the process is killed, the remaining files do not look like a complete checkpoint.
    """
    _remove_all(replaced_path(path))
    folder = unfinished_path(path)
    _remove_all(folder)
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, folder)
        _remove_all(folder)


def _remove_all(path):
    if os.path.islink(path):
        os.unlink(path)
    elif os.path.lexists(path):
        shutil.rmtree(path)


def set_aside(path: str | os.PathLike) -> None:
    """Rename a damaged checkpoint, so that it is ignored but not deleted."""
    path = pathlib.Path(path)
    target = append_to_name(path, _DAMAGED)
    for i in itertools.count(1):
        if not os.path.lexists(target):
            break
        target = append_to_name(path, f"{_DAMAGED}-{i}")
    os.rename(path if os.path.lexists(path) else replaced_path(path), target)
