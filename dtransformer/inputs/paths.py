"""Paths that come from outside, and names that have to stay inside of a folder."""

import os
import pathlib

from dtransformer.errors import InputError, shown

FilePath = str | os.PathLike
MAX_PATH, MAX_NAME = 4095, 255  # bytes that Linux takes for a path, and for each part of it


def check_path(path: FilePath, what: str = "path") -> pathlib.Path:
    """Return a path that the file system can be asked for.

    Args:
        path: the path.
        what: what it is for, for messages.

    Raises:
        InputError: it is empty, too long, or has a NUL.
    """
    try:
        data = os.fsencode(path)
    except UnicodeEncodeError:
        raise InputError(f"{what} {shown(os.fspath(path))}: has half of a surrogate pair") from None
    longest = max(map(len, data.split(b"/")))
    if not data or b"\0" in data:
        raise InputError(f"{what} {shown(os.fspath(path))}: expected a path, without NUL")
    if len(data) > MAX_PATH or longest > MAX_NAME:
        raise InputError(
            f"{what} {shown(os.fspath(path))} is too long: {len(data)} bytes, its longest name "
            f"{longest}; a path may have {MAX_PATH}, a name {MAX_NAME}: give a shorter one"
        )
    return pathlib.Path(path)


def check_name(name: str) -> str:
    """Return a name of a file inside of a folder, such as `"tokenizer/vocab.txt"`.

    Raises:
        ValueError: it is absolute, leads out of the folder, or is no name.

    Example:

    >>> check_name("../secret")
    Traceback (most recent call last):
    ValueError: expected a path inside of the folder, such as 'tokenizer/vocab.txt'
    """
    parts = name.split("/")
    is_long = len(os.fsencode(name)) > MAX_NAME
    if is_long or not name.isprintable() or {"", ".", ".."}.intersection(parts) or "\\" in name:
        raise ValueError("expected a path inside of the folder, such as 'tokenizer/vocab.txt'")
    return name


def inside(folder: FilePath, name: str) -> pathlib.Path:
    """Return the path of a file in a folder.

    Args:
        folder: the folder.
        name: the file's name in it, which may have several parts.

    Raises:
        InputError: the name, or a link that lies there, leads out of the folder.
    """
    try:
        check_name(name)
    except ValueError as error:
        raise InputError(f"{folder}: {shown(name)}: {error}") from None
    path = pathlib.Path(folder) / name
    if os.path.realpath(path) != os.path.join(os.path.realpath(folder), name):
        raise InputError(f"{path} is a link, or leads through one: put the file itself there")
    return path
