"""The seal of a file of weights: its last line, with its checksum and the run that it belongs to.

    …what Keras wrote…
    dtransformer SHA-256 RUN

HDF5 does not read beyond its own end, so that the file stays one of Keras. SHA-256 is of what comes
before the line and of RUN, the SHA-256 of the run's `run.json`; zeros where there is no run.
"""

import hashlib
import os
import pathlib
import re

from dtransformer.errors import InputError

RUN = "run.json"  # in a run folder, and in its checkpoints
NO_RUN = "0" * 64
_LINE = re.compile(rb"\ndtransformer ([0-9a-f]{64}) ([0-9a-f]{64})\n")
_LINE_BYTES = len(b"\ndtransformer  \n") + 2 * 64
_CHUNK_BYTES = 2**22


def seal(path: str | os.PathLike, run: str = NO_RUN) -> None:
    """Add the seal to a file of weights that was written to the end.

    Args:
        path: the file.
        run: the SHA-256 of the `run.json` of its run.

    Raises:
        OSError: the disk is full.
    """
    digest = _sha256(path, os.path.getsize(path), run)
    with open(path, "ab") as file:
        file.write(f"\ndtransformer {digest} {run}\n".encode())


def check_seal(path: str | os.PathLike, run: str) -> None:
    """Refuse a file of weights that is damaged, or of another run; it is not parsed.

    Args:
        path: the file.
        run: the SHA-256 of the `run.json` that it has to belong to.

    Raises:
        InputError: says what is wrong with it.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise InputError(f"{path}: is no ordinary file: put the run's own weights there")
    try:
        size = path.stat().st_size - _LINE_BYTES
        with open(path, "rb") as file:
            file.seek(max(size, 0))
            line = _LINE.fullmatch(file.read(_LINE_BYTES))
        if line is None:
            raise InputError(
                f"{path}: these weights are damaged, or were not written by this dtransformer: they "
                "do not end with their checksum"
            )
        digest, owner = (value.decode() for value in line.groups())
        if _sha256(path, size, owner) != digest:
            raise InputError(
                f"{path}: these weights are damaged: their content does not match its checksum"
            )
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if owner != run:
        raise InputError(
            f"{path}: these weights are of another run than the {RUN} beside them: put the run's own "
            "there, or export one of its checkpoints"
        )


def sha256_of(path: str | os.PathLike) -> str:
    """Return the SHA-256 of a file, 64 hexadecimal digits."""
    return _sha256(path, os.path.getsize(path))


def _sha256(path, size, ending=""):
    """Return the SHA-256 of the first `size` bytes of a file and of an ending."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while size > 0 and (chunk := file.read(min(_CHUNK_BYTES, size))):
            digest.update(chunk)
            size -= len(chunk)
    digest.update(ending.encode())
    return digest.hexdigest()
