"""Batches of packed documents for a `CausalLM`, and what batches have in common that pack such rows."""

import bisect

import numpy as np

from dtransformer.datasets.indexed_batches import Example, IndexedBatches
from dtransformer.datasets.left_out import warn_left_out
from dtransformer.datasets.token_shards import TokenShards
from dtransformer.errors import check_int


class TokenStream:
    """The documents of token shards one after the other, in a circle.

    Args:
        shards: the shards.
        start_id: id before each document; None for none.
        end_id: id after each document; None for none.

    Attributes:
        length: number of tokens of the circle.
    """

    def __init__(self, shards: TokenShards, start_id: int | None, end_id: int | None):
        self._shards, self._start_id, self._end_id = shards, start_id, end_id
        self._extra = (start_id is not None) + (end_id is not None)
        sizes = [tokens + self._extra * documents for documents, tokens in shards.shard_sizes]
        self._shard_starts = np.cumsum([0, *sizes])
        self.length = int(self._shard_starts[-1])

    def read(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a stretch of the stream.

        Args:
            start: position of its first token, in [0, length).
            count: number of tokens.

        Returns:
            int32 [count] ids, and int32 [count] numbers of their documents, counted from 1 in the
            stretch: a document that comes again, behind the end of the circle, has another number.
        """
        ids, numbers = np.empty(count, np.int32), np.empty(count, np.int32)
        done, before = 0, 0
        while done < count:
            position = (start + done) % self.length
            shard = int(np.searchsorted(self._shard_starts, position, "right")) - 1
            end = min(position + count - done, int(self._shard_starts[shard + 1]))
            stretch = slice(done, done + end - position)
            offset = int(self._shard_starts[shard])
            ids[stretch], of = self._read(shard, position - offset, end - offset)
            numbers[stretch] = of - of[0] + 1 + before
            done, before = stretch.stop, int(numbers[stretch.stop - 1])
        return ids, numbers

    def _read(self, number, start, end):
        """Return the ids, and the numbers of the documents, at positions start … end − 1 of a shard."""
        shard, extra = self._shards.shard(number), self._extra
        begins = lambda document: int(shard.documents[document]) + extra * document
        first = bisect.bisect_right(range(len(shard.documents) - 1), start, key=begins) - 1
        # No document is empty, so that there are no more of them than positions.
        splits = np.asarray(shard.documents[first : first + end - start + 1], np.int64)
        starts = splits + extra * np.arange(first, first + len(splits))
        positions = np.arange(start, end)
        document = np.searchsorted(starts, positions, "right") - 1
        lengths = np.asarray(shard.documents[first + 1 + document]) - splits[document]
        # In the document's own tokens: −1 is the start token, its length the end token.
        offset = positions - starts[document] - (self._start_id is not None)
        token = splits[document] + np.clip(offset, 0, lengths - 1)
        ids = self._shards.ids(shard.tokens[token[0] : token[-1] + 1])[token - token[0]]
        if self._start_id is not None:
            ids[offset < 0] = self._start_id
        if self._end_id is not None:
            ids[offset == lengths] = self._end_id
        return ids, document


_LOOKED_AT = 256  # documents
# Among so many last tokens is a text's end: chat templates have a line's end after it.
TOKENS_AT_END = 2


class PackedDocuments(IndexedBatches):
    """Batches of which each row is a stretch of the circle of all documents.

    Arguments, attributes and errors as of `LanguageModelBatches`.
    """

    _BEGIN, _END = ("start",), ("end",)  # names of special tokens, of which the first there is

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
        begin = self._added_id(shards, self._BEGIN if add_start else (), slice(1))
        end = self._added_id(shards, self._END if add_end else (), slice(-TOKENS_AT_END, None))
        self._stream = TokenStream(shards, begin, end)
        tokens = self._stream.length
        num_rows = tokens // length if training else -(-tokens // length)
        what = f"{tokens:,} tokens"
        super().__init__(shards, num_rows, what, length=length, training=training, **options)

    def _read(self, epoch, number, count):
        """Return ids and segments, int32 [count], that begin with a row of an epoch."""
        size = self._stream.length
        start = self._first_token(epoch) + number * self.length
        ids, segments = self._stream.read(start % size, count)
        if not self._training:  # the circle ends
            ids[size - start :], segments[size - start :] = self.pad_id, 0
        return ids, segments

    def _added_id(self, shards, names, place):
        """Return the id that comes to each document; None where most have it by themselves."""
        found = first_id(shards, names)
        if found is None:
            return None
        some = np.unique(np.linspace(0, len(shards) - 1, _LOOKED_AT).astype(np.int64))
        number = sum(bool((shards[int(one)][place] == found).any()) for one in some)
        is_added = 2 * number <= len(some)
        message = "and get it once more" if is_added else "and none gets it"
        where = "begin" if place.start is None else "end"
        what = f"documents that were looked at {where} with the token {found} already, {message}"
        warn_left_out(self, number, len(some), what)
        return found if is_added else None

    def _empty_inputs(self):
        zeros = np.zeros(self.length, np.int32)
        return {"tokens": zeros + np.int32(self.pad_id), "segments": zeros}

    def _first_token(self, epoch):
        """Return where the first row of an epoch begins in the circle."""
        if not (self._shuffle and self._training):
            return 0
        return int(np.random.default_rng([self._seed, epoch]).integers(self._stream.length))


def first_id(shards: TokenShards, names: tuple[str, ...]) -> int | None:
    """Return the id of the first special token that the tokenizer has; None for none."""
    return next((shards.special_ids[name] for name in names if name in shards.special_ids), None)


class LanguageModelBatches(PackedDocuments):
    """Batches of documents that are packed to full rows, for `Trainer.fit` of a `CausalLM`.

    The documents stand one after the other, each between a start and an end token, and are divided
    into rows of `length` tokens: nothing is padded. A batch is

        ({"tokens": int32 [b, s], "segments": int32 [b, s]}, labels int32 [b, s])

    where segments are the numbers of the documents in their row, from 1, beyond which no token
    attends, and the label of a token is the next one of its document, `ignore_id` at its last. In
    an epoch each token but a document's first is a label once. Where rows begin is drawn anew for
    each epoch that is shuffled; of the circle of all documents at most a batch is left out.

    Reference: Brown et al., 2020, "Language models are few-shot learners", arXiv 2005.14165, §B.

    Args:
        shards: the documents.
        length: number of tokens s of a row.
        batch_size: number of rows of a global batch.
        shuffle: whether each epoch is shuffled: rows, of all shards together.
        seed: what the shuffling depends on, besides the epoch.
        shard_index, num_shards: this rank's share of each global batch; see
            `dtransformer.data_shard`.
        pad_rows_to_multiple_of: empty rows are added to this rank's rows of a batch until their
            number is a multiple of this; see `dtransformer.rows_multiple_of`.
        training: whether rows that fill no batch are left out. Otherwise each token counts, and
            empty rows fill the last batch.
        add_start, add_end: whether documents begin and end with the tokenizer's start and end
            tokens, where it has them.

    Attributes:
        num_rows: number of rows of an epoch.
        ignore_id: the label of tokens that do not count, -100, for `CrossEntropyLoss`.

    Raises:
        InputError: the text fills no batch, or an argument is out of range.

    Example:

    >>> from dtransformer.datasets import SubwordTokenizer, write_token_shards
    >>> tokenizer = SubwordTokenizer.train(["one two three"], vocab_size=26)
    >>> shards = write_token_shards(["one two", "three"], tokenizer, "shards")
    >>> batches = LanguageModelBatches(shards, length=8, batch_size=1, training=False)
    >>> inputs, labels = next(iter(batches.as_dataset()))
    >>> inputs["tokens"].shape, inputs["segments"].numpy()[0, 0]
    (TensorShape([1, 8]), np.int32(1))
    """

    def row(self, epoch: int, number: int) -> Example:
        """Return {"tokens": int32 [s], "segments": int32 [s]} and labels int32 [s] of a row."""
        ids, segments = self._read(epoch, number, self.length + 1)
        inputs = {"tokens": ids[:-1], "segments": segments[:-1]}
        has_next = (segments[1:] == segments[:-1]) & (segments[:-1] > 0)
        return inputs, np.where(has_next, ids[1:], self.ignore_id).astype(np.int32)

    def empty_row(self) -> Example:
        """Return a row in which nothing counts."""
        return self._empty_inputs(), np.full(self.length, self.ignore_id, np.int32)
