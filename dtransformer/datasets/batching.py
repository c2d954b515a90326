"""Batches of sentence pairs for `Trainer.fit`."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from dtransformer.datasets.batch_plan import LengthBuckets, bucket_bounds, plan_batches
from dtransformer.datasets.epochs import Epochs, cache_plan, check_shard
from dtransformer.datasets.packing import plan_packed_batches, rows_per_batch
from dtransformer.datasets.skipped_records import warn_skipped
from dtransformer.errors import InputError, check_int

Ids = tf.RaggedTensor | tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class SpecialTokenIds:
    """Ids of the tokens that batches add to sentences. The defaults are `SubwordTokenizer`'s."""

    pad_id: int = 0
    start_id: int = 2
    end_id: int = 3


class TranslationBatches(Epochs):
    """Batches of sentence pairs for `Trainer.fit`.

    Each epoch has a different order. `set_epoch` chooses it before an epoch begins, as in PyTorch's
    DistributedSampler; `Trainer.fit` calls `set_epoch`. A batch is

        ({"source": int32 [b, s], "target": int32 [b, t]}, labels int32 [b, t])

    where target is the start token and the translation, and labels are the translation and the
    end token. Rows are padded to the longest row of this rank.

    Args:
        source_ids, target_ids: Ids [N, (length)], int32, as `tf.RaggedTensor`, or as a tuple of
            arrays `(ids, row_splits)` from `SubwordTokenizer.encode_to_numpy`.
        batch_size: Integer. Number of sentences of a global batch. Specify either `batch_size` or
            `batch_tokens`.
        batch_tokens: Integer. Maximum number of tokens of one side of a global batch, including
            padding.
        max_length: Integer. Maximum number of tokens, without the start or end token. Pairs with a
            longer side are left out in training and cut off otherwise. Defaults to 256.
        buckets: `LengthBuckets` of the pairs' longer sides. An integer or a list of lengths is the
            `bounds` of `LengthBuckets`. Defaults to 8.
        shuffle: Boolean. Whether to shuffle each epoch. Defaults to `True`.
        seed: Integer. Shuffling depends on the seed and the epoch. Defaults to 0.
        shard_index, num_shards: Index of this data rank and number of data ranks. This rank gets
            the rows shard_index, shard_index + num_shards, … of each global batch.
        drop_remainder: Boolean. Whether to leave out sentences that do not fill a batch. Defaults
            to `False`.
        pad_rows_to_multiple_of: Integer. Empty rows are added to this rank's rows of a batch, up to
            a multiple of this number, as the micro-batches of a pipeline require. Defaults to
            1.
        packed_length: Integer. Number of tokens of a row on each side. Several sentences are packed
            into a row, so that all batches have one shape with little padding. Inputs also contain
            "source_segments" and "target_segments": the index of the sentence in its row, from 1,
            and 0 for padding. Packing uses no buckets, and `batch_size` is the number of rows.
            `None` (default) disables packing.
        training: Boolean. Whether to leave out pairs that are too long instead of cutting them off.
            Defaults to `True`.
        special_ids: `SpecialTokenIds` of the tokenizer. Defaults to `SubwordTokenizer`'s.

    Attributes:
        num_pairs: Number of pairs in use.
        num_skipped: Number of pairs that are too long or empty.
        max_tokens: Maximum number of tokens of one side of a global batch.

    Raises:
        InputError: If the sides differ in length, no pair remains, the batch size is not specified
            exactly once, or it is too small for the number of ranks.

    Example:

    >>> ids = tf.ragged.constant([[5, 6], [7]], "int32")
    >>> batches = TranslationBatches(ids, ids, batch_size=2, shuffle=False, buckets=1)
    >>> inputs, labels = next(iter(batches.as_dataset()))
    >>> labels.numpy().tolist()
    [[5, 6, 3], [7, 3, 0]]
    """

    def __init__(
        self,
        source_ids: Ids,
        target_ids: Ids,
        *,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        max_length: int = 256,
        buckets: LengthBuckets | int | Sequence[int] = 8,
        shuffle: bool = True,
        seed: int = 0,
        shard_index: int = 0,
        num_shards: int = 1,
        drop_remainder: bool = False,
        pad_rows_to_multiple_of: int = 1,
        packed_length: int | None = None,
        training: bool = True,
        special_ids: SpecialTokenIds = SpecialTokenIds(),
    ):
        check_int("max_length", max_length)
        check_int("pad_rows_to_multiple_of", pad_rows_to_multiple_of)
        check_shard(shard_index, num_shards)
        if not isinstance(buckets, LengthBuckets):
            buckets = LengthBuckets(buckets)
        self._ids = _as_arrays(source_ids), _remove_special_ids(target_ids, special_ids)
        lengths = [np.diff(row_splits) for _, row_splits in self._ids]
        self._pairs = _usable_pairs(*lengths, max_length if training else None)
        self.num_pairs = len(self._pairs)
        self.num_skipped = len(lengths[0]) - self.num_pairs
        longer = np.maximum(*lengths)[self._pairs]
        self._lengths = np.minimum(longer, max_length) + 1  # The start or end token.
        self._shard_index = shard_index
        self.num_shards = num_shards
        self._max_length = max_length
        self._packed_length = packed_length
        self._row_multiple = pad_rows_to_multiple_of
        self._length_multiple = buckets.pad_to_multiple_of
        self._special = special_ids
        self._bounds = None
        size = {"batch_size": batch_size, "batch_tokens": batch_tokens}
        common = {"shuffle": shuffle, "drop_remainder": drop_remainder, "seed": seed}
        if packed_length is None:
            options = {**size, **common, "buckets": buckets.bounds, "min_rows": num_shards}
            self._plan = cache_plan(
                lambda epoch: plan_batches(self._lengths, epoch=epoch, **options)
            )
            if buckets.pad_to_bounds:
                self._bounds = bucket_bounds(self._lengths, buckets.bounds)
        else:
            rows = rows_per_batch(packed_length, self._lengths, num_shards, **size)
            side_lengths = np.minimum(np.stack(lengths, 1)[self._pairs], max_length) + [0, 1]
            self._plan = cache_plan(
                lambda epoch: plan_packed_batches(
                    side_lengths, packed_length, rows, epoch=epoch, **common
                )
            )
            self._local_rows = -(-rows // num_shards)
        self._report_left_out(lengths, max_length, training)
        first_epoch = self._plan(0)
        super().__init__(len(first_epoch), seed)
        self.max_tokens = 0
        for batch in first_epoch:
            longest = packed_length or int(self._lengths[batch].max())
            self.max_tokens = max(self.max_tokens, len(batch) * longest)
        if not first_epoch:
            raise InputError(
                f"{self.num_pairs} sentence pairs do not fill a batch for {num_shards} data ranks. "
                "Use more pairs, smaller batches or fewer ranks."
            )

    def _report_left_out(self, lengths, max_length, training):
        total = len(lengths[0])
        what = f"pairs are empty or longer than max_length={max_length} and are left out"
        warn_skipped(self, self.num_skipped, total, what)
        if not training:
            cut = np.maximum(*lengths)[self._pairs] > max_length
            warn_skipped(
                self, int(cut.sum()), total, f"pairs are cut off at max_length={max_length}"
            )

    def rows(self, epoch: int, batch: int) -> list[np.ndarray]:
        """Return the pair indices in each of this rank's rows of a batch, as a list of arrays."""
        rows = self._plan(epoch)[batch][self._shard_index :: self.num_shards]
        return [self._pairs[np.atleast_1d(row)] for row in rows]

    def batch(self, epoch: int, batch: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        rows = [self._row(pairs) for pairs in self.rows(epoch, batch)]
        min_width = 0
        num_rows = len(rows) if self._packed_length is None else self._local_rows
        num_rows += -num_rows % self._row_multiple
        if self._bounds is not None:  # Pad to the maximum length of the batch's bucket.
            longest = max(max(len(row["source"]) + 1, len(row["labels"])) for row in rows)
            min_width = self._bounds[np.searchsorted(self._bounds, longest)]
        inputs = {name: self._padded(name, rows, num_rows, min_width) for name in self._names()}
        return inputs, self._padded("labels", rows, num_rows, min_width)

    def spec(self) -> tuple[dict[str, tf.TensorSpec], tf.TensorSpec]:
        shape = [None, None]
        if self._packed_length is not None:
            shape = self._local_rows + -self._local_rows % self._row_multiple, self._packed_length
        spec = tf.TensorSpec(shape, tf.int32)
        return dict.fromkeys(self._names(), spec), spec

    def _names(self):
        segments = () if self._packed_length is None else ("source_segments", "target_segments")
        return ("source", "target", *segments)

    def _row(self, pairs):
        """Return a dict of lists: concatenated sentences of pairs for each input and the labels."""
        row = {name: [] for name in (*self._names(), "labels")}
        for segment, pair in enumerate(pairs, start=1):
            source, target = (self._sentence(*side, pair) for side in self._ids)
            sequences = {
                "source": source,
                "target": [self._special.start_id, *target],
                "labels": [*target, self._special.end_id],
            }
            sequences["source_segments"] = [segment] * len(source)
            sequences["target_segments"] = [segment] * len(sequences["target"])
            for name, ids in row.items():
                ids += sequences[name]
        return row

    def _sentence(self, values, row_splits, pair):
        return values[row_splits[pair] : row_splits[pair + 1]][: self._max_length].tolist()

    def _padded(self, name, rows, num_rows, min_width):
        """Return an input or the labels of rows as int32 [number, length]."""
        width = self._packed_length
        max_width = self._max_length + (name != "source")
        if width is None:
            longest = max(min_width, *(len(row[name]) for row in rows))
            width = min(longest + -longest % self._length_multiple, max_width)
        padding = 0 if name.endswith("segments") else self._special.pad_id
        padded = np.full((num_rows, width), padding, np.int32)
        for padded_row, row in zip(padded, rows):
            padded_row[: len(row[name])] = row[name]
        return padded


def _as_arrays(ids):
    if isinstance(ids, tf.RaggedTensor):
        return ids.values.numpy(), ids.row_splits.numpy()
    return ids


def _remove_special_ids(ids, special_ids):
    """Remove start and end tokens from targets, because batches add them to every target."""
    values, splits = _as_arrays(ids)
    starts = splits[:-1].copy()
    ends = splits[1:].copy()
    starts += (starts < ends) & (
        values[np.minimum(starts, len(values) - 1)] == special_ids.start_id
    )
    ends -= (starts < ends) & (values[np.maximum(ends - 1, 0)] == special_ids.end_id)
    changes = np.zeros(len(values) + 1, np.int64)
    np.add.at(changes, starts, 1)
    np.add.at(changes, ends, -1)
    return values[np.cumsum(changes)[:-1] > 0], np.cumsum([0, *(ends - starts)])


def _usable_pairs(source_lengths, target_lengths, max_length):
    """Return the indices of pairs without an empty or too long side."""
    if len(source_lengths) != len(target_lengths):
        raise InputError(
            f"Got {len(source_lengths)} source sentences and {len(target_lengths)} target sentences. "
            "Give the same number of both."
        )
    is_usable = (source_lengths > 0) & (target_lengths > 0)
    if max_length is not None:
        is_usable &= np.maximum(source_lengths, target_lengths) <= max_length
    if not is_usable.any():
        raise InputError(
            f"All {len(is_usable)} sentence pairs are empty or longer than `{max_length=}` tokens. "
            "Check the files or increase `max_length`."
        )
    return np.flatnonzero(is_usable)
