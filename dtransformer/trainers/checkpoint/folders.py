"""Folders of checkpoints: a checkpoint is complete, or it is not there at all.

    step-00000120/
      checkpoint.json               the manifest: what it holds, with a checksum of every file
      checkpoint, state.index,
      state.data-00000-of-00002 …   TensorFlow's own checkpoint
      replicas/                     second copies of some files, where asked for
      tokenizer/ …                  what the user added

While it is written its name ends with `.unfinished`; a damaged one that was renamed, so that it is
not counted, with `.damaged`; and one that is being replaced, for a moment, with `.replaced`. The
manifest says which step a checkpoint is of: a folder that was renamed is not a newer one.
"""

import contextlib
import itertools
import os
import pathlib
import re
import shutil

from dtransformer.errors import InputError
from dtransformer.files import beside, free_path, sync, warn_of_taken, writing
from dtransformer.trainers.checkpoint.manifest import MANIFEST, read_manifest, write_manifest

_UNFINISHED, _REPLACED, _DAMAGED = ".unfinished", ".replaced", ".damaged"
_STEP = re.compile(r"step-(\d+)(?:-\d+)?")  # with a number where one was taken


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
    return next((folder for folder in (path, replaced(path)) if _is_complete(folder)), None)


def checkpoints_of(path: str | os.PathLike) -> list[pathlib.Path]:
    """Return the checkpoints that a path names, the one to use first first.

    Args:
        path: a checkpoint's folder, or a folder of checkpoints, of which the newest comes first;
            also those that have lost their manifest, so that they are named.

    Raises:
        InputError: there is none.
    """
    path = pathlib.Path(path)
    if find_checkpoint(path) is not None:
        return [path]
    found = saved_steps(path)
    found += [(step_of(folder), folder) for folder in folders_without_manifest(path)]
    if found:
        return [folder for _, folder in sorted(found, reverse=True)]
    if not os.path.exists(path):
        raise InputError(
            f"{path}: there is no such folder; give a checkpoint's folder, or a folder of checkpoints"
        )
    raise InputError(
        f"{path}: there is no checkpoint here; a complete one has a {MANIFEST}, and in a folder of "
        "checkpoints each is named step-NUMBER"
    )


def saved_steps(folder: str | os.PathLike) -> list[tuple[int, pathlib.Path]]:
    """Return (step, path) of all complete checkpoints in a folder, the oldest first.

    The step is the manifest's; where that is damaged, the one of the folder's name.
    """
    folder = pathlib.Path(folder)
    names = {path.name.removesuffix(_REPLACED) for path in _inside(folder) if _is_complete(path)}
    paths = [folder / name for name in names if _STEP.fullmatch(name)]
    return sorted((_saved_step(path), path) for path in paths)


def _saved_step(path):
    try:
        return int(read_manifest(find_checkpoint(path))["step"])
    except (InputError, KeyError, TypeError, ValueError):
        return step_of(path)


def step_of(path: str | os.PathLike) -> int:
    """Return the step in the name of a checkpoint's folder; -1 where it has another name.

    Example:

    >>> step_of("checkpoints/step-00000120")
    120
    """
    match = _STEP.fullmatch(pathlib.Path(path).name)
    return int(match[1]) if match else -1


def folders_without_manifest(folder: str | os.PathLike) -> list[pathlib.Path]:
    """Return the checkpoints in a folder that have lost their manifest, or cannot be read."""
    return [
        path
        for path in sorted(_inside(folder))
        if _STEP.fullmatch(path.name)
        and (path.is_symlink() or os.path.isdir(path))
        and not _is_complete(path)
    ]


def _is_complete(path):
    return os.path.exists(path / MANIFEST)  # False where it cannot be read


def _inside(folder):
    """Return what is in a folder; nothing where it is none.

    Raises:
        InputError: it cannot be read.
    """
    try:
        return list(pathlib.Path(folder).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror})") from None


def begin(path: pathlib.Path, num_bytes: int, overwrite: bool) -> pathlib.Path:
    """Make the folder that a checkpoint is written to, `unfinished(path)`.

    What earlier jobs left unfinished next to it is removed. Where the path is taken, a warning
    names another one beside it.

    Args:
        path: the checkpoint's folder.
        num_bytes: size of the checkpoint.
        overwrite: whether it may replace a checkpoint.

    Returns:
        The checkpoint's folder.

    Raises:
        InputError: the folder cannot be written, or the disk is too full.
    """
    if os.path.lexists(path) and not (overwrite and _is_complete(path)):
        taken, path = path, free_path(path)
        warn_of_taken(taken, path)
    fresh = unfinished(path)
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in {fresh, *path.parent.glob(f"step-*{_UNFINISHED}")}:
            _remove_all(left)
        fresh.mkdir()
        free = shutil.disk_usage(path.parent).free
    if free < num_bytes:
        shutil.rmtree(fresh)
        raise InputError(
            f"{path.parent}: the disk has {free / 2**20:,.0f} MiB left, and a checkpoint takes "
            f"{num_bytes / 2**20:,.0f} MiB: make room, or keep fewer checkpoints"
        )
    return path


def unfinished(path: pathlib.Path) -> pathlib.Path:
    """Return the folder that a checkpoint is written to until it is complete."""
    return beside(path, _UNFINISHED)


def replaced(path: pathlib.Path) -> pathlib.Path:
    """Return where a checkpoint lies for the moment in which another one takes its place."""
    return beside(path, _REPLACED)


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
        _remove_all(old)
        os.rename(path, old)
    os.rename(fresh, path)
    sync(path.parent)
    _remove_all(old)


def remove(path: pathlib.Path) -> None:
    """Remove a checkpoint; a kill meanwhile leaves nothing that looks like a complete one.

    Of a link, what it points to stays.
    """
    _remove_all(replaced(path))
    doomed = unfinished(path)
    _remove_all(doomed)
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, doomed)
        _remove_all(doomed)


def _remove_all(path):
    if os.path.islink(path):
        os.unlink(path)
    elif os.path.lexists(path):
        shutil.rmtree(path)


def set_aside(path: str | os.PathLike) -> None:
    """Rename a damaged checkpoint, so that it is not counted among the others; it stays."""
    path = pathlib.Path(path)
    endings = (_DAMAGED + (f"-{number}" if number else "") for number in itertools.count())
    target = next(one for one in (beside(path, end) for end in endings) if not os.path.lexists(one))
    os.rename(path if os.path.lexists(path) else replaced(path), target)
