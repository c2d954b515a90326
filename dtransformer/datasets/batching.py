"""Batches of sentence pairs for `Trainer.fit`: a plan of each epoch, and a thin tf.data pipeline."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from dtransformer import _compat
from dtransformer.datasets.batch_plan import bucket_bounds, plan_batches
from dtransformer.datasets.epochs import Epochs, check_shard
from dtransformer.datasets.left_out import warn_left_out
from dtransformer.datasets.packing import (
    END_OF_ROW,
    PackedPlan,
    PackedRows,
    rows_per_batch,
    with_ends_of_rows,
)
from dtransformer.errors import InputError
from dtransformer.inputs.autotuning import without_autotuning


@dataclasses.dataclass(frozen=True)
class Padding:
    """How sentences of different lengths become a batch, and its special tokens.

    Args:
        max_length: number of tokens of a side; what is beyond is cut off. The start or end
            token comes in addition.
        bucket_bounds: greatest lengths of the buckets, a special token included, int [buckets]:
            a batch is padded to that of its bucket. None to pad it to its longest row.
        multiple_of: lengths are rounded up to a multiple of it.
        rows_multiple_of: empty rows are added until their number is a multiple of it.
        pad_id, start_id, end_id: ids of the special tokens.
    """

    max_length: int
    bucket_bounds: np.ndarray | None = None
    multiple_of: int = 1
    rows_multiple_of: int = 1
    pad_id: int = 0
    start_id: int = 2
    end_id: int = 3

    def batch(
        self, source: tf.RaggedTensor, target: tf.RaggedTensor
    ) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        """Return a batch of sentence pairs.

        Args:
            source, target: ids [b, (length)], int32.

        Returns:
            ({"source": int32 [b, s], "target": int32 [b, t]}, labels int32 [b, t]): the target
            begins with the start token, the labels end with the end token.
        """
        source, target = source[:, : self.max_length], target[:, : self.max_length]
        column = tf.ones([target.nrows(out_type=tf.int32), 1], tf.int32)
        labels = tf.concat([target, self.end_id * column], axis=1)
        target = tf.concat([self.start_id * column, target], axis=1)
        least = self._bucket_length(source, labels)
        inputs = {
            "source": self._pad(source, least, self.max_length),
            "target": self._pad(target, least, self.max_length + 1),
        }
        return inputs, self._pad(labels, least, self.max_length + 1)

    def _bucket_length(self, source, labels):
        """Return the greatest length of a batch's bucket; 0 where there are no buckets."""
        if self.bucket_bounds is None:
            return 0
        bounds = tf.constant(self.bucket_bounds, tf.int32)
        longest = tf.maximum(source.bounding_shape()[1] + 1, labels.bounding_shape()[1])
        return bounds[tf.searchsorted(bounds, [tf.cast(longest, tf.int32)])[0]]

    def _pad(self, ids, least, most):
        """Ragged [b, (length)] -> [b, the longest or `least`, rounded up within `most`]."""
        longest = tf.maximum(tf.cast(tf.reduce_max(ids.row_lengths()), tf.int32), least)
        width = tf.minimum(-(-longest // self.multiple_of) * self.multiple_of, most)
        padded = ids.to_tensor(self.pad_id, shape=tf.stack([-1, width]))
        missing = -tf.shape(padded)[0] % self.rows_multiple_of
        padded = tf.pad(padded, [[0, missing], [0, 0]], constant_values=self.pad_id)
        return tf.ensure_shape(padded, [None, None])


Ids = tf.RaggedTensor | tuple[np.ndarray, np.ndarray]


class TranslationBatches(Epochs):
    """Batches of sentence pairs for `Trainer.fit`.

    Each epoch has an order of its own, chosen by `set_epoch` before it begins (as
    PyTorch's DistributedSampler has it; `Trainer.fit` calls it). A batch is

        ({"source": int32 [b, s], "target": int32 [b, t]}, labels int32 [b, t])

    where target is the start token and the translation, labels the translation and
    the end token; all are padded to the longest of this rank's rows.

    Args:
        source_ids, target_ids: ids [N, (length)], int32, as `tf.RaggedTensor`; or as arrays
            `(ids, row_splits)`, as `SubwordTokenizer.encode_to_numpy` returns them.
        batch_size: number of sentences of a global batch; or
        batch_tokens: number of tokens of one side of a global batch, padding included.
        max_length: number of tokens; pairs with a longer side are left out in training, and cut
            off elsewhere. The start or end token comes in addition.
        num_buckets: number of buckets of lengths.
        buckets: greatest length of each bucket instead, the start or end token included.
        shuffle: whether each epoch is shuffled.
        seed: what the shuffling depends on, besides the epoch.
        shard_index, num_shards: this rank's share of each global batch: rows
            shard_index, shard_index + num_shards, …
        drop_remainder: whether the sentences that fill no batch are left out.
        pad_to_multiple_of: lengths are padded to a multiple of this; a compiler that
            specialises on shapes then sees fewer of them.
        pad_rows_to_multiple_of: empty sentences are added to this rank's rows of a batch
            until their number is a multiple of this; a pipeline's micro-batches need it.
        pad_to_bucket: whether both sides are padded to the greatest length of their bucket,
            so that there are no more shapes than buckets, and those of the remainder.
        packed_length: number of tokens of a row, on each side, which sentences are put in one
            after the other; every batch then has one shape, next to nothing is padded, and its
            inputs have "source_segments" and "target_segments", too: the number of the sentence
            in its row, from 1, and 0 for padding. There are no buckets, and `batch_size` is the
            number of rows.
        training: whether long pairs are left out, rather than cut off.
        pad_id, start_id, end_id: ids of the special tokens.

    Attributes:
        num_pairs: number of pairs that are used.
        num_left_out: number of pairs that are too long or empty.
        max_tokens: number of tokens of one side of the largest global batch, at most.

    Raises:
        InputError: the sides differ in number, nothing is left, or the batches' size is
            given twice or not at all, or is too small for the number of ranks.

    Example:

    >>> ids = tf.ragged.constant([[5, 6], [7]], "int32")
    >>> batches = TranslationBatches(ids, ids, batch_size=2, shuffle=False, num_buckets=1)
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
        num_buckets: int = 8,
        buckets: Sequence[int] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        shard_index: int = 0,
        num_shards: int = 1,
        drop_remainder: bool = False,
        pad_to_multiple_of: int = 1,
        pad_rows_to_multiple_of: int = 1,
        pad_to_bucket: bool = False,
        packed_length: int | None = None,
        training: bool = True,
        pad_id: int = 0,
        start_id: int = 2,
        end_id: int = 3,
    ):
        for name, value in (
            ("max_length", max_length),
            ("pad_to_multiple_of", pad_to_multiple_of),
            ("pad_rows_to_multiple_of", pad_rows_to_multiple_of),
        ):
            if value < 1:
                raise InputError(f"{name}={value} has to be at least 1")
        check_shard(shard_index, num_shards)
        target_ids = _without_ends(_as_ragged(target_ids), start_id, end_id)
        self._ids = _as_ragged(source_ids), target_ids
        lengths = [np.diff(ids.row_splits.numpy()) for ids in self._ids]
        self._pairs = _usable_pairs(*lengths, max_length if training else None)
        self.num_pairs = len(self._pairs)
        self.num_left_out = len(lengths[0]) - self.num_pairs
        longer = np.maximum(*lengths)[self._pairs]
        self._lengths = np.minimum(longer, max_length) + 1  # and the start or end token
        self._shard_index, self.num_shards = shard_index, num_shards
        special = {"pad_id": pad_id, "start_id": start_id, "end_id": end_id}
        size = {"batch_size": batch_size, "batch_tokens": batch_tokens}
        common = {"shuffle": shuffle, "drop_remainder": drop_remainder, "seed": seed}
        if packed_length is None:
            bounds = num_buckets if buckets is None else buckets
            options = {**size, **common, "buckets": bounds, "min_rows": num_shards}
            self._plan = lambda epoch: plan_batches(self._lengths, epoch=epoch, **options)
            self._layout = Padding(
                max_length,
                bucket_bounds(self._lengths, bounds) if pad_to_bucket else None,
                pad_to_multiple_of,
                pad_rows_to_multiple_of,
                **special,
            )
        else:
            rows = rows_per_batch(packed_length, self._lengths, num_shards, **size)
            both = np.minimum(np.stack(lengths, 1)[self._pairs], max_length) + [0, 1]
            self._plan = PackedPlan(both, packed_length, rows, **common).batches
            own = -(-rows // num_shards)
            own += -own % pad_rows_to_multiple_of
            self._layout = PackedRows(packed_length, max_length, own, **special)
        self._tell_left_out(lengths, max_length, training)
        first_epoch = self._plan(0)
        super().__init__(len(first_epoch), seed)
        longest = lambda batch: packed_length or int(self._lengths[batch].max())
        self.max_tokens = max((len(batch) * longest(batch) for batch in first_epoch), default=0)
        if not first_epoch:
            raise InputError(
                f"{self.num_pairs} sentence pairs make no batch for {num_shards} data ranks: give "
                "more pairs, smaller batches or fewer ranks"
            )

    def _tell_left_out(self, lengths, max_length, training):
        total = len(lengths[0])
        what = f"pairs are empty or longer than max_length={max_length}, and left out"
        warn_left_out(self, self.num_left_out, total, what)
        if not training:
            cut = np.maximum(*lengths)[self._pairs] > max_length
            warn_left_out(
                self, int(cut.sum()), total, f"pairs are cut off at max_length={max_length}"
            )

    def plan(self) -> list[np.ndarray]:
        """Return the epoch's remaining batches: the numbers of this rank's sentences in each.

        Where they are packed, a −1 follows those of each row.
        """
        index, count = self._shard_index, self.num_shards
        batches = [batch[index::count] for batch in self._plan(self._epoch)[self._first_batch :]]
        if isinstance(self._layout, PackedRows):
            return [with_ends_of_rows([self._pairs[row] for row in batch]) for batch in batches]
        return [self._pairs[batch] for batch in batches]

    def as_dataset(self) -> tf.data.Dataset:
        """Return a dataset of one epoch, that of `set_epoch` when an iteration begins.

        Its `cardinality()` is that of a full epoch. An epoch that begins in its middle has
        fewer batches; Keras then warns that it ran out of data, and goes on to the next.
        """

        def flat_plan():
            batches = self.plan()
            sizes = np.array([0, *(len(batch) for batch in batches)], np.int64)
            return np.concatenate([*batches, np.zeros(0, np.int64)]), np.cumsum(sizes)

        def batches_of_rows(_):
            rows, ends = tf.numpy_function(flat_plan, [], [tf.int64, tf.int64])
            rows, ends = tf.ensure_shape(rows, [None]), tf.ensure_shape(ends, [None])
            numbers = tf.data.Dataset.range(tf.size(ends, tf.int64) - 1)
            return numbers.map(lambda i: rows[ends[i] : ends[i + 1]])

        def batch_of(pairs):
            sides = lambda pairs: [tf.gather(ids, pairs) for ids in self._ids]
            if not isinstance(self._layout, PackedRows):
                return self._layout.batch(*sides(pairs))
            row_of = tf.cumsum(tf.cast(pairs == END_OF_ROW, tf.int32), exclusive=True)
            is_pair = pairs != END_OF_ROW
            pairs, row_of = tf.boolean_mask(pairs, is_pair), tf.boolean_mask(row_of, is_pair)
            return self._layout.batch(row_of, *sides(pairs))

        dataset = tf.data.Dataset.range(1).flat_map(batches_of_rows)
        dataset = dataset.map(batch_of, num_parallel_calls=tf.data.AUTOTUNE)
        dataset = dataset.prefetch(tf.data.AUTOTUNE)
        dataset = without_autotuning(dataset)
        return _compat.with_cardinality(dataset, len(self))


def _as_ragged(ids):
    if isinstance(ids, tf.RaggedTensor):
        return ids
    values, row_splits = ids
    return tf.RaggedTensor.from_row_splits(values, row_splits)


def _without_ends(ids, start_id, end_id):
    """Return targets without the start and end tokens that they have, which come to each of them."""
    values, splits = ids.values.numpy(), ids.row_splits.numpy()
    begins, ends = splits[:-1].copy(), splits[1:].copy()
    begins += (begins < ends) & (values[np.minimum(begins, len(values) - 1)] == start_id)
    ends -= (begins < ends) & (values[np.maximum(ends - 1, 0)] == end_id)
    if np.array_equal(begins, splits[:-1]) and np.array_equal(ends, splits[1:]):
        return ids
    keeps = np.zeros(len(values) + 1, np.int64)
    np.add.at(keeps, begins, 1)
    np.add.at(keeps, ends, -1)
    kept = values[np.cumsum(keeps)[:-1] > 0]
    return tf.RaggedTensor.from_row_lengths(kept, ends - begins)


def _usable_pairs(source_lengths, target_lengths, max_length):
    """Return the numbers of pairs without an empty or, given max_length, too long side."""
    if len(source_lengths) != len(target_lengths):
        raise InputError(
            f"{len(source_lengths)} source sentences and {len(target_lengths)} target sentences: "
            "they have to pair up, one to one"
        )
    keep = (source_lengths > 0) & (target_lengths > 0)
    if max_length is not None:
        keep &= np.maximum(source_lengths, target_lengths) <= max_length
    if not keep.any():
        raise InputError(
            f"no sentence pair is left of {len(keep)}: all are empty or longer than "
            f"max_length={max_length} tokens; check the files, or raise max_length"
        )
    return np.flatnonzero(keep)
