"""Token shards: documents as ids, in NumPy's own files, which are mapped into memory.

Why not another format or loader: ids of one type in one array are read at any index by NumPy alone,
as fast as memory is, and batches come by tf.data, as all others here. TFRecord has no index;
array_record has one, of records, and rows of a fixed length begin anywhere in them. Grain (Google's,
for Python 3.11 to 3.13, too, with array_record and five other packages) shuffles by index, and
resumes, as is done here; but it iterates in Python, with worker processes that are sent pickles,
beside the tf.data that `Trainer.fit` takes.
"""

import functools
import itertools
import pathlib
from collections.abc import Iterator

import numpy as np

from dtransformer.datasets import shard_manifest
from dtransformer.errors import InputError
from dtransformer.inputs.files import FilePath, check_path, inside

_OPEN = 128  # shards of which the files are kept open


class TokenShards:
    """The documents of a folder that `write_token_shards` wrote, by their numbers.

    Nothing but the manifest is held in memory.

    Args:
        folder: the folder.

    Attributes:
        folder: its path.
        num_documents, num_tokens: of all shards.
        shard_sizes: list of the numbers of documents and of tokens of each shard.
        has_parts: whether documents have parts, such as sentences, or prompts and answers.
        num_left_out: number of documents without a token, or with a part that has none.
        vocab_size: number of ids of the tokenizer.
        special_ids: dict of the ids of its special tokens, such as `{"pad": 0, "start": 2}`.
        fingerprint: 16 hexadecimal digits of the tokens and the tokenizer.

    Raises:
        InputError: the folder holds no token shards, or a file of them is missing or of another size.

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
        for name, says in self._manifest["files"].items():
            path = inside(folder, name)
            size = path.stat().st_size if path.is_file() else None
            if size != says["bytes"]:
                found = "is missing" if size is None else f"has {size:,} bytes"
                raise InputError(
                    f"{path} {found}, {shard_manifest.MANIFEST} says {says['bytes']:,}: copy the "
                    "folder again"
                )
        shards = self._manifest["shards"]
        self._first_documents = np.cumsum([0, *(shard["documents"] for shard in shards)])
        self.num_documents = int(self._first_documents[-1])
        self.num_tokens = sum(shard["tokens"] for shard in shards)
        self.shard_sizes = [(shard["documents"], shard["tokens"]) for shard in shards]
        self.has_parts = shards[0]["parts"] is not None
        self.num_left_out = self._manifest["left_out"]
        self.vocab_size = self._manifest["vocab_size"]
        self.special_ids = dict(self._manifest["special_ids"])
        self.fingerprint = shard_manifest.fingerprint(self._manifest)
        open_shard = functools.partial(shard_manifest.open_shard, self.folder, self._manifest)
        self.shard = functools.lru_cache(_OPEN)(open_shard)

    @property
    def tokenizer_folder(self) -> pathlib.Path:
        """The folder with a copy of the tokenizer, where it can be saved."""
        return self.folder / shard_manifest.TOKENIZER

    def __len__(self) -> int:
        """The number of documents."""
        return self.num_documents

    def __getitem__(self, number: int) -> np.ndarray:
        """Return the ids of a document, int32 [n].

        Raises:
            IndexError: there is no such document.
            InputError: the shard is damaged.
        """
        shard, start, end = self._place(number)
        return self.ids(shard.tokens[start:end])

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[number] for number in range(len(self)))

    def parts(self, number: int) -> list[np.ndarray]:
        """Return the ids of each part of a document, a list of int32 arrays."""
        tokens, bounds = self.part_bounds(number)
        return [self.ids(tokens[a:b]) for a, b in itertools.pairwise(bounds)]

    def part_bounds(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a document's shard, and where its parts begin and end there.

        Args:
            number: of the document, which has n parts; one where documents have none.

        Returns:
            uint [T], of which nothing is read yet, and int64 [n + 1].
        """
        shard, start, end = self._place(number)
        if shard.parts is None:
            return shard.tokens, np.array([start, end])
        return shard.tokens, shard.parts[slice(*np.searchsorted(shard.parts, [start, end + 1]))]

    def first_document(self, shard: int) -> int:
        """Return the number of the first document of a shard."""
        return int(self._first_documents[shard])

    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each document, int64 [len(self)]."""
        return np.concatenate(
            [np.diff(self.shard(number).documents) for number in range(len(self.shard_sizes))]
        )

    def ids(self, tokens: np.ndarray) -> np.ndarray:
        """Return tokens of a shard as int32 ids.

        Raises:
            InputError: one is outside of the vocabulary: the shard is damaged.
        """
        ids = tokens.astype(np.int32)
        if ids.size and (ids.max() >= self.vocab_size or ids.min() < 0):
            raise InputError(
                f"{self.folder}: a token is {ids.max()}, and the vocabulary has {self.vocab_size}: a "
                "shard is damaged; copy the folder again"
            )
        return ids

    def verify(self) -> None:
        """Compare all files with their checksums, which reads them.

        Raises:
            InputError: a file is damaged.
        """
        for name, says in self._manifest["files"].items():
            path = inside(self.folder, name)
            if shard_manifest.file_digest(path) != says["sha256"]:
                raise InputError(f"{path} is damaged: its checksum is another: copy it again")

    def _place(self, number):
        """Return a document's shard, and where its tokens begin and end there."""
        if not -len(self) <= number < len(self):
            raise IndexError(f"document {number} of {len(self)}")
        number %= len(self)
        index = int(np.searchsorted(self._first_documents, number, "right")) - 1
        shard, number = self.shard(index), number - self._first_documents[index]
        return shard, int(shard.documents[number]), int(shard.documents[number + 1])
