"""Batches of sentence pairs: a pure plan of which sentences, and a thin tf.data pipeline.

A plan is a list of arrays of sentence numbers, a function of lengths, seed and epoch
only. Every rank computes the same plan and takes its rows of each global batch, so
that several ranks see the batches that one process sees.
"""

import numpy as np
import tensorflow as tf

from dtransformer.errors import InputError


def length_buckets(lengths, num_buckets):
    """Returns the greatest length of each bucket: quantiles of the lengths.

    Args:
        lengths: Int array [N].
        num_buckets: The most buckets there are.

    Returns:
        A rising int array; the last one is the greatest length.
    """
    quantiles = np.linspace(0, 1, num_buckets + 1)[1:]
    return np.unique(np.quantile(lengths, quantiles, method="higher"))


def plan_batches(
    lengths,
    *,
    batch_size=None,
    batch_tokens=None,
    buckets=8,
    min_rows=1,
    shuffle=True,
    drop_remainder=False,
    seed=0,
    epoch=0,
):
    """Plans an epoch: which sentences make up each batch.

    Sentences of about the same length share a batch. What is left over of a bucket
    moves up to the next longer one; what is left over of the longest is the last batch,
    or, where it is less than half a batch, shares evenly with the batch before. So all
    batches have about their full size, and their number depends on the lengths only, not
    on the seed or the epoch.

    Args:
        lengths: Int array [N], the longer side of every pair, in tokens.
        batch_size: Sentences of a batch; or
        batch_tokens: Tokens of a batch and side, padding counted: its sentences times the
            greatest length of its bucket stay within it.
        buckets: Number of buckets of lengths, 1 for no bucketing; or the greatest length
            of each, rising.
        min_rows: The fewest sentences of a batch: the number of ranks that share it. It
            changes the plan only where a batch has fewer than twice as many sentences;
            a rest that is too small is then left out.
        shuffle: Whether to shuffle sentences within buckets, and batches.
        drop_remainder: Whether the rest that fills no batch is left out.
        seed: Of the shuffling.
        epoch: Of the shuffling.

    Returns:
        A list of int arrays. Every sentence is in exactly one of them, but for those
        that `drop_remainder` and `min_rows` leave out.

    Raises:
        InputError: A batch's size is given twice or not at all, or is too small for the
            longest bucket; a length beyond the last bucket.

    Example:
        >>> plan = plan_batches([3, 9, 4, 8], batch_size=2, buckets=[4, 9], shuffle=False)
        >>> [batch.tolist() for batch in plan]
        [[0, 2], [1, 3]]
    """
    lengths = np.asarray(lengths)
    bounds = _bucket_bounds(lengths, buckets)
    sizes = _rows_per_batch(bounds, batch_size, batch_tokens, min_rows)
    rng = np.random.default_rng([seed, epoch])
    bucket_of = np.searchsorted(bounds, lengths)
    batches, rest = [], np.zeros(0, np.int64)
    for bucket, size in enumerate(sizes):
        members = np.flatnonzero(bucket_of == bucket)
        if shuffle:
            members = rng.permutation(members)
        members = np.concatenate([rest, members])
        whole = len(members) - len(members) % size
        batches += np.split(members[:whole], whole // size) if whole else []
        rest = members[whole:]
    if len(rest) and not drop_remainder:
        batches += _share_rest(batches, rest, sizes[-1], min_rows)
    if shuffle:
        batches = [batches[i] for i in rng.permutation(len(batches))]
    return batches


def _bucket_bounds(lengths, buckets):
    if not len(lengths):
        return np.zeros(0, np.int64)
    if np.ndim(buckets) == 0:
        if buckets < 1:
            raise InputError(f"{buckets} buckets are too few: 1 is no bucketing.")
        return length_buckets(lengths, int(buckets))
    bounds = np.asarray(buckets)
    if not len(bounds) or (np.diff(bounds) <= 0).any():
        raise InputError(f"the buckets' greatest lengths {buckets} have to rise.")
    if bounds[-1] < lengths.max():
        raise InputError(
            f"a sentence has {lengths.max()} tokens, the last bucket ends at {bounds[-1]}: "
            "add a bucket, or lower max_length."
        )
    return bounds


def _rows_per_batch(bounds, batch_size, batch_tokens, min_rows):
    """Returns how many sentences a batch of each bucket has, a list of int."""
    if (batch_size is None) == (batch_tokens is None):
        raise InputError(
            f"batch_size={batch_size} and batch_tokens={batch_tokens}: give one of the two."
        )
    if batch_size is not None:
        if batch_size < min_rows:
            raise InputError(
                f"batch_size={batch_size} is less than the {min_rows} data ranks that share a "
                f"batch: give at least {min_rows}."
            )
        return [int(batch_size)] * len(bounds)
    if len(bounds) and batch_tokens < min_rows * bounds[-1]:
        raise InputError(
            f"batch_tokens={batch_tokens} does not hold {min_rows} of the longest sentences, "
            f"{bounds[-1]} tokens each, one for each data rank: give at least "
            f"{min_rows * bounds[-1]}, or lower max_length."
        )
    return [int(batch_tokens // bound) for bound in bounds]


def _share_rest(batches, rest, size, min_rows):
    """Returns the rest as batches; takes the last of `batches` back if it shares with it."""
    # Small batches are noisy, and one that is smaller than the number of ranks could not
    # be shared: even shares keep the plan the same for any usual number of ranks.
    if len(rest) < size / 2 and batches:
        both = np.concatenate([batches[-1], rest])
        shares = np.array_split(both, -(-len(both) // size))
        if len(shares[-1]) >= min_rows:
            batches.pop()
            return shares
    return [rest] if len(rest) >= min_rows else []


class TranslationBatches:
    """Batches of sentence pairs for `Trainer.fit`.

    Each epoch has an order of its own, chosen by `set_epoch` before it begins (as
    PyTorch's DistributedSampler has it; `Trainer.fit` calls it). A batch is

        ({"source": int32 [b, s], "target": int32 [b, t]}, labels int32 [b, t])

    where target is the start token and the translation, labels the translation and
    the end token; all are padded to the longest of this rank's rows.

    Args:
        source_ids, target_ids: `tf.RaggedTensor`s of ids [N, (length)], int32; or pairs
            `(ids, row_splits)` of arrays, as `SubwordTokenizer.encode_to_numpy` gives.
        batch_size: Sentences of a global batch; or
        batch_tokens: Tokens of a global batch and side, padding counted.
        max_length: Pairs with a longer side are left out in training, and cut off
            elsewhere. The start or end token comes on top.
        num_buckets: Number of buckets of lengths.
        buckets: Greatest length of each bucket instead, start or end token counted.
        shuffle: Whether each epoch is shuffled.
        seed: Of the shuffling.
        shard_index, num_shards: This rank's share of each global batch: rows
            shard_index, shard_index + num_shards, …
        drop_remainder: Whether the sentences that fill no batch are left out.
        pad_to_multiple_of: Lengths are padded to a multiple of this; a compiler that
            specialises on shapes then sees fewer of them.
        pad_rows_to_multiple_of: Empty sentences are added to this rank's rows of a batch
            until their number is a multiple of this; a pipeline's micro-batches need it.
        pad_to_bucket: Whether both sides are padded to the greatest length of their bucket,
            so that there are no more shapes than buckets, and those of the rest.
        training: Whether long pairs are left out (or cut off).
        pad_id, start_id, end_id: Ids of the special tokens.

    Attributes:
        num_pairs: Number of pairs that are used.
        num_left_out: Number of pairs that are too long or empty.

    Raises:
        InputError: Sides differ in number, nothing is left, or the batches' size is
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
        source_ids,
        target_ids,
        *,
        batch_size=None,
        batch_tokens=None,
        max_length=256,
        num_buckets=8,
        buckets=None,
        shuffle=True,
        seed=0,
        shard_index=0,
        num_shards=1,
        drop_remainder=False,
        pad_to_multiple_of=1,
        pad_rows_to_multiple_of=1,
        pad_to_bucket=False,
        training=True,
        pad_id=0,
        start_id=2,
        end_id=3,
    ):
        for name, value in (
            ("max_length", max_length),
            ("pad_to_multiple_of", pad_to_multiple_of),
            ("pad_rows_to_multiple_of", pad_rows_to_multiple_of),
        ):
            if value < 1:
                raise InputError(f"{name}={value} has to be at least 1.")
        if not 0 <= shard_index < num_shards:
            raise InputError(
                f"shard_index={shard_index} is not one of {num_shards} shards: give 0 to "
                f"{num_shards - 1}."
            )
        self._ids = _as_ragged(source_ids), _as_ragged(target_ids)
        lengths = [np.diff(ids.row_splits.numpy()) for ids in self._ids]
        self._pairs = _usable_pairs(*lengths, max_length if training else None)
        self.num_pairs = len(self._pairs)
        self.num_left_out = len(lengths[0]) - self.num_pairs
        longer = np.maximum(*lengths)[self._pairs]
        self._lengths = np.minimum(longer, max_length) + 1  # and the start or end token
        self._plan = {
            "batch_size": batch_size,
            "batch_tokens": batch_tokens,
            "buckets": num_buckets if buckets is None else buckets,
            "min_rows": num_shards,
            "shuffle": shuffle,
            "drop_remainder": drop_remainder,
            "seed": seed,
        }
        self._max_length = max_length
        self._multiple_of, self._rows_multiple_of = pad_to_multiple_of, pad_rows_to_multiple_of
        self._bucket_bounds = None
        if pad_to_bucket:
            self._bucket_bounds = tf.constant(
                _bucket_bounds(self._lengths, self._plan["buckets"]), tf.int32
            )
        self._shard = shard_index, num_shards
        self._special = pad_id, start_id, end_id
        self._epoch, self._start = 0, 0
        self._num_batches = len(plan_batches(self._lengths, **self._plan))
        if not self._num_batches:
            raise InputError(
                f"{self.num_pairs} sentence pairs make no batch for {num_shards} data ranks: give "
                "more pairs, smaller batches or fewer ranks."
            )

    def __len__(self):
        """The number of batches of a whole epoch, the same on every rank."""
        return self._num_batches

    def set_epoch(self, epoch, start=None):
        """Chooses the epoch that the next iteration goes through, and its first batch.

        Args:
            epoch: Number of the epoch, from 0.
            start: The batch to begin with. By default 0; or, where this epoch is already
                chosen, what was chosen with it, so that `Trainer.fit` keeps the position
                that `restore` set.
        """
        if start is None:
            start = self._start if epoch == self._epoch else 0
        if epoch < 0 or not 0 <= start <= len(self):
            raise InputError(
                f"epoch {epoch}, batch {start} is no position in epochs of {len(self)} batches: "
                "restore with the data and options that the run began with."
            )
        self._epoch, self._start = int(epoch), int(start)

    def position(self, batches_done=0):
        """Returns where training stands, to go on from there with `restore`.

        Args:
            batches_done: Batches that were trained on since the iteration began. (The
                pipeline itself cannot tell: it is always some batches ahead.)

        Returns:
            A dict of numbers, fit for JSON.
        """
        epoch, batch = self._epoch, self._start + int(batches_done)
        if batch >= len(self):
            epoch, batch = epoch + batch // len(self), batch % len(self)
        seed = self._plan["seed"]
        return {"epoch": epoch, "batch": batch, "num_batches": len(self), "seed": seed}

    def restore(self, position):
        """Goes to a position: the next iteration goes on with the batch after it.

        Args:
            position: What `position` returned.

        Raises:
            InputError: The position is of other data or options: the batches that
                remain would not be those that remained.
        """
        for name, own in (("num_batches", len(self)), ("seed", self._plan["seed"])):
            if position.get(name, own) != own:
                raise InputError(
                    f"the saved position has {name}={position[name]}, this data has {own}: "
                    "resume with the data, seed and batch size that the run began with."
                )
        self.set_epoch(position["epoch"], position["batch"])

    def plan(self):
        """Returns the epoch's remaining batches: this rank's sentence numbers of each."""
        index, count = self._shard
        batches = plan_batches(self._lengths, epoch=self._epoch, **self._plan)
        return [self._pairs[batch[index::count]] for batch in batches[self._start :]]

    def as_dataset(self):
        """Returns a `tf.data.Dataset` of one epoch, that of `set_epoch` as each iteration begins.

        Its `cardinality()` is that of a whole epoch. An epoch that begins in its midst has
        fewer batches; Keras then warns that it ran out of data, and goes on to the next.
        """

        def flat_plan():
            batches = self.plan()
            sizes = np.array([0, *(len(batch) for batch in batches)], np.int64)
            return np.concatenate([*batches, np.zeros(0, np.int64)]), np.cumsum(sizes)

        def rows_of_the_epoch(_):
            rows, ends = tf.numpy_function(flat_plan, [], [tf.int64, tf.int64])
            rows, ends = tf.ensure_shape(rows, [None]), tf.ensure_shape(ends, [None])
            numbers = tf.data.Dataset.range(tf.size(ends, tf.int64) - 1)
            return numbers.map(lambda i: rows[ends[i] : ends[i + 1]])

        dataset = tf.data.Dataset.range(1).flat_map(rows_of_the_epoch)
        dataset = dataset.map(self._batch, num_parallel_calls=tf.data.AUTOTUNE)
        dataset = dataset.prefetch(tf.data.AUTOTUNE)
        # Keras counts steps by this. Without it, the first epoch's number would hold for all,
        # and assert_cardinality would stop an epoch that begins in its midst.
        dataset.cardinality = lambda: tf.constant(len(self), tf.int64)
        return dataset

    def _batch(self, rows):
        """[b] sentence numbers -> a padded batch."""
        pad, start, end = self._special
        source, target = (tf.gather(ids, rows)[:, : self._max_length] for ids in self._ids)
        column = tf.ones([tf.shape(rows)[0], 1], tf.int32)
        target_inputs = tf.concat([start * column, target], axis=1)
        labels = tf.concat([target, end * column], axis=1)
        least = 0
        if self._bucket_bounds is not None:
            longest = tf.maximum(source.bounding_shape()[1] + 1, labels.bounding_shape()[1])
            bucket = tf.searchsorted(self._bucket_bounds, [tf.cast(longest, tf.int32)])[0]
            least = self._bucket_bounds[bucket]
        inputs = {
            "source": self._pad(source, pad, least, self._max_length),
            "target": self._pad(target_inputs, pad, least, self._max_length + 1),
        }
        return inputs, self._pad(labels, pad, least, self._max_length + 1)

    def _pad(self, ids, pad, least, most):
        """Ragged [b, (length)] -> [b, the longest or `least`, rounded up within `most`]."""
        longest = tf.maximum(tf.cast(tf.reduce_max(ids.row_lengths()), tf.int32), least)
        width = tf.minimum(-(-longest // self._multiple_of) * self._multiple_of, most)
        padded = ids.to_tensor(pad, shape=tf.stack([-1, width]))
        missing = -tf.shape(padded)[0] % self._rows_multiple_of
        padded = tf.pad(padded, [[0, missing], [0, 0]], constant_values=pad)
        return tf.ensure_shape(padded, [None, None])


def _as_ragged(ids):
    if isinstance(ids, tf.RaggedTensor):
        return ids
    values, row_splits = ids
    return tf.RaggedTensor.from_row_splits(values, row_splits)


def _usable_pairs(source_lengths, target_lengths, max_length):
    """Returns the numbers of pairs without an empty or, given max_length, too long side."""
    if len(source_lengths) != len(target_lengths):
        raise InputError(
            f"{len(source_lengths)} source sentences and {len(target_lengths)} target sentences: "
            "they have to pair up, one to one."
        )
    keep = (source_lengths > 0) & (target_lengths > 0)
    if max_length is not None:
        keep &= np.maximum(source_lengths, target_lengths) <= max_length
    if not keep.any():
        raise InputError(
            f"no sentence pair is left of {len(keep)}: all are empty or longer than "
            f"max_length={max_length} tokens; check the files, or raise max_length."
        )
    return np.flatnonzero(keep)
