"""Atomic writes: write to a temporary file or folder, then rename it."""

import contextlib
import filecmp
import itertools
import os
import pathlib
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence

from dtransformer.errors import InputError

_PARTIAL = ".partial."


@contextlib.contextmanager
def convert_write_errors(path: str | os.PathLike) -> Iterator[None]:
    """Context manager that converts an `OSError` into an `InputError` with the path."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error).partition("\n")[0]
        raise InputError(
            f"{path}: cannot be written ({reason}). Free disk space or choose a writable path."
        ) from None


@contextlib.contextmanager
def atomic_write(
    path: str | os.PathLike, num_bytes: int = 0, parents: bool = False
) -> Iterator[pathlib.Path]:
    """Context manager for an atomic write: yield a temporary path, then rename it to `path`.

    The temporary file is in the same folder and has the same suffix. If an error or a kill
    interrupts the write, the old file stays unchanged.

    Args:
        path: File to write. If it is a link, the link's target is replaced.
        num_bytes: Bytes of disk space to check for before writing. Libraries such as HDF5 abort
            the process if the disk is full.
        parents: Boolean, whether missing parent folders are created.

    Raises:
        InputError: If the file cannot be written.

    Example:

    >>> with atomic_write("greeting.txt") as fresh:
    ...     _ = fresh.write_text("Good morning.")
    """
    target = pathlib.Path(os.path.realpath(path))
    fresh = partial_path(target)
    if os.path.lexists(target) and not target.is_file():
        raise InputError(
            f"{path}: cannot be written because it is not a regular file. Choose another path."
        )
    try:
        with convert_write_errors(path):
            if parents:
                target.parent.mkdir(parents=True, exist_ok=True)
            _reserve(fresh, num_bytes)
            yield fresh
            sync(fresh)
            os.replace(fresh, target)
            sync(target.parent)
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()


@contextlib.contextmanager
def add_to_folder(folder: str | os.PathLike, overwrite: bool = False) -> Iterator[pathlib.Path]:
    """Context manager that yields an empty folder and then moves its files into `folder`.

    Args:
        folder: Destination. It is created if it is missing.
        overwrite: Boolean, whether existing files with other content are replaced.

    Raises:
        InputError: If the folder cannot be written, or if a file with other content exists. In
            both cases no file is moved.

    Example:

    >>> with add_to_folder("greetings") as fresh:
    ...     _ = (fresh / "morning.txt").write_text("Good morning.")
    >>> with add_to_folder("greetings") as fresh:
    ...     _ = (fresh / "morning.txt").write_text("Good morning!")
    Traceback (most recent call last):
    ...
    dtransformer.errors.InputError: greetings/morning.txt already exists with other content. ...
    """
    folder = pathlib.Path(folder)
    with _temporary_folder(folder) as fresh:
        yield fresh
        if not overwrite and (conflict := _find_conflict(fresh, folder)):
            raise InputError(
                f"{conflict} already exists with other content. Choose another folder or add "
                "--overwrite."
            )
        _move(fresh, folder)


def write_into(
    folder: str | os.PathLike,
    write: Callable[[pathlib.Path], None],
    overwrite: bool = False,
    replaces: Sequence[str] = (),
) -> pathlib.Path:
    """Write files into a folder, or into a new folder beside it if they would replace others.

    An existing file never makes a long computation's result fail to save.

    Args:
        folder: Destination. It is created if it is missing.
        write: Function that receives an empty folder and writes the files there.
        overwrite: Boolean, whether existing files with other content are replaced.
        replaces: Glob patterns of existing files that would be read instead of the new ones.
            They are removed, or cause a new folder without `overwrite`.

    Returns:
        Path of the folder with the files. If it is not `folder`, a warning names it.

    Raises:
        InputError: If the folder cannot be written.

    Example:

    >>> def write_greeting(fresh):
    ...     _ = (fresh / "morning.txt").write_text("Good morning.")
    >>> [write_into("letters", write_greeting).as_posix() for _ in range(2)]
    ['letters', 'letters']
    """
    target = pathlib.Path(folder)
    if os.path.lexists(target) and not target.is_dir():
        target = free_path(target)
    with _temporary_folder(target) as fresh:
        write(fresh)
        if not overwrite and _find_conflict(fresh, target, replaces):
            target = _make_beside(target)
        replaced = [path for pattern in replaces for path in target.glob(pattern)]
        names = _move(fresh, target)
        for path in replaced:
            if path.name not in names:
                path.unlink(missing_ok=True)
    if target != pathlib.Path(folder):
        warn_occupied(folder, target)
    return target


def _make_beside(folder):
    """Create a folder beside `folder`, or inside it if it is the root of a mounted disk."""
    path = free_path(folder)
    with contextlib.suppress(OSError):
        path.mkdir()
        if path.stat().st_dev == folder.stat().st_dev:
            return path
        path.rmdir()
    path = free_path(folder / folder.name)
    path.mkdir()
    return path


def free_path(path: str | os.PathLike, ending: str = "") -> pathlib.Path:
    """Return a path that does not exist, with a number inserted before the ending.

    Example:

    >>> free_path("runs/mine.weights.h5", ".weights.h5").as_posix()
    'runs/mine-2.weights.h5'
    """
    path = append_to_name(path, "")
    stem = path.name.removesuffix(ending)
    numbered = (path.with_name(f"{stem}-{i}{ending}") for i in itertools.count(2))
    return next(candidate for candidate in numbered if not os.path.lexists(candidate))


def warn_occupied(path: str | os.PathLike, landed: pathlib.Path) -> None:
    """Warn that `path` was occupied and that the data was saved to `landed`."""
    warnings.warn(
        f"{path} already exists and was not changed. The new data was saved to {landed}. Choose "
        "another name, or set overwrite=True (--overwrite).",
        stacklevel=3,
    )


@contextlib.contextmanager
def _temporary_folder(folder):
    """Context manager that yields an empty temporary folder inside `folder`."""
    fresh = partial_path(folder / "folder")
    was_there = folder.is_dir()
    try:
        with convert_write_errors(folder):
            fresh.mkdir(parents=True)
            yield fresh
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        if not was_there:
            with contextlib.suppress(OSError):
                folder.rmdir()  # This fails if the folder has files.


def _find_conflict(fresh, folder, patterns=()):
    """Return the first existing path that conflicts with the new files, or `None`.

    Conflicts are files with other content, files where a folder is needed, and files that match a
    pattern in `patterns` but have no new version.
    """
    for name in _file_names(fresh):
        target = folder / name
        if not target.parent.is_dir() and os.path.lexists(target.parent):
            return target.parent
        if os.path.lexists(target) and not filecmp.cmp(fresh / name, target, shallow=False):
            return target
    hiding = (path for pattern in patterns for path in folder.glob(pattern))
    return next((path for path in hiding if not (fresh / path.name).exists()), None)


def _move(fresh, folder):
    """Move all files and subfolders into a folder and return the names of the files."""
    names = _file_names(fresh)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(fresh / name, folder / name)
    return names


def _file_names(folder):
    """Return the sorted relative paths of all files below a folder."""
    return sorted(x.relative_to(folder).as_posix() for x in folder.rglob("*") if not x.is_dir())


@contextlib.contextmanager
def new_folder(
    folder: str | os.PathLike, may_replace: Callable[[pathlib.Path], bool] | None = None
) -> Iterator[pathlib.Path]:
    """Context manager for an atomic folder: yield a temporary folder, then rename it to `folder`.

    An error or a kill leaves the old folder unchanged. A kill between the two final renames leaves
    the old folder beside it with the ending `.replaced`.

    Args:
        folder: Folder to write, missing or empty. Missing parents are created.
        may_replace: Function that receives an existing folder with files and returns whether it
            may be replaced.

    Raises:
        InputError: If the folder cannot be written, or if it must not be replaced.

    Example:

    >>> with new_folder("letters") as fresh:
    ...     _ = (fresh / "morning.txt").write_text("Good morning.")
    """
    target = pathlib.Path(os.path.realpath(folder))
    fresh = partial_path(target)
    old = append_to_name(partial_path(target), ".replaced")
    try:
        with convert_write_errors(folder):
            has_files = os.path.lexists(target) and bool(os.listdir(target))
            if has_files and not (may_replace is not None and may_replace(target)):
                raise InputError(
                    f"{folder}: is not empty. Choose another folder or add --overwrite."
                )
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
            yield fresh
            for path in (*fresh.rglob("*"), fresh):
                sync(path)
            if has_files:
                os.rename(target, old)
            os.rename(fresh, target)  # This also replaces an empty folder.
            sync(target.parent)
    finally:
        if not os.path.lexists(target) and old.is_dir():
            os.rename(old, target)
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def partial_path(path: pathlib.Path) -> pathlib.Path:
    """Return the temporary path for writing a file: the same folder and suffix."""
    # Process ids repeat on other hosts, so the name also contains the rank.
    writer = f"{os.getpid()}-{os.environ.get('HOROVOD_RANK', '0')}"
    return path.with_name(f"{_PARTIAL}{writer}.{path.name}")


def is_partial(name: str) -> bool:
    """Return whether a file name belongs to a `partial_path`."""
    return name.startswith(_PARTIAL)


def append_to_name(path: str | os.PathLike, ending: str) -> pathlib.Path:
    """Return a path in the same folder with `ending` appended to the name.

    Example:

    >>> append_to_name("runs/small/", ".replaced").as_posix()
    'runs/small.replaced'
    """
    path = pathlib.Path(path)
    if path.name in ("", ".."):  # Paths such as "." have no name.
        path = pathlib.Path(os.path.abspath(path))
    return path.parent / (path.name + ending)


def _reserve(path, num_bytes):
    """Create an empty file and raise `OSError` if the disk has no room for `num_bytes`."""
    with open(path, "wb") as file:
        if num_bytes:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            file.truncate(0)


def sync(path: pathlib.Path) -> None:
    """Flush a file, or a folder's directory entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
