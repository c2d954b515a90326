"""Text to files, for every writer of this package."""

from dtransformer.files import replacing
from dtransformer.inputs.paths import FilePath, check_path


def write_text_atomically(path: FilePath, text: str) -> None:
    """Write text as UTF-8, line ends as they are, so that the file is complete or not there.

    Args:
        path: the file to write. Folders above it are made where they are missing.
        text: what to write.

    Raises:
        InputError: the file cannot be written.
    """
    with replacing(check_path(path), parents=True) as fresh:
        fresh.write_text(text, encoding="utf-8", newline="")
