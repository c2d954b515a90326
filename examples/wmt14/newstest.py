"""newstest2014, English and French: downloaded, checked, and written as the sample's two files."""

import gzip
import hashlib
import http.client
import pathlib
import shutil
import tarfile
import tempfile
import urllib.request
import zlib

from dtransformer.datasets import read_sgm_pairs
from dtransformer.errors import InputError

ARCHIVE_URL = "http://statmt.org/wmt14/test-full.tgz"
ENGLISH, FRENCH = "newstest2014-fren-ref.en.sgm", "newstest2014-fren-ref.fr.sgm"
SHA256 = {
    ENGLISH: "c73727c954e92396eb3eed1b2730804a77130c1c3a8bc6a3f5646766fc92a8eb",
    FRENCH: "c57025c8a338c642fe3ad0206ddc75d258a5584e1d470b75f37af2fb666d7e93",
}
_MAX_MEMBER_BYTES = 64 * 2**20  # the real ones have half a megabyte


def prepare(source, destination, overwrite=False):
    """Write lines of "English TAB French", and the other way around; return the files' paths.

    Args:
        source: a folder or a tar archive with WMT14's two files, or a pair of their paths.
        destination: a folder, made where it is missing.
        overwrite: whether files that are there with other content are replaced.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = _sgm_files(source, pathlib.Path(folder))
        pairs = read_sgm_pairs(*files)
    if not pairs:
        raise InputError(f"{files[0]} and {files[1]} hold no segment: give WMT14's files")
    pairs = [tuple(side.replace("\t", " ") for side in pair) for pair in pairs]
    contents = {
        name: "".join("\t".join(pair[::order]) + "\n" for pair in pairs).encode()
        for name, order in (("wmt14.en_fr.txt", 1), ("wmt14.fr_en.txt", -1))
    }
    return _write(contents, destination, overwrite)


def download(destination, url=ARCHIVE_URL, timeout=30, overwrite=False):
    """Download WMT14's test sets, and keep the two files, in a folder, which is returned."""
    with tempfile.NamedTemporaryFile(suffix=".tgz") as archive:
        try:
            with urllib.request.urlopen(url, timeout=timeout) as answer:
                shutil.copyfileobj(answer, archive)
            archive.flush()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise InputError(
                f"{url} cannot be downloaded ({getattr(error, 'reason', None) or error}): fetch it "
                "on another machine, and give the archive as the source (--source)"
            ) from None
        members = _members(archive.name)
    for name, data in members.items():
        _check_sum(f"{url}: {name}", name, data)
    _write(members, destination, overwrite)
    return pathlib.Path(destination)


def verify(folder):
    """Check that a folder holds the two official files."""
    for name in SHA256:
        path = pathlib.Path(folder) / name
        _check_sum(path, name, path.read_bytes())


def _check_sum(place, name, data):
    digest = hashlib.sha256(data).hexdigest()
    if digest != SHA256[name]:
        raise InputError(
            f"{place} has SHA-256 {digest}, expected {SHA256[name]}: the download is damaged, or "
            "the file was changed; download it again"
        )


def _sgm_files(source, folder):
    """Return the paths of the English and the French file; those of an archive go to a folder."""
    if isinstance(source, (tuple, list)):
        return source
    source = pathlib.Path(source)
    if not source.exists():
        raise InputError(f"{source} does not exist: give a folder or a tar archive")
    if not source.is_dir():
        for name, data in _members(source).items():
            (folder / name).write_bytes(data)
        source = folder
    return source / ENGLISH, source / FRENCH


def _members(archive):
    """Return the two files of an archive by their names: what it says of places is not followed."""
    found, is_packed = {}, _begins(archive) == b"\x1f\x8b"
    try:
        # "r|" reads forwards only, so that no size, negative ones included, leads back.
        opened = (gzip.open if is_packed else open)(archive, "rb")
        with opened as file, tarfile.open(fileobj=file, mode="r|") as tar:
            for member in tar:
                name = pathlib.PurePosixPath(member.name).name
                if name not in SHA256 or name in found or not member.isreg():
                    continue
                if member.size > _MAX_MEMBER_BYTES:
                    raise InputError(
                        f"{archive}: {name} has {member.size} bytes, expected at most "
                        f"{_MAX_MEMBER_BYTES}: fetch {ARCHIVE_URL}"
                    )
                found[name] = tar.extractfile(member).read()
            while file.read(2**20):  # gzip's checksum stands at the very end
                pass
    except InputError:
        raise
    except (tarfile.TarError, EOFError, OSError, ValueError, ArithmeticError, zlib.error) as error:
        raise InputError(
            f"{archive} is no complete tar archive ({error}): fetch {ARCHIVE_URL}"
        ) from None
    if missing := SHA256.keys() - found.keys():
        raise InputError(f"{archive} holds no regular file named {', '.join(sorted(missing))}")
    return found


def _begins(path):
    with open(path, "rb") as file:
        return file.read(2)


def _write(contents, folder, overwrite):
    paths = {pathlib.Path(folder) / name: data for name, data in contents.items()}
    for path, data in paths.items():
        if path.exists() and path.read_bytes() != data and not overwrite:
            raise InputError(f"{path} is there with other content: give another, or --overwrite it")
    for path, data in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tuple(paths)
