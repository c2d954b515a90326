"""Rows of documents that stand one after the other: what packed batches have in common."""

import numpy as np

from dtransformer.datasets.indexed_batches import IndexedBatches
from dtransformer.datasets.left_out import warn_left_out
from dtransformer.datasets.token_shards import TokenShards
from dtransformer.datasets.token_stream import TokenStream
from dtransformer.errors import InputError

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
        check_length(length)
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


def check_length(length: int, least: int = 1) -> None:
    """Check the number of tokens of a row.

    Raises:
        InputError: it is less than the least.
    """
    if length < least:
        raise InputError(f"length={length} has to be at least {least}")


def first_id(shards: TokenShards, names: tuple[str, ...]) -> int | None:
    """Return the id of the first special token that the tokenizer has; None for none."""
    return next((shards.special_ids[name] for name in names if name in shards.special_ids), None)
