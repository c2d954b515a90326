"""Writing documents as token shards, with at most about one shard in memory."""

import hashlib
import itertools
import pathlib
from collections.abc import Iterable, Iterator

import numpy as np
import tensorflow as tf

from dtransformer.datasets import shard_manifest
from dtransformer.datasets.documents import Document
from dtransformer.datasets.token_shards import TokenShards
from dtransformer.errors import InputError, check_int
from dtransformer.files import new_folder
from dtransformer.inputs.files import FilePath

_BLOCK = 2**21  # Number of characters that are tokenized in one call.
_SPECIAL = "pad", "unk", "start", "end", "mask", "cls", "sep"


def write_token_shards(
    documents: Iterable[Document],
    tokenizer: object,
    folder: FilePath,
    *,
    shard_tokens: int = 2**26,
    overwrite: bool = False,
) -> TokenShards:
    """Tokenize documents and write their ids and the tokenizer into a folder.

    The same documents and tokenizer give the same bytes. If writing fails, no folder is left
    behind. Documents without a token, or with a part without a token, are left out.

    Args:
        documents: Iterable of texts, or of lists of texts. The texts of a list are the parts of a
            document, which are tokenized separately.
        tokenizer: A `SubwordTokenizer`, the result of `load_tokenizer`, or another object with
            `encode(texts)` and `vocab_size`.
        folder: Path of the output folder.
        shard_tokens: Integer. A shard ends with the document that reaches this number of tokens.
            Defaults to `2**26`.
        overwrite: Boolean. Whether to replace existing token shards. Defaults to `False`.

    Returns:
        The `TokenShards` of the folder.

    Raises:
        InputError: If no document has a token, if only some documents have parts, or if the folder
            cannot be written or is not empty.
    """
    check_int("shard_tokens", shard_tokens)
    may_replace = _contains_only_shards if overwrite else None
    with new_folder(folder, may_replace) as fresh:
        dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
        digest = _save_tokenizer(tokenizer, fresh / shard_manifest.TOKENIZER)
        files = ShardFiles(fresh, dtype, shard_tokens)
        for texts, counts in _blocks(documents):
            files.add(*_encode(tokenizer, texts), counts)
        files.close()
        if not files.shards:
            raise InputError("The documents contain no text. Give at least one with a word.")
        ids = {name: getattr(tokenizer, f"{name}_id", None) for name in _SPECIAL}
        manifest = {
            "dtype": dtype,
            "vocab_size": tokenizer.vocab_size,
            "special_ids": {name: int(value) for name, value in ids.items() if value is not None},
            "tokenizer": digest,
            "left_out": files.num_skipped,
            "shards": files.shards,
        }
        shard_manifest.write_manifest(fresh, manifest)
    return TokenShards(folder)


def _contains_only_shards(folder):
    """Return `True` for a folder that contains only token shards; otherwise raise an error."""
    shard_names = {
        pathlib.Path(name).parts[0] for name in shard_manifest.read_manifest(folder)["files"]
    }
    other_names = {path.name for path in folder.iterdir()} - shard_names - {shard_manifest.MANIFEST}
    if other_names:
        raise InputError(
            f"{folder} also contains {min(other_names)}, which does not belong to the shards. Move it."
        )
    return True


