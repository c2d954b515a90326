"""All documents of token shards as one stream of tokens, of which any stretch can be read.

A document in the stream is its tokens between a start and an end token, where these are asked for.
Where a document begins there is its number times these more than in the shard's files: so it is
found by bisection, and nothing has to be computed before.
"""

import bisect

import numpy as np

from dtransformer.datasets.token_shards import TokenShards


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
