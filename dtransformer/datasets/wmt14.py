"""The files of the WMT14 sample: newstest2014 in English and French, checked and prepared."""

import hashlib
import http.client
import pathlib
import sys
import urllib.request
from collections.abc import Sequence

from dtransformer.datasets.sgm import pair_sgm
from dtransformer.datasets.text_files import write_bytes_atomically, write_text_atomically
from dtransformer.errors import InputError
from dtransformer.files import adding_to
from dtransformer.inputs.archives import tar_members
from dtransformer.inputs.files import read_bytes
from dtransformer.inputs.paths import FilePath, check_path
from dtransformer.inputs.text import decode_lines

ARCHIVE_URL = "http://statmt.org/wmt14/test-full.tgz"
ENGLISH = "newstest2014-fren-ref.en.sgm"
FRENCH = "newstest2014-fren-ref.fr.sgm"
SHA256 = {
    ENGLISH: "c73727c954e92396eb3eed1b2730804a77130c1c3a8bc6a3f5646766fc92a8eb",
    FRENCH: "c57025c8a338c642fe3ad0206ddc75d258a5584e1d470b75f37af2fb666d7e93",
}
_MAX_MEMBER_BYTES = 64 * 2**20  # the real ones have half a megabyte


def prepare(
    source: FilePath | Sequence[FilePath], destination: FilePath, overwrite: bool = False
) -> tuple[pathlib.Path, pathlib.Path]:
    """Write the sample's two files from WMT14's.

    A tab inside a sentence becomes a space. Each file is complete or not there.

    Args:
        source: a folder, or a tar archive, that holds the two newstest2014 files; or
            the paths of an English and a French SGM file.
        destination: the folder to write `wmt14.en_fr.txt` (english TAB french) and
            `wmt14.fr_en.txt` (french TAB english) to.
        overwrite: whether files that are there with other content are replaced.

    Returns:
        The two paths.

    Raises:
        InputError: a file is missing, or the two do not match; names the first line that does not.
            Or one of the two is there with other content.

    Example:

    >>> from dtransformer.datasets import write_sgm
    >>> write_sgm("test.en.sgm", ["Good morning ."], "en", "newstest2014")
    >>> write_sgm("test.fr.sgm", ["Bonjour ."], "fr", "newstest2014")
    >>> for path in prepare(["test.en.sgm", "test.fr.sgm"], "data"):
    ...     print(path)
    data/wmt14.en_fr.txt
    data/wmt14.fr_en.txt
    """
    files = _source_files(source)
    names = list(files)
    pairs = pair_sgm(*(decode_lines(data, name) for name, data in files.items()), *names)
    if not pairs:
        raise InputError(
            f"{names[0]} and {names[1]} hold no segment: expected lines that begin with '<seg id'"
        )
    pairs = [tuple(side.replace("\t", " ") for side in pair) for pair in pairs]
    destination, names = check_path(destination), ("wmt14.en_fr.txt", "wmt14.fr_en.txt")
    with adding_to(destination, overwrite) as fresh:
        for name, order in zip(names, (1, -1)):
            lines = ["\t".join(pair[::order]) + "\n" for pair in pairs]
            write_text_atomically(fresh / name, "".join(lines))
    return tuple(destination / name for name in names)


def _source_files(source):
    """Return {name for messages: bytes} of the English and the French file."""
    if isinstance(source, (tuple, list)):
        if len(source) != 2:
            raise InputError(f"{len(source)} files were given: give an English and a French one")
        return {str(path): read_bytes(path, _MAX_MEMBER_BYTES) for path in source}
    source = check_path(source)
    if source.is_file():
        members = _archive_members(source)
        return {f"{source}: {name}": members[name] for name in (ENGLISH, FRENCH)}
    if not source.is_dir():
        raise InputError(f"{source} does not exist: give a folder or a tar archive")
    paths = [source / name for name in (ENGLISH, FRENCH)]
    return {str(path): read_bytes(path, _MAX_MEMBER_BYTES) for path in paths}


def _archive_members(archive):
    advice = f"expected WMT14's archive; fetch {ARCHIVE_URL}"
    return tar_members(archive, SHA256, _MAX_MEMBER_BYTES, advice)


def verify(folder: FilePath) -> None:
    """Check that a folder holds the two official files.

    Raises:
        InputError: a file is missing or has another SHA-256.
    """
    for name in SHA256:
        path = pathlib.Path(folder) / name
        _check_sum(path, name, read_bytes(path, _MAX_MEMBER_BYTES))


def _check_sum(place, name, data):
    digest = hashlib.sha256(data).hexdigest()
    if digest != SHA256[name]:
        raise InputError(
            f"{place} has SHA-256 {digest}, expected {SHA256[name]}: the download is damaged, or "
            "the file was changed; download it again"
        )


def download(
    destination: FilePath, url: str = ARCHIVE_URL, timeout: float = 30, overwrite: bool = False
) -> pathlib.Path:
    """Download WMT14's test sets and keep the two files that the sample uses.

    Progress goes to standard error. Nothing is written unless the checksums are right.

    Args:
        destination: the folder to write the two files to.
        url: where the archive is.
        timeout: seconds without an answer before it gives up.
        overwrite: whether files that are there with other content are replaced.

    Returns:
        The folder.

    Raises:
        InputError: the archive cannot be downloaded, or its files have the wrong checksum.
            Or one of the two is there with other content.
    """
    folder = pathlib.Path(destination)
    archive = folder / f".{url.rsplit('/', 1)[-1]}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be made ({error.strerror}): choose another") from None
    try:
        try:
            _fetch(url, archive, timeout)
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise InputError(
                f"{url} cannot be downloaded ({reason}): fetch it on another machine, and give "
                "the archive as the source (--source)"
            ) from None
        members = _archive_members(archive)
    finally:
        archive.unlink(missing_ok=True)
    for name, data in members.items():
        _check_sum(f"{url}: {name}", name, data)
    with adding_to(folder, overwrite) as fresh:
        for name, data in members.items():
            write_bytes_atomically(fresh / name, data)
    return folder


def _fetch(url, path, timeout):
    with urllib.request.urlopen(url, timeout=timeout) as answer, open(path, "wb") as file:
        total = int(answer.headers.get("Content-Length") or 0)
        while block := answer.read(1 << 20):
            file.write(block)
            of = f" of {total / 2**20:.1f}" if total else ""
            done = f"{file.tell() / 2**20:.1f}{of} MiB"
            print(f"\r{url}: {done}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        if file.tell() < total:
            raise OSError(f"the connection ended after {file.tell()} of {total} bytes")
