"""Pairs of texts for next-sentence prediction, with masked tokens: what BERT is trained on."""

import numpy as np

from dtransformer.datasets.indexed_batches import Example, IndexedBatches
from dtransformer.datasets.language_model import first_id
from dtransformer.datasets.masked_language_model import Masking, row_generator
from dtransformer.datasets.token_shards import TokenShards
from dtransformer.errors import InputError, check_int

FOLLOWS, IS_RANDOM = 0, 1
_NUM_SPECIAL = 3  # [CLS] A [SEP] B [SEP]


class NextSentenceBatches(IndexedBatches):
    """Batches of pairs of texts for `Trainer.fit` of a `MaskedLM(next_sentence=True)`.

    A row is made of sentences of one document that follow each other, as many as it holds. They
    are divided at random into A and B; in half of the rows B is from another document instead, or
    where there is a single sentence. A batch is

        ({"tokens": int32 [b, s], "token_types": int32 [b, s]},
         {"masked_lm": int32 [b, s], "next_sentence": int32 [b]})

    of `[CLS] A [SEP] B [SEP]`, padded; the types are 0 up to the first `[SEP]`, and 1 up to the
    second. Labels are the tokens that are asked for, `ignore_id` elsewhere; and 0 where B follows, 1
    where it is from another document. All that is random is drawn anew in each epoch, from seed,
    epoch and row.

    Reference: Devlin et al., 2019, "BERT", arXiv 1810.04805, §3.1 and §A.2.

    Args:
        shards: documents whose parts are sentences.
        length: number of tokens s of a row.
        rate, mask_id: as of `MaskedLanguageModelBatches`.
        **options: `batch_size` and others, as `LanguageModelBatches`'.

    Attributes:
        vocab_size: number of ids, the mask token's included: that of the network.
        num_rows: number of rows of an epoch.

    Raises:
        InputError: the shards have no sentences, or fewer than two documents; the tokenizer has no
            tokens to begin and end a text with; or as of `LanguageModelBatches`.

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
        **options,
    ):
        check_int("length", length, _NUM_SPECIAL + 2)
        if not shards.has_parts or len(shards) < 2:
            raise InputError(
                f"{shards.folder}: next sentences need two documents or more, whose sentences are "
                "known: write the shards with --sentences, or of lists of sentences"
            )
        self._cls, self._sep = first_id(shards, ("cls", "start")), first_id(shards, ("sep", "end"))
        if self._cls is None or self._sep is None:
            raise InputError(
                f"{shards.folder}: the tokenizer has no tokens that begin and end a text: use one with "
                "cls_id and sep_id, or start_id and end_id"
            )
        self._masking = Masking.of(shards, rate, mask_id)
        self.vocab_size = max(shards.vocab_size, self._masking.mask_id + 1)
        self._shards = shards
        self._chunks = []  # of each shard: the first part, and the one after the last
        for number in range(len(shards.shard_sizes)):
            shard = shards.shard(number)
            self._chunks.append(chunks(shard.parts, shard.documents, length - _NUM_SPECIAL))
        self._first_rows = np.cumsum([0, *(len(first) for first, _ in self._chunks)])
        num_rows, what = int(self._first_rows[-1]), f"{len(shards):,} documents"
        super().__init__(shards, num_rows, what, length=length, **options)

    def row(self, epoch: int, number: int) -> Example:
        """Return the inputs and labels of a row, as the class says, without the batch's dimension."""
        rng = row_generator(self._seed, epoch, number)
        first, second, is_next = self._pair(number, rng)
        first, second = truncated(first, second, self.length - _NUM_SPECIAL, rng)
        ids = np.concatenate([[self._cls], first, [self._sep], second, [self._sep]])
        ids, labels = self._masking(ids.astype(np.int32), rng)
        inputs, of_row = self.empty_row()
        inputs["tokens"][: len(ids)] = ids
        inputs["token_types"][len(first) + 2 : len(ids)] = 1
        of_row["masked_lm"][: len(ids)] = labels
        return inputs, {**of_row, "next_sentence": np.int32(FOLLOWS if is_next else IS_RANDOM)}

    def empty_row(self) -> Example:
        """Return a row in which nothing counts."""
        zeros = np.zeros(self.length, np.int32)
        labels = {"masked_lm": zeros + np.int32(self.ignore_id)}
        labels["next_sentence"] = np.int32(self.ignore_id)
        return {"tokens": zeros + np.int32(self.pad_id), "token_types": zeros}, labels

    def _pair(self, number, rng):
        """Return the ids of A and B of a row, and whether B follows A."""
        index = int(np.searchsorted(self._first_rows, number, "right")) - 1
        shard, place = self._shards.shard(index), number - self._first_rows[index]
        start, end = (int(side[place]) for side in self._chunks[index])
        count = end - start
        middle = start + (int(rng.integers(1, count)) if count > 1 else 1)
        text = lambda a, b: self._shards.ids(shard.tokens[shard.parts[a] : shard.parts[b]])
        first, is_next = text(start, middle), count > 1 and rng.random() < 0.5
        if is_next:
            return first, text(middle, end), True
        own = int(np.searchsorted(shard.documents, shard.parts[start], "right")) - 1
        own += self._shards.first_document(index)
        other = int(rng.integers(len(self._shards) - 1))
        tokens, bounds = self._shards.part_bounds(other + (other >= own))
        start = int(bounds[rng.integers(len(bounds) - 1)])
        end = min(int(bounds[-1]), start + self.length)
        return first, self._shards.ids(tokens[start:end]), False


def chunks(parts: np.ndarray, documents: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sentences that make up each row: of one document, as many as there is room for.

    Args:
        parts: int64 [P + 1], where sentences begin and end; see `Shard`.
        documents: int64 [D + 1], where documents begin and end.
        room: tokens of a row. A sentence that is longer is alone.

    Returns:
        int64 [n] and int64 [n]: the first sentence of each row, and the one after its last.

    Example:

    >>> first, end = chunks(np.array([0, 3, 5, 9, 10]), np.array([0, 5, 10]), room=4)
    >>> first.tolist(), end.tolist()
    ([0, 1, 2, 3], [1, 2, 3, 4])
    """
    bounds = np.searchsorted(parts, documents)
    start, last = bounds[:-1], bounds[1:]
    firsts, ends = [], []
    while len(start):  # a row of each document at a time
        end = np.searchsorted(parts, parts[start] + room, "right") - 1
        end = np.clip(end, start + 1, last)
        firsts.append(start)
        ends.append(end)
        goes_on = end < last
        start, last = end[goes_on], last[goes_on]
    firsts, ends = np.concatenate(firsts), np.concatenate(ends)
    order = np.argsort(firsts, kind="stable")
    return firsts[order], ends[order]


def truncated(
    first: np.ndarray, second: np.ndarray, room: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return two texts that together have `room` tokens at most: the longer one loses the surplus.

    Each token that goes is the first or the last one by chance, as in BERT.

    Example:

    >>> rng = np.random.default_rng(0)
    >>> [len(text) for text in truncated(np.arange(9), np.arange(3), 8, rng)]
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
