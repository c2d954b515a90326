"""Text to files, for every writer of this package."""

from dtransformer.files import replacing
from dtransformer.inputs.paths import FilePath, check_path


def write_text_atomically(path: FilePath, text: str) -> None:
    """Write a file of UTF-8 text, line ends as they are, so that it is complete or not there."""
    with replacing(check_path(path), parents=True) as fresh:
        fresh.write_bytes(text.encode("utf-8"))
