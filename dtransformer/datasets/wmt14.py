"""The WMT14 sample: its files, and its data rules to the letter."""

import collections
import dataclasses
import hashlib
import http.client
import pathlib
import sys
import tarfile
import urllib.request
import zlib

import numpy as np

from dtransformer.datasets.sgm import (
    decode_lines,
    pair_sgm,
    read_bytes,
    write_bytes_atomically,
    write_text_atomically,
)
from dtransformer.datasets.text import read_tsv
from dtransformer.errors import InputError

ARCHIVE_URL = "http://statmt.org/wmt14/test-full.tgz"
ENGLISH = "newstest2014-fren-ref.en.sgm"
FRENCH = "newstest2014-fren-ref.fr.sgm"
SHA256 = {
    ENGLISH: "c73727c954e92396eb3eed1b2730804a77130c1c3a8bc6a3f5646766fc92a8eb",
    FRENCH: "c57025c8a338c642fe3ad0206ddc75d258a5584e1d470b75f37af2fb666d7e93",
}
_MOST_BYTES = 64 * 2**20  # of one member; the real ones have half a megabyte

UNK, PAD, EOT, FIRST_WORD = 0, 1, 2, 3


def prepare(source, destination):
    """Writes the sample's two files from WMT14's.

    A tab inside a sentence becomes a space. Each file appears whole or not at all.

    Args:
        source: A folder, or a tar archive, that holds the two newstest2014 files; or
            the paths of an English and a French SGM file.
        destination: The folder to write `wmt14.en_fr.txt` (english TAB french) and
            `wmt14.fr_en.txt` (french TAB english) to.

    Returns:
        The two paths.

    Raises:
        InputError: A file is missing, or the two do not match; names the first bad
            line.

    Example:
        >>> prepare("test-full.tgz", "data")  # doctest: +SKIP
        (PosixPath('data/wmt14.en_fr.txt'), PosixPath('data/wmt14.fr_en.txt'))
    """
    files = _source_files(source)
    names = list(files)
    pairs = pair_sgm(*(decode_lines(data, name) for name, data in files.items()), *names)
    if not pairs:
        raise InputError(
            f"{names[0]} and {names[1]} hold no segment: expected lines that begin with '<seg id'."
        )
    pairs = [tuple(side.replace("\t", " ") for side in pair) for pair in pairs]
    destination = pathlib.Path(destination)
    paths = destination / "wmt14.en_fr.txt", destination / "wmt14.fr_en.txt"
    for path, order in zip(paths, (1, -1)):
        lines = ["\t".join(pair[::order]) + "\n" for pair in pairs]
        write_text_atomically(path, "".join(lines))
    return paths


def _source_files(source):
    """Returns {name for messages: bytes} of the English and the French file."""
    if isinstance(source, (tuple, list)):
        if len(source) != 2:
            raise InputError(f"{len(source)} files were given: name an English and a French one.")
        return {str(path): read_bytes(path) for path in source}
    source = pathlib.Path(source)
    if source.is_file():
        members = _archive_members(source)
        return {f"{source}: {name}": members[name] for name in (ENGLISH, FRENCH)}
    if not source.is_dir():
        raise InputError(f"{source} does not exist: name a folder or a tar archive.")
    return {str(source / name): read_bytes(source / name) for name in (ENGLISH, FRENCH)}


def _archive_members(archive):
    """Returns {name: bytes} of the two wanted members of a tar archive.

    Members are found by the last part of their names and read into memory: what an
    archive says of paths, links and permissions is not followed.
    """
    found = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = pathlib.PurePosixPath(member.name).name
                if name not in SHA256 or name in found or not member.isreg():
                    continue
                if member.size > _MOST_BYTES:
                    raise InputError(
                        f"{archive}: {name} has {member.size} bytes, expected at most "
                        f"{_MOST_BYTES}: this is not WMT14's archive; fetch {ARCHIVE_URL}."
                    )
                found[name] = tar.extractfile(member).read()
            while tar.fileobj.read(1 << 20):  # gzip's checksum stands at the very end
                pass
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        reason = str(error).partition("\n")[0].rstrip(":")
        raise InputError(
            f"{archive} is no complete tar archive ({reason}): fetch {ARCHIVE_URL} again."
        ) from None
    missing = sorted(set(SHA256) - set(found))
    if missing:
        raise InputError(
            f"{archive} holds no regular file named {', '.join(missing)}: expected WMT14's "
            f"archive, {ARCHIVE_URL}."
        )
    return found


def verify(folder):
    """Checks that a folder holds the official two files.

    Args:
        folder: The folder.

    Raises:
        InputError: A file is missing or has another SHA-256.
    """
    for name in SHA256:
        _check_sum(pathlib.Path(folder) / name, name, read_bytes(pathlib.Path(folder) / name))


