"""Documents to token shards on disk, with as much memory as a block of them takes."""

import collections
import concurrent.futures
import contextlib
import hashlib
import itertools
import os
import pathlib
from collections.abc import Iterable, Iterator

import numpy as np
import tensorflow as tf

from dtransformer.datasets import shard_manifest
from dtransformer.datasets.documents import Document
from dtransformer.datasets.token_shards import TokenShards
from dtransformer.errors import InputError
from dtransformer.files import new_folder
from dtransformer.inputs.paths import FilePath

_BLOCK = 2**21  # characters that are tokenized at once
_SPECIAL = "pad", "unk", "start", "end", "mask", "cls", "sep"


def write_token_shards(
    documents: Iterable[Document],
    tokenizer: object,
    folder: FilePath,
    *,
    shard_tokens: int = 2**28,
    overwrite: bool = False,
) -> TokenShards:
    """Tokenize documents, and write their ids into a folder.

    The same documents and tokenizer give the same bytes. The folder is complete or not there. It has
    a copy of the tokenizer. Documents without a token, or with a part that has none, are left out.

    Args:
        documents: texts; or lists of texts, their parts, which are tokenized each by itself.
        tokenizer: a `SubwordTokenizer`, what `load_tokenizer` returns, or another object with
            `encode(texts)` and `vocab_size`.
        folder: where to write.
        shard_tokens: a shard ends with the document that reaches this number of tokens.
        overwrite: whether token shards that are there are replaced.

    Returns:
        The shards.

    Raises:
        InputError: no document has a token, some have parts and some have none, or the folder
            cannot be written or is not empty.
    """
    if shard_tokens < 1:
        raise InputError(f"shard_tokens={shard_tokens} has to be at least 1")
    may_replace = _only_shards if overwrite else None
    with new_folder(folder, may_replace) as fresh:
        dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
        digest = _save_tokenizer(tokenizer, fresh / shard_manifest.TOKENIZER)
        with contextlib.closing(ShardFiles(fresh, dtype, shard_tokens)) as files:
            for block in _tokenized(documents, tokenizer):
                files.add(*block)
        if not files.shards:
            raise InputError("the documents hold no text at all: give at least one with a word")
        ids = {name: getattr(tokenizer, f"{name}_id", None) for name in _SPECIAL}
        manifest = {
            "dtype": dtype,
            "vocab_size": tokenizer.vocab_size,
            "special_ids": {name: int(value) for name, value in ids.items() if value is not None},
            "tokenizer": digest,
            "left_out": files.num_left_out,
            "shards": files.shards,
        }
        shard_manifest.write_manifest(fresh, manifest)
    return TokenShards(folder)


def _only_shards(folder):
    """Return whether a folder holds token shards, and nothing else."""
    known = {pathlib.Path(name).parts[0] for name in shard_manifest.read_manifest(folder)["files"]}
    others = {path.name for path in folder.iterdir()} - known - {shard_manifest.MANIFEST}
    if others:
        raise InputError(
            f"{folder}: also holds {min(others)}, which is no part of the shards: move it"
        )
    return True


def _save_tokenizer(tokenizer, folder):
    """Save a tokenizer where it can be; return the SHA-256 of what it is."""
    digest = hashlib.sha256(f"{type(tokenizer).__name__} {tokenizer.vocab_size}".encode())
    if hasattr(tokenizer, "save"):
        tokenizer.save(folder)
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _tokenized(documents, tokenizer):
    """Return an iterator of (ids, part lengths, parts of each document or None) of blocks.

    Blocks are tokenized side by side, and come in their order.
    """
    encode = lambda texts: _encode(tokenizer, texts)
    encode(["a"])  # compiled once, before there are threads
    waiting, threads = collections.deque(), max(1, len(os.sched_getaffinity(0)))
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for texts, counts in _blocks(documents):
            waiting.append((pool.submit(encode, texts), counts))
            if len(waiting) > threads:
                future, counts = waiting.popleft()
                yield *future.result(), counts
        for future, counts in waiting:
            yield *future.result(), counts


def _blocks(documents: Iterable[Document]) -> Iterator[tuple[list[str], list[int] | None]]:
    """Yield texts, and how many of them each document has, about `_BLOCK` characters at a time."""
    if isinstance(documents, (str, bytes)):
        raise InputError("documents are a list of texts: put the string into a list")
    texts, counts, size, has_parts = [], [], 0, None
    for number, document in enumerate(documents, start=1):
        parts = [document] if isinstance(document, str) else list(document)
        has_parts = not isinstance(document, str) if has_parts is None else has_parts
        if has_parts == isinstance(document, str):
            raise InputError(f"document {number} has {'no ' * has_parts}parts, those before differ")
        texts += parts
        counts.append(len(parts))
        size += sum(map(len, parts))
        if size > _BLOCK:
            yield texts, counts if has_parts else None
            texts, counts, size = [], [], 0
    if counts:
        yield texts, counts if has_parts else None


