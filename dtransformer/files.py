"""Files that are complete or as they were: written beside, then renamed."""

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
def writing(path: str | os.PathLike) -> Iterator[None]:
    """Inside the `with` block an error of the file system is an `InputError` that names a path."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error).partition("\n")[0]
        raise InputError(
            f"{path}: cannot be written ({reason}): make room, or give a place that you may write to"
        ) from None


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike, num_bytes: int = 0, parents: bool = False
) -> Iterator[pathlib.Path]:
    """Give a path beside a file's, with the same ending; what is written there becomes the file.

    An error, or a kill, leaves the file as it was.

    Args:
        path: the file to write. Of a link, what it points to is written.
        num_bytes: space that has to be there before writing begins: libraries such as HDF5 end
            the process when the disk is full.
        parents: whether folders above it are made where they are missing.

    Raises:
        InputError: the file cannot be written.

    Example:

    >>> with replacing("greeting.txt") as fresh:
    ...     _ = fresh.write_text("Good morning.")
    """
    target = pathlib.Path(os.path.realpath(path))
    fresh = partial_path(target)
    if os.path.lexists(target) and not target.is_file():
        raise InputError(f"{path}: cannot be written, as it is no ordinary file: give another path")
    try:
        with writing(path):
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
def adding_to(folder: str | os.PathLike, overwrite: bool = False) -> Iterator[pathlib.Path]:
    """Give an empty folder; all files that are written there go to another one at the end.

    Args:
        folder: where they go; made where it is missing.
        overwrite: whether they replace files of other content.

    Raises:
        InputError: the folder cannot be written to, or has a file of other content; none is
            moved then.

    Example:

    >>> with adding_to("greetings") as fresh:
    ...     _ = (fresh / "morning.txt").write_text("Good morning.")
    >>> with adding_to("greetings") as fresh:
    ...     _ = (fresh / "morning.txt").write_text("Good morning!")
    Traceback (most recent call last):
    ...
    dtransformer.errors.InputError: greetings/morning.txt is there with other content: ...
    """
    folder = pathlib.Path(folder)
    with _fresh_in(folder) as fresh:
        yield fresh
        if not overwrite and (taken := _taken(fresh, folder)):
            raise InputError(
                f"{taken} is there with other content: give another folder, or --overwrite it"
            )
        _move(fresh, folder)


def write_into(
    folder: str | os.PathLike,
    write: Callable[[pathlib.Path], None],
    overwrite: bool = False,
    replaces: Sequence[str] = (),
) -> pathlib.Path:
    """Write files into a folder; where it has others by their names, into one beside it.

    What took hours to compute is not lost to a name that is taken.

    Args:
        folder: where they go; made where it is missing.
        write: a function of an empty folder that writes them there.
        overwrite: whether they replace files of other content.
        replaces: patterns of the names of files that would be read in place of the new ones.

    Returns:
        The folder that they are in. A warning says so where it is another one.

    Raises:
        InputError: nothing can be written there.

    Example:

    >>> one, other = (lambda fresh, x=x: (fresh / "n").write_text(x) for x in "12")
    >>> [write_into("numbers", x).as_posix() for x in (one, one)]
    ['numbers', 'numbers']
    """
    target = pathlib.Path(folder)
    if os.path.lexists(target) and not target.is_dir():
        target = free_path(target)
    with _fresh_in(target) as fresh:
        write(fresh)
        if not overwrite and _taken(fresh, target, replaces):
            target = _made_beside(target)
        stale = [path for pattern in replaces for path in target.glob(pattern)]
        names = _move(fresh, target)
        for path in stale:
            if path.name not in names:
                path.unlink(missing_ok=True)
    if target != pathlib.Path(folder):
        warn_of_taken(folder, target)
    return target


def _made_beside(folder):
    """Make a folder beside one; or inside of it, as where it is a disk of its own."""
    found = free_path(folder)
    with contextlib.suppress(OSError):
        found.mkdir()
        if found.stat().st_dev == folder.stat().st_dev:
            return found
        found.rmdir()
    found = free_path(folder / folder.name)
    found.mkdir()
    return found


def free_path(path: str | os.PathLike, ending: str = "") -> pathlib.Path:
    """Return a path beside one that is taken: with a number before its ending.

    Example:

    >>> free_path("runs/mine.weights.h5", ".weights.h5").as_posix()
    'runs/mine-2.weights.h5'
    """
    path = beside(path, "")
    stem = path.name.removesuffix(ending)
    numbered = (path.with_name(f"{stem}-{number}{ending}") for number in itertools.count(2))
    return next(one for one in numbered if not os.path.lexists(one))


def warn_of_taken(path: str | os.PathLike, landed: pathlib.Path) -> None:
    """Warn that something else is at a path, and that what was saved is beside it."""
    warnings.warn(
        f"{path} is there already, and is kept: what was to be saved there is in {landed}; give "
        "another name, or overwrite=True (--overwrite)",
        stacklevel=3,
    )


@contextlib.contextmanager
def _fresh_in(folder):
    """Give an empty folder inside of one, which is made where it is missing."""
    fresh = partial_path(folder / "folder")
    was_there = folder.is_dir()
    try:
        with writing(folder):
            fresh.mkdir(parents=True)
            yield fresh
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        if not was_there:
            with contextlib.suppress(OSError):
                folder.rmdir()  # it is empty: nothing was written


def _taken(fresh, folder, others=()):
    """Return the first file that new ones would replace, or be hidden by; None for none."""
    for name in _names(fresh):
        target = folder / name
        if not target.parent.is_dir() and os.path.lexists(target.parent):
            return target.parent
        if os.path.lexists(target) and not filecmp.cmp(fresh / name, target, shallow=False):
            return target
    hiding = (path for pattern in others for path in folder.glob(pattern))
    return next((path for path in hiding if not (fresh / path.name).exists()), None)


def _move(fresh, folder):
    """Move all files into a folder, those of folders too; return their names."""
    names = _names(fresh)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(fresh / name, folder / name)
    return names


def _names(folder):
    """Return the names of all files of a folder, with those of the folders in it, in their order."""
    return sorted(x.relative_to(folder).as_posix() for x in folder.rglob("*") if not x.is_dir())


@contextlib.contextmanager
def new_folder(
    folder: str | os.PathLike, may_replace: Callable[[pathlib.Path], bool] | None = None
) -> Iterator[pathlib.Path]:
    """Give a folder beside one; what is written there becomes that one, complete.

    An error leaves what was there as it was, and so does a kill; one between the two renames at the
    end leaves what is replaced beside it, in a folder whose name ends in `.replaced`.

    Args:
        folder: the folder, which is missing or empty. Folders above it are made.
        may_replace: a function of a folder with files that is there: whether it is replaced.

    Raises:
        InputError: the folder cannot be written, or may not be replaced.

    Example:

    >>> with new_folder("letters") as fresh:
    ...     _ = (fresh / "morning.txt").write_text("Good morning.")
    """
    target = pathlib.Path(os.path.realpath(folder))
    fresh, old = partial_path(target), beside(partial_path(target), ".replaced")
    try:
        with writing(folder):
            has_files = os.path.lexists(target) and bool(os.listdir(target))
            if has_files and not (may_replace is not None and may_replace(target)):
                raise InputError(f"{folder}: is not empty: give another folder, or --overwrite it")
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
            yield fresh
            for path in (*fresh.rglob("*"), fresh):
                sync(path)
            if has_files:
                os.rename(target, old)
            os.rename(fresh, target)  # an empty folder is replaced
            sync(target.parent)
    finally:
        if not os.path.lexists(target) and old.is_dir():
            os.rename(old, target)
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def partial_path(path: pathlib.Path) -> pathlib.Path:
    """Return where a file is written before it becomes the one at a path, with the same ending."""
    writer = f"{os.getpid()}-{os.environ.get('HOROVOD_RANK', '0')}"  # ids repeat on other hosts
    return path.with_name(f"{_PARTIAL}{writer}.{path.name}")


def is_partial(name: str) -> bool:
    """Return whether a file's name is that of a `partial_path`."""
    return name.startswith(_PARTIAL)


def beside(path: str | os.PathLike, ending: str) -> pathlib.Path:
    """Return the path of a folder next to one, whose name has an ending more.

    Example:

    >>> beside("runs/small/", ".replaced").as_posix()
    'runs/small.replaced'
    """
    path = pathlib.Path(path)
    if path.name in ("", ".."):  # such as "."
        path = pathlib.Path(os.path.abspath(path))
    return path.parent / (path.name + ending)


def _reserve(path, num_bytes):
    """Raise an OSError where a disk has no room for a file of a size."""
    with open(path, "wb") as file:
        if num_bytes:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            file.truncate(0)


def sync(path: pathlib.Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