def _check_sum(place, name, data):
    digest = hashlib.sha256(data).hexdigest()
    if digest != SHA256[name]:
        raise InputError(
            f"{place} has SHA-256 {digest}, expected {SHA256[name]}: the download is damaged, or "
            "the file was changed; download it again."
        )


def download(destination, url=ARCHIVE_URL, timeout=30):
    """Downloads WMT14's test sets and keeps the two files that the sample uses.

    Progress goes to standard error. Nothing is written unless the checksums are right.

    Args:
        destination: The folder to write the two files to.
        url: Where the archive is.
        timeout: Seconds without an answer before giving up.

    Returns:
        The folder.

    Raises:
        InputError: The archive cannot be had, or its files have the wrong checksum.
    """
    folder = pathlib.Path(destination)
    archive = folder / f".{url.rsplit('/', 1)[-1]}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be made ({error.strerror}): choose another.") from None
    try:
        try:
            _fetch(url, archive, timeout)
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise InputError(
                f"{url} cannot be downloaded ({reason}): fetch it on another machine, and name "
                "the archive as the source (--source)."
            ) from None
        members = _archive_members(archive)
    finally:
        archive.unlink(missing_ok=True)
    for name, data in members.items():
        _check_sum(f"{url}: {name}", name, data)
    for name, data in members.items():
        write_bytes_atomically(folder / name, data)
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


@dataclasses.dataclass(frozen=True)
class FaithfulExamples:
    """The sample's examples, as its original makes them.

    Attributes:
        source: int32 [N, src_len], never padded.
        target: int32 [N, tgt_len], padded with PAD.
        label: int32 [N, tgt_len], the target shifted left by one, then EOT. Where the
            target is padded the label is PAD too, which a loss has to ignore.
        source_vocabulary: dict of the source's words, to ids from 3 on.
        target_vocabulary: dict of the target's words.
    """

    source: np.ndarray
    target: np.ndarray
    label: np.ndarray
    source_vocabulary: dict
    target_vocabulary: dict


def faithful_examples(path, src_len=10, tgt_len=10, vocab_size=20000):
    """Makes examples by the rules of the original sample.

    Words are what `str.split()` gives, so a no-break space parts words too. Each side
    has a vocabulary of all its words in order of frequency, words of one frequency in
    order of their first appearance; ids 0, 1, 2 are UNK, PAD, EOT. Pairs count whose
    source has more than src_len + 1 words; the target may have any number. The order
    is the file's. On newstest2014, French to English, this reading gives the published
    15,736 and 14,399 words and 2,468 pairs.

    Args:
        path: A file of `source TAB target` lines, such as `wmt14.fr_en.txt`.
        src_len: Words of a source; longer ones are truncated to it.
        tgt_len: Words of a target, truncated or padded to it.
        vocab_size: Entries of the model's vocabulary.

    Returns:
        `FaithfulExamples`. Labels keep PAD where the target is padded, and a loss has
        to ignore it (`ignore_id=PAD`): the original trained on it.

    Raises:
        InputError: A vocabulary does not fit vocab_size, or no pair is long enough.
    """
    if src_len < 1 or tgt_len < 1:
        raise InputError(f"src_len={src_len} and tgt_len={tgt_len} must be at least 1.")
    sides = [[line.split() for line in lines] for lines in read_tsv(path)]
    vocabularies = [_vocabulary(lines) for lines in sides]
    for name, vocabulary in zip(("source", "target"), vocabularies):
        if len(vocabulary) + FIRST_WORD > vocab_size:
            raise InputError(
                f"{path}: the {name} side has {len(vocabulary)} words, which with {FIRST_WORD} "
                f"special ones do not fit vocab_size={vocab_size}: give at least "
                f"--vocab_size {len(vocabulary) + FIRST_WORD}."
            )
    sources, targets, labels = [], [], []
    for source, target in zip(*sides):
        if len(source) <= src_len + 1:
            continue
        sources.append([vocabularies[0][word] for word in source[:src_len]])
        target = [vocabularies[1][word] for word in target[:tgt_len]]
        target += [PAD] * (tgt_len - len(target))
        targets.append(target)
        labels.append([*target[1:], EOT])
    if not sources:
        raise InputError(
            f"{path}: no source has more than {src_len + 1} words: give a smaller --src_len."
        )
    arrays = (np.array(rows, "int32") for rows in (sources, targets, labels))
    return FaithfulExamples(*arrays, *vocabularies)


def _vocabulary(lines):
    counts = collections.Counter(word for words in lines for word in words)
    return {word: FIRST_WORD + i for i, (word, _) in enumerate(counts.most_common())}
