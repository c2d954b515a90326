"""Batches of texts with masked spans, as in T5's pretraining."""

from collections.abc import Sequence

import numpy as np

from dtransformer.datasets.indexed_batches import Example
from dtransformer.datasets.language_model import PackedDocuments, first_id
from dtransformer.datasets.masked_language_model import row_generator
from dtransformer.datasets.token_shards import TokenShards
from dtransformer.errors import InputError, check_int


class SpanCorruptionBatches(PackedDocuments):
    """Batches of texts with masked spans for `Trainer.fit` of an encoder-decoder.

    A row consists of consecutive tokens of all documents, each with its end token. In the source, a
    sentinel replaces each of several random spans. The target consists of each sentinel followed by
    the tokens of its span. A batch is

        ({"source": int32 [b, s], "target": int32 [b, t]}, labels int32 [b, t])

    where target is the start token and the labels without the last one. The length t follows from
    s. All rows replace the same number of tokens, so training needs no padding. Spans depend on
    seed, epoch and row, so each epoch differs.

    Reference: Raffel et al., 2020, "Exploring the limits of transfer learning with a unified
    text-to-text transformer", arXiv 1910.10683, §3.1.4 and §3.3.4.

    Args:
        shards: The `TokenShards`.
        length: Integer. Maximum number of tokens of the source. The length s is `length`, or
            `length - 1` if no text fits exactly.
        rate: Float in (0, 1). Fraction of the tokens to replace. Defaults to 0.15.
        mean_span: Float. Mean number of tokens of a span. Defaults to 3.0.
        sentinel_ids: List of the ids of the sentinels, in order of use. T5's are its last 100 ids
            in descending order. Defaults to additional ids from `vocab_size` on.
        start_id: Integer. First id of a target. Defaults to the padding id, as in T5.
        **options: `batch_size` and other arguments of `LanguageModelBatches`. `add_start` defaults
            to `False`.

    Attributes:
        vocab_size: Number of ids, including the sentinels, for the network.
        source_length, target_length: Number of tokens s and t.

    Raises:
        InputError: If the text fills no batch, an argument is out of range, or there are too few
            sentinels.

    Example:

    >>> from dtransformer.datasets import SubwordTokenizer, write_token_shards
    >>> tokenizer = SubwordTokenizer.train(["one two three"], vocab_size=26)
    >>> shards = write_token_shards(["one two", "three"], tokenizer, "shards")
    >>> batches = SpanCorruptionBatches(shards, length=8, batch_size=1)
    >>> inputs, labels = next(iter(batches.as_dataset()))
    >>> inputs["source"].shape, labels.shape
    (TensorShape([1, 8]), TensorShape([1, 3]))
    """

    def __init__(
        self,
        shards: TokenShards,
        *,
        length: int,
        rate: float = 0.15,
        mean_span: float = 3.0,
        sentinel_ids: Sequence[int] | None = None,
        start_id: int | None = None,
        **options,
    ):
        check_int("length", length, 4)
        if not 0 < rate < 1 or mean_span < 1:
            raise InputError(f"`{rate=}` must be between 0 and 1, and `{mean_span=}` at least 1.")
        self._spans = (rate, mean_span)
        end_id = first_id(shards, ("end", "sep"))
        self._end = [] if end_id is None else [end_id]
        text = text_length(length, rate, mean_span, len(self._end))
        num_replaced, num_spans = span_counts(text, *self._spans)
        more = num_spans + len(self._end)
        self.source_length = text - num_replaced + more
        self.target_length = num_replaced + more
        if sentinel_ids is None:
            sentinel_ids = range(shards.vocab_size, shards.vocab_size + num_spans)
        if len(sentinel_ids) < num_spans:
            raise InputError(
                f"Rows of `{length=}` have {num_spans} spans, but there are {len(sentinel_ids)} "
                "`sentinel_ids`. Add ids or use shorter rows."
            )
        self._sentinels = np.array(sentinel_ids, np.int32)
        self.vocab_size = max(shards.vocab_size, int(self._sentinels.max()) + 1)
        super().__init__(shards, length=text, **{"add_start": False, **options})
        self.start_id = self.pad_id if start_id is None else start_id

    def row(self, epoch: int, index: int) -> Example:
        """Return the inputs and labels of a row, without the batch dimension."""
        ids, segments = self._read(epoch, index, self.length)
        ids = ids[segments > 0]
        inputs, labels = self.empty_row()
        if len(ids) < 2:  # The last row of an evaluation may be too short.
            return inputs, labels
        spans = random_spans(len(ids), *self._spans, row_generator(self._seed, epoch, index))
        source = []
        target = []
        for sentinel, (start, end, next_start) in zip(self._sentinels, spans):
            source += [[sentinel], ids[end:next_start]]
            target += [[sentinel], ids[start:end]]
        source = np.concatenate([ids[: spans[0][0]], *source, self._end])
        target = np.concatenate([*target, self._end])
        inputs["source"][: len(source)] = source
        inputs["target"][: len(target)] = [self.start_id, *target[:-1]]
        labels[: len(target)] = target
        return inputs, labels

    def empty_row(self) -> Example:
        """Return a row of padding, whose labels are ignored."""
        lengths = {"source": self.source_length, "target": self.target_length}
        inputs = {side: np.full(size, self.pad_id, np.int32) for side, size in lengths.items()}
        return inputs, np.full(self.target_length, self.ignore_id, np.int32)


