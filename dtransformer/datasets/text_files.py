"""Text to files, for every writer of this package."""

import os

from dtransformer.errors import InputError
from dtransformer.inputs.paths import FilePath, check_path


def write_text_atomically(path: FilePath, text: str) -> None:
    """Write text as UTF-8, line ends as they are; see `write_bytes_atomically`."""
    write_bytes_atomically(path, text.encode("utf-8"))


def write_bytes_atomically(path: FilePath, data: bytes) -> None:
    """Write a file so that it is complete or not there.

    Args:
        path: the file to write. Folders above it are made where they are missing.
        data: what to write.

    Raises:
        InputError: the file cannot be written.
    """
    path = check_path(path)
    temporary = path.parent / f".{path.name}.{os.getpid()}.partial"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror}; choose another place, or check the "
            "permissions and the space there"
        ) from None
