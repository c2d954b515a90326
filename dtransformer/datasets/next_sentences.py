"""Pairs of texts with masked tokens for next-sentence prediction, as in BERT's pretraining."""

import numpy as np

from dtransformer.datasets.indexed_batches import Example, IndexedBatches
from dtransformer.datasets.language_model import first_id
from dtransformer.datasets.masked_language_model import (
    Masking,
    num_positions,
    row_generator,
    select_masked,
)
from dtransformer.datasets.token_shards import TokenShards
from dtransformer.errors import InputError, check_int

FOLLOWS = 0
IS_RANDOM = 1
_NUM_SPECIAL = 3  # [CLS] A [SEP] B [SEP]


class NextSentenceBatches(IndexedBatches):
    """Batches of pairs of texts for `Trainer.fit` of a `MaskedLM(next_sentence=True)`.

    A row consists of the longest fitting run of sentences of one document. They are split at a
    random point into A and B. In half of the rows, and if there is only one sentence, B is replaced
    by text of another document. A batch is

        ({"tokens": int32 [b, s], "token_types": int32 [b, s], "masked_lm_positions": int32 [b, P]},
         {"masked_lm": int32 [b, P], "next_sentence": int32 [b]})

    with tokens `[CLS] A [SEP] B [SEP]` and padding. Token types are 0 up to the first `[SEP]`, and
    1 up to the second. `masked_lm` are the original ids at the positions of the chosen tokens; see
    `MaskedLanguageModelBatches`. P is `rate` times s − 3, rounded. `next_sentence` is 0 if B
    follows A, and 1 if it is from another document. All random choices depend on seed, epoch and
    row, so each epoch differs.

    Reference: Devlin et al., 2019, "BERT", arXiv 1810.04805, §3.1 and §A.2.

    Args:
        shards: `TokenShards` of documents whose parts are sentences.
        length: Integer. Number of tokens s of a row.
        rate, mask_id, all_positions, pad_positions_to_multiple_of: See
            `MaskedLanguageModelBatches`.
        **options: `batch_size` and other arguments of `LanguageModelBatches`, except `add_start`
            and `add_end`.

    Attributes:
        vocab_size: Number of ids, including the mask token, for the network.
        num_rows: Number of rows of an epoch.

    Raises:
        InputError: If the shards have no sentences or fewer than two documents, if the tokenizer
            has no tokens for the beginning and end of a text, if the text fills no batch, or if an
            argument is out of range.

    Example:

    >>> from dtransformer.datasets import SubwordTokenizer, write_token_shards
    >>> documents = [["one two", "three"], ["two three", "one", "one"]]
    >>> tokenizer = SubwordTokenizer.train(["one two three"], vocab_size=26)
    >>> shards = write_token_shards(documents, tokenizer, "shards")
    >>> batches = NextSentenceBatches(shards, length=16, batch_size=2)
    >>> inputs, labels = next(iter(batches.as_dataset()))
    >>> inputs["token_types"].shape, labels["next_sentence"].shape
    (TensorShape([2, 16]), TensorShape([2]))
    """

    def __init__(
        self,
        shards: TokenShards,
        *,
        length: int,
        rate: float = 0.15,
        mask_id: int | None = None,
        all_positions: bool = False,
        pad_positions_to_multiple_of: int = 1,
        **options,
    ):
        check_int("length", length, _NUM_SPECIAL + 2)
        if not shards.has_parts or len(shards) < 2:
            raise InputError(
                f"{shards.folder}: Next-sentence prediction requires at least two documents with "
                "sentences as parts. Write the shards with --sentences or from lists of sentences."
            )
        self._cls = first_id(shards, ("cls", "start"))
        self._sep = first_id(shards, ("sep", "end"))
        if self._cls is None or self._sep is None:
            raise InputError(
                f"{shards.folder}: The tokenizer has no tokens for the beginning and end of a text. Use "
                "one with `cls_id` and `sep_id`, or `start_id` and `end_id`."
            )
        self._masking = Masking.from_shards(shards, rate, mask_id)
        self._num_positions = None
        if not all_positions:
            max_tokens = length - _NUM_SPECIAL
            self._num_positions = num_positions(max_tokens, rate, pad_positions_to_multiple_of)
        self.vocab_size = max(shards.vocab_size, self._masking.mask_id + 1)
        self._shards = shards
        self._chunks = []  # One (starts, ends) tuple of part indices per shard.
        for index in range(len(shards.shard_sizes)):
            shard = shards.shard(index)
            self._chunks.append(chunks(shard.parts, shard.documents, length - _NUM_SPECIAL))
        self._first_rows = np.cumsum([0, *(len(first) for first, _ in self._chunks)])
        num_rows = int(self._first_rows[-1])
        what = f"{len(shards):,} documents"
        super().__init__(shards, num_rows, what, length=length, **options)

    def row(self, epoch: int, index: int) -> Example:
        """Return the inputs and labels of a row, without the batch dimension."""
        rng = row_generator(self._seed, epoch, index)
        first, second, is_next = self._pair(index, rng)
        first, second = truncate_pair(first, second, self.length - _NUM_SPECIAL, rng)
        ids = np.concatenate([[self._cls], first, [self._sep], second, [self._sep]])
        ids, chosen_labels = self._masking(ids.astype(np.int32), rng)
        inputs, labels = self._padding()
        inputs["tokens"][: len(ids)] = ids
        inputs["token_types"][len(first) + 2 : len(ids)] = 1
        labels[: len(ids)] = chosen_labels
        return self._example(inputs, labels, FOLLOWS if is_next else IS_RANDOM)

    def empty_row(self) -> Example:
        """Return a row of padding, whose labels are ignored."""
        return self._example(*self._padding(), self.ignore_id)

    def _padding(self):
        """Return the inputs of an empty row and ignored labels, int32 [s]."""
        zeros = np.zeros(self.length, np.int32)
        inputs = {"tokens": zeros + np.int32(self.pad_id), "token_types": zeros}
        return inputs, zeros + np.int32(self.ignore_id)

    def _example(self, inputs, labels, next_sentence):
        inputs, labels = select_masked(inputs, labels, self._num_positions)
        return inputs, {"masked_lm": labels, "next_sentence": np.int32(next_sentence)}

    def _pair(self, index, rng):
        """Return the ids of A, the ids of B, and whether B follows A."""
        shard_index = int(np.searchsorted(self._first_rows, index, "right")) - 1
        shard = self._shards.shard(shard_index)
        place = index - self._first_rows[shard_index]
        start, end = (int(side[place]) for side in self._chunks[shard_index])
        count = end - start
        middle = start + (int(rng.integers(1, count)) if count > 1 else 1)

        def text(start, end):
            return self._shards.ids(shard.tokens[shard.parts[start] : shard.parts[end]])

        first = text(start, middle)
        is_next = count > 1 and rng.random() < 0.5
        if is_next:
            return first, text(middle, end), True
        document = int(np.searchsorted(shard.documents, shard.parts[start], "right")) - 1
        document += self._shards.first_document(shard_index)
        other_shard = int(rng.integers(len(self._shards) - 1))
        tokens, bounds = self._shards.part_bounds(other_shard + (other_shard >= document))
        start = int(bounds[rng.integers(len(bounds) - 1)])
        end = min(int(bounds[-1]), start + self.length)
        return first, self._shards.ids(tokens[start:end]), False


