"""Batches of packed documents for a `CausalLM`, and their base class for other tasks."""

import bisect

import numpy as np

from dtransformer.datasets.indexed_batches import Example, IndexedBatches
from dtransformer.datasets.skipped_records import warn_skipped
from dtransformer.datasets.token_shards import TokenShards
from dtransformer.errors import check_int


class TokenStream:
    """Concatenation of all documents of token shards, read as a circle.

    Args:
        shards: The `TokenShards`.
        start_id: Id that is inserted before each document, or `None`.
        end_id: Id that is appended to each document, or `None`.

    Attributes:
        length: Number of tokens of the circle.
    """

    def __init__(self, shards: TokenShards, start_id: int | None, end_id: int | None):
        self._shards = shards
        self._start_id = start_id
        self._end_id = end_id
        self._extra = (start_id is not None) + (end_id is not None)
        sizes = [tokens + self._extra * documents for documents, tokens in shards.shard_sizes]
        self._shard_starts = np.cumsum([0, *sizes])
        self.length = int(self._shard_starts[-1])

    def read(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return consecutive tokens of the circle.

        Args:
            start: Integer in [0, length). Position of the first token.
            count: Integer. Number of tokens.

        Returns:
            A tuple of ids int32 [count] and document indices int32 [count]. Documents are counted
            from 1 in this range. A document that is read again past the end of the circle gets a
            new index.
        """
        ids = np.empty(count, np.int32)
        documents = np.empty(count, np.int32)
        done = 0
        num_documents = 0
        while done < count:
            position = (start + done) % self.length
            shard = int(np.searchsorted(self._shard_starts, position, "right")) - 1
            end = min(position + count - done, int(self._shard_starts[shard + 1]))
            stretch = slice(done, done + end - position)
            offset = int(self._shard_starts[shard])
            ids[stretch], shard_documents = self._read(shard, position - offset, end - offset)
            documents[stretch] = shard_documents - shard_documents[0] + 1 + num_documents
            done = stretch.stop
            num_documents = int(documents[stretch.stop - 1])
        return ids, documents

    def _read(self, shard_index, start, end):
        """Return the ids and document indices at positions start … end − 1 of a shard."""
        shard = self._shards.shard(shard_index)
        extra = self._extra

        def document_start(document):
            return int(shard.documents[document]) + extra * document

        first = bisect.bisect_right(range(len(shard.documents) - 1), start, key=document_start) - 1
        # Documents are not empty, so this range cannot contain more documents than positions.
        splits = np.asarray(shard.documents[first : first + end - start + 1], np.int64)
        starts = splits + extra * np.arange(first, first + len(splits))
        positions = np.arange(start, end)
        document = np.searchsorted(starts, positions, "right") - 1
        lengths = np.asarray(shard.documents[first + 1 + document]) - splits[document]
        # Offset in the stored document: −1 is the start token, its length is the end token.
        offset = positions - starts[document] - (self._start_id is not None)
        token = splits[document] + np.clip(offset, 0, lengths - 1)
        ids = self._shards.ids(shard.tokens[token[0] : token[-1] + 1])[token - token[0]]
        if self._start_id is not None:
            ids[offset < 0] = self._start_id
        if self._end_id is not None:
            ids[offset == lengths] = self._end_id
        return ids, document


_SAMPLE_SIZE = 256  # Number of documents that are searched for start and end tokens.
# The end token is among these last tokens, because chat templates add a line break after it.
TOKENS_AT_END = 2


class PackedDocuments(IndexedBatches):
    """Base class for batches whose rows are consecutive tokens of the circle of all documents.

    See `LanguageModelBatches` for arguments, attributes and errors.
    """

    # Names of special tokens. The first one that the tokenizer has is added to documents.
    _START_NAMES = ("start",)
    _END_NAMES = ("end",)

    def __init__(
        self,
        shards: TokenShards,
        *,
        length: int,
        training: bool = True,
        add_start: bool = True,
        add_end: bool = True,
        **options,
    ):
        check_int("length", length)
        start_id = self._choose_added_id(shards, self._START_NAMES if add_start else (), slice(1))
        end_id = self._choose_added_id(
            shards, self._END_NAMES if add_end else (), slice(-TOKENS_AT_END, None)
        )
        self._stream = TokenStream(shards, start_id, end_id)
        tokens = self._stream.length
        num_rows = tokens // length if training else -(-tokens // length)
        what = f"{tokens:,} tokens"
        super().__init__(shards, num_rows, what, length=length, training=training, **options)

    def _read(self, epoch, index, count):
        """Return ids and segments, two int32 arrays [count], from the start of a row."""
        size = self._stream.length
        start = self._first_token(epoch) + index * self.length
        ids, segments = self._stream.read(start % size, count)
        if not self._training:  # Do not wrap around: replace repeated documents by padding.
            ids[size - start :] = self.pad_id
            segments[size - start :] = 0
        return ids, segments

    def _choose_added_id(self, shards, names, place):
        """Return the id to add to each document, or `None` if most documents already contain it."""
        token_id = first_id(shards, names)
        if token_id is None:
            return None
        sample = np.unique(np.linspace(0, len(shards) - 1, _SAMPLE_SIZE).astype(np.int64))
        num_with_token = sum(
            bool((shards[int(document)][place] == token_id).any()) for document in sample
        )
        is_added = 2 * num_with_token <= len(sample)
        message = "and get it again" if is_added else "so it is not added to any document"
        where = "begin" if place.start is None else "end"
        what = f"sampled documents already {where} with the token {token_id}, {message}"
        warn_skipped(self, num_with_token, len(sample), what)
        return token_id if is_added else None

    def _empty_inputs(self):
        zeros = np.zeros(self.length, np.int32)
        return {"tokens": zeros + np.int32(self.pad_id), "segments": zeros}

    def _first_token(self, epoch):
        """Return the position of an epoch's first row in the circle."""
        if not (self._shuffle and self._training):
            return 0
        return int(np.random.default_rng([self._seed, epoch]).integers(self._stream.length))


def first_id(shards: TokenShards, names: tuple[str, ...]) -> int | None:
    """Return the id of the first special token in `names` that the tokenizer has, or `None`."""
    return next((shards.special_ids[name] for name in names if name in shards.special_ids), None)


class LanguageModelBatches(PackedDocuments):
    """Batches of documents packed into full rows, for `Trainer.fit` of a `CausalLM`.

    All documents, each between a start and an end token, are concatenated and divided into rows of
    `length` tokens, so nothing is padded. A batch is

        ({"tokens": int32 [b, s], "segments": int32 [b, s]}, labels int32 [b, s])

    where segments are the indices of the documents in their row, from 1. Attention does not cross
    documents. The label of a token is the next token of its document, or `ignore_id` for the last
    one. In an epoch each token, except the first of a document, is a label once. Each shuffled
    epoch draws a new random start of the first row. An epoch leaves out less than one batch.

    Reference: Brown et al., 2020, "Language models are few-shot learners", arXiv 2005.14165, §B.

    Args:
        shards: The `TokenShards`.
        length: Integer. Number of tokens s of a row.
        batch_size: Integer. Number of rows of a global batch.
        shuffle: Boolean. Whether to shuffle the rows of all shards in each epoch. Defaults to the
            value of `training`.
        seed: Integer. Shuffling depends on the seed and the epoch. Defaults to 0.
        shard_index, num_shards: Index of this data rank and number of data ranks; see
            `dtransformer.data_shard`.
        pad_rows_to_multiple_of: Integer. Empty rows are added to this rank's rows of a batch until
            their number is a multiple of it; see `dtransformer.row_multiple`. Defaults to 1.
        training: Boolean. Whether to leave out rows that do not fill a batch. Otherwise each token
            counts, and empty rows fill the last batch. Defaults to `True`.
        add_start, add_end: Boolean. Whether to add the tokenizer's start and end tokens to
            documents, if it has them and most documents do not. Defaults to `True`.

    Attributes:
        num_rows: Number of rows of an epoch.
        ignore_id: Label of tokens that do not count, -100, for `CrossEntropyLoss`.

    Raises:
        InputError: If the text fills no batch, or an argument is out of range.

    Example:

    >>> from dtransformer.datasets import SubwordTokenizer, write_token_shards
    >>> tokenizer = SubwordTokenizer.train(["one two three"], vocab_size=26)
    >>> shards = write_token_shards(["one two", "three"], tokenizer, "shards")
    >>> batches = LanguageModelBatches(shards, length=8, batch_size=1, training=False)
    >>> inputs, labels = next(iter(batches.as_dataset()))
    >>> inputs["tokens"].shape, inputs["segments"].numpy()[0, 0]
    (TensorShape([1, 8]), np.int32(1))
    """

    def row(self, epoch: int, index: int) -> Example:
        """Return the inputs and labels of a row.

        Returns:
            A tuple of `{"tokens": int32 [s], "segments": int32 [s]}` and the labels, int32 [s]: the
            next tokens, or `ignore_id` at the last position of a document and at padding.
        """
        ids, segments = self._read(epoch, index, self.length + 1)
        inputs = {"tokens": ids[:-1], "segments": segments[:-1]}
        has_next = (segments[1:] == segments[:-1]) & (segments[:-1] > 0)
        return inputs, np.where(has_next, ids[1:], self.ignore_id).astype(np.int32)

    def empty_row(self) -> Example:
        """Return a row of padding, whose labels are ignored."""
        return self._empty_inputs(), np.full(self.length, self.ignore_id, np.int32)