def text_length(length: int, rate: float, mean_span: float, num_ends: int = 1) -> int:
    """Return the maximum number of text tokens whose corrupted source has at most `length` tokens.

    Args:
        length: Integer, at least 4. Number of tokens of the source.
        rate, mean_span: See `SpanCorruptionBatches`.
        num_ends: Integer. Number of end tokens that are appended to a source. Defaults to 1.

    Example:

    >>> text_length(512, 0.15, 3.0)
    568
    """
    text = 2
    while True:
        num_replaced, num_spans = span_counts(text + 1, rate, mean_span)
        if text + 1 - num_replaced + num_spans + num_ends > length:
            return text
        text += 1


def span_counts(length: int, rate: float, mean_span: float) -> tuple[int, int]:
    """Return the number of tokens to replace in a text, and the number of spans.

    Both are at least 1. Rounding aside, they are `length * rate` and `length * rate / mean_span`.

    Args:
        length: Integer, at least 2. Number of tokens of the text.
        rate: Float. Fraction of the tokens to replace.
        mean_span: Float. Mean number of tokens of a span.

    Example:

    >>> span_counts(512, 0.15, 3.0)
    (77, 26)
    """
    num_replaced = min(max(round(length * rate), 1), length - 1)
    max_spans = min(num_replaced, length - num_replaced)  # Each span follows at least one token.
    return num_replaced, min(max(round(num_replaced / mean_span), 1), max_spans)


def random_spans(
    length: int, rate: float, mean_span: float, rng: np.random.Generator
) -> list[tuple[int, int, int]]:
    """Return random spans of a text.

    All divisions of the replaced tokens and of the other tokens into nonempty spans are equally
    likely. The text begins with tokens that are not replaced, and the last span ends the text.

    Args:
        length, rate, mean_span: See `span_counts`.
        rng: Random generator.

    Returns:
        List of `(start, end, next_start)` tuples. The last `next_start` is `length`.

    Example:

    >>> random_spans(4, 0.5, 1.0, np.random.default_rng(0))
    [(1, 2, 3), (3, 4, 4)]
    """
    num_replaced, num_spans = span_counts(length, rate, mean_span)
    unchanged, replaced = (
        _random_parts(total, num_spans, rng) for total in (length - num_replaced, num_replaced)
    )
    bounds = np.cumsum(np.stack([unchanged, replaced], 1).ravel()).tolist()
    starts = bounds[::2]
    return list(zip(starts, bounds[1::2], [*starts[1:], length], strict=True))


def _random_parts(total, count, rng):
    """Return `count` random integers of at least 1 whose sum is `total`."""
    cuts = 1 + np.sort(rng.choice(total - 1, count - 1, replace=False))
    return np.diff([0, *cuts, total])