def chunks(parts: np.ndarray, documents: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide documents into rows, each with the longest run of sentences that fits.

    Args:
        parts: int64 [P + 1], token bounds of the sentences; see `Shard`.
        documents: int64 [D + 1], token bounds of the documents.
        room: Integer. Maximum number of tokens of a row. A longer sentence gets a row alone.

    Returns:
        A tuple of two int64 arrays [n]: the index of each row's first sentence, and the index after
        its last.

    Example:

    >>> first, end = chunks(np.array([0, 3, 5, 9, 10]), np.array([0, 5, 10]), room=4)
    >>> first.tolist(), end.tolist()
    ([0, 1, 2, 3], [1, 2, 3, 4])
    """
    bounds = np.searchsorted(parts, documents)
    start = bounds[:-1]
    last = bounds[1:]
    firsts = []
    ends = []
    while len(start):  # Each iteration adds a row of every document that has sentences left.
        end = np.searchsorted(parts, parts[start] + room, "right") - 1
        end = np.clip(end, start + 1, last)
        firsts.append(start)
        ends.append(end)
        has_more = end < last
        start = end[has_more]
        last = last[has_more]
    firsts = np.concatenate(firsts)
    ends = np.concatenate(ends)
    order = np.argsort(firsts, kind="stable")
    return firsts[order], ends[order]


def truncate_pair(
    first: np.ndarray, second: np.ndarray, room: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Cut two texts so that together they have at most `room` tokens. The longer text is cut first.

    Tokens are removed from both ends at random, as in BERT.

    Args:
        first, second: int arrays.
        room: Integer. Maximum number of tokens of both texts.
        rng: Random generator.

    Returns:
        A tuple of the two texts.

    Example:

    >>> rng = np.random.default_rng(0)
    >>> [len(text) for text in truncate_pair(np.arange(9), np.arange(3), 8, rng)]
    [5, 3]
    """
    half = room // 2
    if len(first) <= half:
        sizes = len(first), room - len(first)
    elif len(second) <= half:
        sizes = room - len(second), len(second)
    else:
        sizes = room - half, half

    def cut(text, size):
        surplus = max(0, len(text) - size)
        start = int(rng.binomial(surplus, 0.5))
        return text[start : len(text) - surplus + start]

    return cut(first, sizes[0]), cut(second, sizes[1])
