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

from dtransformer.datasets.documents import Document
from dtransformer.datasets.shard_files import ShardFiles
from dtransformer.datasets.shard_manifest import MANIFEST, TOKENIZER, read_manifest, write_manifest
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
        digest = _save_tokenizer(tokenizer, fresh / TOKENIZER)
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
        write_manifest(fresh, manifest)
    return TokenShards(folder)


def _only_shards(folder):
    """Return whether a folder holds token shards, and nothing else."""
    known = {pathlib.Path(name).parts[0] for name in read_manifest(folder)["files"]}
    others = {path.name for path in folder.iterdir()} - known - {MANIFEST}
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