def _encode(tokenizer, texts):
    """Return ids [n] and the number of each text's ids."""
    if hasattr(tokenizer, "encode_to_numpy"):
        ids, row_splits = tokenizer.encode_to_numpy(texts)
        return ids, np.diff(row_splits)
    rows = tokenizer.encode(texts)
    if isinstance(rows, tf.RaggedTensor):
        return rows.flat_values.numpy(), rows.row_lengths().numpy()
    lengths = np.array([len(row) for row in rows], np.int64)
    return np.fromiter(itertools.chain.from_iterable(rows), np.int64, lengths.sum()), lengths


class ShardFiles:
    """Writes documents, shard after shard.

    Args:
        folder: where to.
        dtype: of ids.
        shard_tokens: a shard ends with the document that reaches this number of tokens.

    Attributes:
        shards: what the manifest says of each shard that is complete.
        num_left_out: number of documents without a token, or with a part that has none.
    """

    def __init__(self, folder: pathlib.Path, dtype: str, shard_tokens: int):
        self.shards, self.num_left_out = [], 0
        self._folder, self._dtype, self._limit = folder, dtype, shard_tokens
        self._arrays = {}

    def add(self, ids: np.ndarray, lengths: np.ndarray, counts: np.ndarray | None) -> None:
        """Add documents; those without a token, or with a part that has none, are left out.

        Args:
            ids: int [n], of all parts, one after the other.
            lengths: int [P], the number of tokens of each part.
            counts: int [D], the number of parts of each document; None where they have none.
        """
        has_parts = counts is not None
        counts = np.asarray(counts) if has_parts else np.ones(len(lengths), np.int64)
        document_of = np.repeat(np.arange(len(counts)), counts)
        is_kept = counts > 0
        is_kept[document_of[lengths == 0]] = False
        self.num_left_out += int(np.count_nonzero(~is_kept))
        of_kept = is_kept[document_of]
        ids, lengths = ids[np.repeat(of_kept, lengths)], lengths[of_kept]
        part_ends, token_ends = np.cumsum(counts[is_kept]), np.cumsum(lengths)
        document_ends = token_ends[part_ends - 1]
        done = tokens_done = parts_done = 0
        while done < len(document_ends):
            room = self._limit - self._length("tokens")
            end = np.searchsorted(document_ends, tokens_done + room) + 1
            last, end_of_parts = document_ends[:end][-1], part_ends[:end][-1]
            self._append("documents", document_ends[done:end] - tokens_done)
            if has_parts:
                self._append("parts", token_ends[parts_done:end_of_parts] - tokens_done)
            self._append("tokens", ids[tokens_done:last])
            done, tokens_done, parts_done = end, last, end_of_parts
            if self._length("tokens") >= self._limit:
                self.close()

    def close(self) -> None:
        """End the shard that is being written, if any."""
        if not self._arrays:
            return
        for array in self._arrays.values():
            array.close()
        says = {kind: array.length - (kind != "tokens") for kind, array in self._arrays.items()}
        self.shards.append({kind: says.get(kind) for kind in shard_manifest.KINDS})
        self._arrays = {}

    def _length(self, kind):
        return self._arrays[kind].length if kind in self._arrays else 0

    def _append(self, kind, numbers):
        """Append ids, or ends of what begins behind the ids that are there."""
        if kind not in self._arrays:
            path = self._folder / shard_manifest.shard_file(len(self.shards), kind)
            self._arrays[kind] = _GrowingArray(path, self._dtype if kind == "tokens" else "int64")
            if kind != "tokens":
                self._arrays[kind].append(np.zeros(1, np.int64))
        before = 0 if kind == "tokens" else self._length("tokens")
        self._arrays[kind].append(numbers + before if before else numbers)


class _GrowingArray:
    """A `.npy` file of one dimension that grows.

    Args:
        path: the file.
        dtype: of its numbers.
    """

    def __init__(self, path: str | os.PathLike, dtype: str):
        self._file, self._dtype, self.length = open(path, "wb"), np.dtype(dtype), 0
        self._write_header()

    def append(self, numbers):
        """Add numbers at the end."""
        self._file.write(np.ascontiguousarray(numbers, self._dtype).data)
        self.length += len(numbers)

    def close(self):
        """Write how many there are; NumPy's header has room for any number."""
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def _write_header(self):
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)