def _save_tokenizer(tokenizer, folder):
    """Save the tokenizer if it has `save`. Return the SHA-256 of its type, size and files."""
    digest = hashlib.sha256(f"{type(tokenizer).__name__} {tokenizer.vocab_size}".encode())
    if hasattr(tokenizer, "save"):
        tokenizer.save(folder)
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _blocks(documents: Iterable[Document]) -> Iterator[tuple[list[str], list[int] | None]]:
    """Yield `(texts, counts)` tuples of about `_BLOCK` characters.

    `counts` lists the number of parts of each document, or is `None` if documents have no parts.
    """
    if isinstance(documents, (str, bytes)):
        raise InputError("`documents` must be a list of texts. Put the string into a list.")
    texts = []
    counts = []
    size = 0
    has_parts = None
    for document_number, document in enumerate(documents, start=1):
        parts = [document] if isinstance(document, str) else list(document)
        has_parts = not isinstance(document, str) if has_parts is None else has_parts
        if has_parts == isinstance(document, str):
            problem = "has no parts" if has_parts else "has parts"
            raise InputError(
                f"Document {document_number} {problem}, unlike earlier documents. Give parts to "
                "all documents or to none."
            )
        texts += parts
        counts.append(len(parts))
        size += sum(map(len, parts))
        if size > _BLOCK:
            yield texts, counts if has_parts else None
            texts = []
            counts = []
            size = 0
    if counts:
        yield texts, counts if has_parts else None


def _encode(tokenizer, texts):
    """Return ids [n] of all texts, concatenated, and the number of ids of each text."""
    if hasattr(tokenizer, "encode_to_numpy"):  # Creates no tensor, so `init` need not be called.
        ids, row_splits = tokenizer.encode_to_numpy(texts)
        return ids, np.diff(row_splits)
    rows = tokenizer.encode(texts)
    if isinstance(rows, tf.RaggedTensor):
        return rows.flat_values.numpy(), rows.row_lengths().numpy()
    lengths = np.array([len(row) for row in rows], np.int64)
    return np.fromiter(itertools.chain.from_iterable(rows), np.int64, lengths.sum()), lengths


class ShardFiles:
    """Writer that divides documents into shards.

    Args:
        folder: Path of the output folder, which exists.
        dtype: Type of the stored ids, `"uint16"` or `"uint32"`.
        shard_tokens: Integer. A shard ends with the document that reaches this number of tokens.

    Attributes:
        shards: List of manifest entries, one for each shard written so far.
        num_skipped: Number of documents without a token, or with a part without a token.
    """

    def __init__(self, folder: pathlib.Path, dtype: str, shard_tokens: int):
        self.shards = []
        self.num_skipped = 0
        self._folder = folder
        self._dtype = dtype
        self._limit = shard_tokens
        self._begin()

    def _begin(self):
        self._tokens = []
        self._documents = [0]
        self._parts = [0]
        self._size = 0

    def add(self, ids: np.ndarray, lengths: np.ndarray, counts: list[int] | None) -> None:
        """Add documents, but skip documents that have an empty part or no token.

        Args:
            ids: int [n], the tokens of all parts, concatenated.
            lengths: int [P], the number of tokens of each part.
            counts: List with the number of parts of each document, or `None` if documents have no
                parts.
        """
        self._has_parts = counts is not None
        ends = np.cumsum([0, *lengths])
        bounds = np.cumsum([0, *([1] * len(lengths) if counts is None else counts)])
        for first, last in itertools.pairwise(bounds.tolist()):
            start = int(ends[first])
            end = int(ends[last])
            if first == last or not lengths[first:last].all():
                self.num_skipped += 1
                continue
            self._tokens.append(ids[start:end].astype(self._dtype))
            self._parts += (ends[first + 1 : last + 1] - start + self._size).tolist()
            self._size += end - start
            self._documents.append(self._size)
            if self._size >= self._limit:
                self.close()

    def close(self) -> None:
        """Write the current shard, unless it is empty, and start a new one."""
        if not self._tokens:
            return
        arrays = {"tokens": np.concatenate(self._tokens), "documents": np.array(self._documents)}
        if self._has_parts:
            arrays["parts"] = np.array(self._parts)
        for kind, array in arrays.items():
            np.save(self._folder / shard_manifest.shard_file(len(self.shards), kind), array)
        sizes = {kind: len(array) - (kind != "tokens") for kind, array in arrays.items()}
        self.shards.append({kind: sizes.get(kind) for kind in shard_manifest.KINDS})
        self._begin()
