"""Text to files, for every writer of this package."""

from dtransformer.files import replacing
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
    with replacing(check_path(path), parents=True) as fresh:
        fresh.write_bytes(data)
