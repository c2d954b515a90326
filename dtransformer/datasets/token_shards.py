"""Token shards: tokenized documents in NumPy files that are mapped into memory.

A NumPy array of ids can be read at any index, as fast as memory, and tf.data makes batches of it.
Other formats were considered:

- TFRecord has no index.
- array_record has an index of records, but rows of a fixed length begin anywhere in a record.
- Grain also shuffles by index and resumes. It requires array_record and five other packages and
  iterates in Python with worker processes, next to the tf.data that `Trainer.fit` takes.
"""

import functools
import itertools
import pathlib
from collections.abc import Iterator

import numpy as np

from dtransformer.datasets import shard_manifest
from dtransformer.errors import InputError
from dtransformer.inputs.files import FilePath, check_path, inside

_ENCODING = "dtype", "tokenizer"  # Fields of the manifest.
_MAX_OPEN_SHARDS = 128  # Maximum number of shards whose files stay open.


class TokenShards:
    """The documents of a folder that `write_token_shards` wrote, as a sequence of arrays of ids.

    Only the manifest is kept in memory. Documents are read from disk on access.

    Args:
        folder: Path of the folder.

    Attributes:
        folder: Path of the folder.
        num_documents, num_tokens: Number of documents and tokens of all shards.
        shard_sizes: List of `(num_documents, num_tokens)` tuples, one for each shard.
        has_parts: Whether documents have parts, such as sentences, or prompts and answers.
        num_skipped: Number of documents without a token, or with a part without a token, that were
            not written.
        vocab_size: Number of ids of the tokenizer.
        special_ids: Dict of the ids of its special tokens, such as `{"pad": 0, "start": 2}`.
        encoding: Tuple that is equal for folders of equal tokenizers and id types.
        fingerprint: 16 hexadecimal digits that identify the tokens and the tokenizer.

    Raises:
        InputError: If the folder contains no token shards, or a file is missing or has another size
            than the manifest states.

    Example:

    >>> from dtransformer.datasets import SubwordTokenizer, write_token_shards
    >>> texts = ["one two", "two", "one one two"]
    >>> tokenizer = SubwordTokenizer.train(texts, vocab_size=24)
    >>> shards = write_token_shards(texts, tokenizer, "shards")
    >>> len(shards), shards.num_documents, tokenizer.decode([shards[2]])
    (3, 3, ['one one two'])
    """

    def __init__(self, folder: FilePath):
        self.folder = check_path(folder)
        self._manifest = shard_manifest.read_manifest(folder)
        for name, expected in self._manifest["files"].items():
            path = inside(folder, name)
            size = path.stat().st_size if path.is_file() else None
            if size != expected["bytes"]:
                problem = "is missing" if size is None else f"has {size:,} bytes"
                raise InputError(
                    f"{path} {problem}, but {shard_manifest.MANIFEST} specifies {expected['bytes']:,} "
                    "bytes. Copy the folder again."
                )
        shards = self._manifest["shards"]
        self._first_documents = np.cumsum([0, *(shard["documents"] for shard in shards)])
        self.num_documents = int(self._first_documents[-1])
        self.num_tokens = sum(shard["tokens"] for shard in shards)
        self.shard_sizes = [(shard["documents"], shard["tokens"]) for shard in shards]
        self.has_parts = shards[0]["parts"] is not None
        self.num_skipped = self._manifest["left_out"]
        self.vocab_size = self._manifest["vocab_size"]
        self.special_ids = dict(self._manifest["special_ids"])
        self.encoding = self.vocab_size, self.special_ids, *map(self._manifest.get, _ENCODING)
        self.fingerprint = shard_manifest.fingerprint(self._manifest)
        open_shard = functools.partial(shard_manifest.open_shard, self.folder, self._manifest)
        self.shard = functools.lru_cache(_MAX_OPEN_SHARDS)(open_shard)

    @property
    def tokenizer_folder(self) -> pathlib.Path:
        """The folder of the tokenizer's copy. It exists if the tokenizer has a `save` method."""
        return self.folder / shard_manifest.TOKENIZER

    def __len__(self) -> int:
        """Return the number of documents."""
        return self.num_documents

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the ids of a document, int32 [n].

        Args:
            index: Index of the document. Negative indices count from the end.

        Raises:
            IndexError: If the index is out of range.
            InputError: If the shard is damaged.
        """
        shard, start, end = self._locate(index)
        return self.ids(shard.tokens[start:end])

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[index] for index in range(len(self)))

    def parts(self, index: int) -> list[np.ndarray]:
        """Return the ids of each part of a document, a list of int32 arrays.

        A document without parts has one part.
        """
        tokens, bounds = self.part_bounds(index)
        return [self.ids(tokens[a:b]) for a, b in itertools.pairwise(bounds)]

    def part_bounds(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a document's shard and the bounds of the document's parts in them.

        Args:
            index: Index of the document, which has n parts. A document without parts counts as one
                part.

        Returns:
            A `(tokens, bounds)` tuple: uint [T], not yet read from disk, and int64 [n + 1]. Part i
            is `tokens[bounds[i]:bounds[i + 1]]`.
        """
        shard, start, end = self._locate(index)
        if shard.parts is None:
            return shard.tokens, np.array([start, end])
        return shard.tokens, shard.parts[slice(*np.searchsorted(shard.parts, [start, end + 1]))]

    def first_document(self, shard: int) -> int:
        """Return the index of the first document of a shard."""
        return int(self._first_documents[shard])

    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each document, int64 [len(self)]."""
        return np.concatenate(
            [np.diff(self.shard(index).documents) for index in range(len(self.shard_sizes))]
        )

    def ids(self, tokens: np.ndarray) -> np.ndarray:
        """Convert tokens of a shard to int32 ids and check that they are in the vocabulary.

        Raises:
            InputError: If a token is outside of the vocabulary, so that the shard is damaged.
        """
        ids = tokens.astype(np.int32)
        if ids.size and (ids.max() >= self.vocab_size or ids.min() < 0):
            raise InputError(
                f"{self.folder}: A token is {ids.max()}, but the vocabulary has {self.vocab_size} ids. "
                "A shard is damaged; copy the folder again."
            )
        return ids

    def verify(self) -> None:
        """Read all files and compare their checksums with the manifest.

        Raises:
            InputError: If a file is damaged.
        """
        for name, expected in self._manifest["files"].items():
            path = inside(self.folder, name)
            if shard_manifest.file_digest(path) != expected["sha256"]:
                raise InputError(f"{path} is damaged: its checksum differs. Copy it again.")

    def _locate(self, document):
        """Return a document's shard, and the start and end of its tokens in the shard."""
        if not -len(self) <= document < len(self):
            raise IndexError(
                f"Document {document} does not exist. There are {len(self)} documents."
            )
        document %= len(self)
        shard_index = int(np.searchsorted(self._first_documents, document, "right")) - 1
        shard = self.shard(shard_index)
        document = document - self._first_documents[shard_index]
        return shard, int(shard.documents[document]), int(shard.documents[document + 1])
