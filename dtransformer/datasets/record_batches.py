"""Batches of encoded records, packed or one record per row."""

import hashlib
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from dtransformer.datasets.epochs import cache_plan
from dtransformer.datasets.indexed_batches import IGNORED, Example, IndexedBatches
from dtransformer.datasets.mixture import mixed_records, mixture_order
from dtransformer.datasets.packing import packed_rows
from dtransformer.datasets.skipped_records import warn_skipped

_WINDOW = 4096  # Number of consecutive records of a mixture that are packed together.


class EncodedRecords:
    """Tokenized records in memory.

    Args:
        rows: List with one entry for each record: the list of its sequences. A sequence is a tuple
            of two int arrays of equal length, ids and labels. Empty sequences are appended to
            records with fewer sequences than others.
        targets: List with a list of floats for each record, or `None`. Shorter lists are filled up
            with -1.
        pad_id: Integer. Id of padding. Defaults to 0.

    Attributes:
        fingerprint: 16 hexadecimal digits that identify the content.
        lengths: int64 [records, sequences], the number of tokens of each sequence.
        targets: float32 [records, t], or `None`.
        pad_id: Id of padding.
        num_sequences: Number of sequences of a record.
    """

    def __init__(
        self, rows: Sequence[Sequence[tuple]], targets: Sequence | None = None, pad_id: int = 0
    ):
        self.num_sequences = max(map(len, rows), default=1)
        flat = []
        for record in rows:
            flat += [*record, *[((), ())] * (self.num_sequences - len(record))]
        lengths = [len(ids) for ids, _ in flat]
        self._starts = np.cumsum([0, *lengths])

        def join(arrays):
            arrays = [np.asarray(array, np.int32) for array in arrays]
            return np.concatenate([np.zeros(0, np.int32), *arrays])

        self._ids = join(ids for ids, _ in flat)
        self._labels = join(labels for _, labels in flat)
        self.lengths = np.array(lengths, np.int64).reshape(-1, self.num_sequences)
        self.targets = None
        if targets is not None:
            columns = list(itertools.zip_longest(*targets, fillvalue=-1.0))
            self.targets = np.ascontiguousarray(np.transpose(columns), np.float32)
        self.pad_id = pad_id
        self.special_ids = {"pad": pad_id}
        digest = hashlib.sha256()
        for array in (self._ids, self._labels, self._starts, self.targets):
            digest.update(b"" if array is None else np.ascontiguousarray(array).tobytes())
        self.fingerprint = digest.hexdigest()[:16]

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.lengths)

    def sequence(self, record: int, index: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids and the labels of a sequence, two int32 arrays [n].

        Args:
            record: Index of the record.
            index: Index of the sequence in the record. Defaults to 0.
        """
        place = record * self.num_sequences + index
        part = slice(self._starts[place], self._starts[place + 1])
        return self._ids[part], self._labels[part]

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all records."""
        return len(self._ids)

    @property
    def labeled_fraction(self) -> float:
        """The fraction of tokens with a label."""
        return float((self._labels != -100).mean()) if len(self._labels) else 0.0


class RecordBatches(IndexedBatches):
    """Batches of records. A function determines the content of a row.

    Args:
        records: The `EncodedRecords`.
        build_row: Function `build_row(records, indices, length)` that returns the inputs, the labels and
            optionally the weights of a row. Without indices it returns an empty row. See
            `next_tokens` and `group_row`.
        length: Integer. Number of tokens of a row.
        sizes: List with the number of records of each source. The records of a source are
            consecutive. Defaults to a single source.
        weights: List with the weight of each source in a mixture. `None` uses each record once, in
            random order if shuffled.
        mixture: End of an epoch of a mixture; see `mixture_order`. Defaults to `"once"`.
        packed: Boolean. Whether rows contain several records. Defaults to `False`.
        shuffle: Boolean. Whether to shuffle each epoch. Defaults to the value of `training`.
        seed: Integer. Shuffling depends on the seed and the epoch. Defaults to 0.
        training: Boolean. Whether to leave out rows that do not fill a batch. Otherwise empty rows
            fill it. Defaults to `True`.
        **options: Other arguments of `IndexedBatches`.

    Raises:
        InputError: If the records fill no batch.
    """

    def __init__(
        self,
        records: EncodedRecords,
        build_row: Callable[..., tuple],
        *,
        length: int,
        sizes: Sequence[int] | None = None,
        weights: Sequence[float] | None = None,
        mixture: str = "once",
        packed: bool = False,
        shuffle: bool | None = None,
        seed: int = 0,
        training: bool = True,
        **options,
    ):
        self._records = records
        self._form = build_row
        self._shuffles = training if shuffle is None else shuffle
        self._plan_seed = seed
        self._packed = packed
        self._capacity = length
        self._sizes = list(sizes or [len(records)])
        self._order = None if weights is None else mixture_order(self._sizes, weights, mixture)
        self._plan = cache_plan(self._plan_rows)
        first = self._plan(0)
        what = f"{len(records):,} records"
        super().__init__(
            records,
            len(first),
            what,
            length=length,
            shuffle=False,  # The plan shuffles.
            seed=seed,
            training=training,
            **options,
        )

    def _plan_rows(self, epoch):
        """Return the rows of an epoch: arrays of record indices."""
        num_records = len(self._records)
        seed = [self._plan_seed, epoch]
        if self._order is not None:
            order = mixed_records(self._order, self._sizes, seed, self._shuffles)
        else:
            rng = np.random.default_rng(seed)
            order = rng.permutation(num_records) if self._shuffles else np.arange(num_records)
        if not self._packed:
            return order[:, None]
        rows = []
        window = len(order) if self._order is None else _WINDOW
        sides = np.repeat(self._records.lengths[:, :1], 2, axis=1)
        for start in range(0, len(order), window):
            rng = np.random.default_rng([*seed, start]) if self._shuffles else None
            rows += packed_rows(sides, order[start : start + window], self._capacity, rng)
        return rows

    def row(self, epoch: int, index: int) -> Example:
        rows = self._plan(epoch)
        # An epoch of a mixture may have a few rows more or fewer than the first epoch.
        indices = rows[index % len(rows)]
        return self._form(self._records, indices, self.length)

    def empty_row(self) -> Example:
        return self._form(self._records, (), self.length)


def next_tokens(records: EncodedRecords, indices: Sequence[int], length: int) -> tuple:
    """Return a row for a `CausalLM`: concatenated records with the next tokens as labels.

    Args:
        records: The `EncodedRecords`. The first sequence of each record is used.
        indices: Indices of the records of this row.
        length: Integer. Number of tokens s of the row. The last record is cut off if it does not
            fit.

    Returns:
        A tuple of `{"tokens": int32 [s], "segments": int32 [s]}` and labels int32 [s]. Segments are
        the index of the record in the row, from 1, and 0 for padding. The last token of a record
        and padding have the label -100.
    """
    tokens = np.full(length, records.pad_id, np.int32)
    segments = np.zeros(length, np.int32)
    labels = np.full(length, IGNORED, np.int32)
    start = 0
    for segment, index in enumerate(indices, start=1):
        ids, record_labels = (x[: length - start] for x in records.sequence(int(index)))
        end = start + len(ids)
        tokens[start:end] = ids
        segments[start:end] = segment
        labels[start : end - 1] = record_labels[1:]
        start = end
    return {"tokens": tokens, "segments": segments}, labels


def group_row(
    records: EncodedRecords, indices: Sequence[int], length: int, with_labels: bool = True
) -> tuple:
    """Return a row for a `GroupModel`: the k sequences of one record, its targets and its weight.

    Args:
        records: The `EncodedRecords`.
        indices: Index of the record, a sequence with one element, or empty for an empty row.
        length: Integer. Number of tokens s of each sequence.
        with_labels: Boolean. Whether inputs contain labels. Defaults to `True`.

    Returns:
        A tuple of `{"tokens": int32 [k, s], "segments": int32 [k, s], "labels": int32 [k, s]}`,
        targets float32 [t], and the weight, float32: 1, or 0 for an empty row.
    """
    k = records.num_sequences
    tokens = np.full((k, length), records.pad_id, np.int32)
    segments = np.zeros_like(tokens)
    labels = np.full_like(tokens, IGNORED)
    for index in indices:
        for side in range(k):
            ids, sequence_labels = records.sequence(int(index), side)
            tokens[side, : len(ids)] = ids
            segments[side, : len(ids)] = 1
            labels[side, : len(sequence_labels[1:])] = sequence_labels[1:]
    inputs = {"tokens": tokens, "segments": segments}
    if with_labels:
        inputs["labels"] = labels
    weight = np.float32(len(indices) > 0)
    return inputs, get_targets(records, indices), weight


def get_targets(records: EncodedRecords, indices: Sequence[int]) -> np.ndarray:
    """Return the targets of a row's record, float32 [t], or zeros for an empty row."""
    if len(indices):
        return records.targets[int(indices[0])]
    return np.zeros(records.targets.shape[1:], np.float32)


def prepared_lengths(
    rows: list, length: int, longer: str, owner: str, what: str = "records"
) -> tuple[list[int], list]:
    """Leave out or cut off records with more than `length` tokens, and report how many.

    Args:
        rows: List with one entry for each record: the list of its sequences, which are tuples of
            ids and labels.
        length: Integer. Maximum number of tokens of a sequence.
        longer: `"leave_out"` or `"cut"`, for records with a longer sequence. A record is also left
            out if a cut leaves a sequence without labels or makes both sequences equal.
        owner: Prefix of the printed messages.
        what: Name of the records in the messages. Defaults to `"records"`.

    Returns:
        A tuple of the list of indices of the remaining records, and the list of their sequences.
    """
    is_long = [is_longer(record, length) for record in rows]
    cut = [cut_sequences(record, length) for record in rows]
    reason = f"{what} are longer than {length} tokens and are"
    if longer == "cut":
        lost = list(map(_has_lost_answer, rows, cut))
        warn_skipped(owner, sum(is_long) - sum(lost), len(rows), f"{reason} cut off")
        is_long = lost
        reason = f"{what} would lose an answer if cut to {length} tokens and are"
    warn_skipped(owner, sum(is_long), len(rows), f"{reason} left out. Increase `data.length`")
    indices = [i for i, long in enumerate(is_long) if not long]
    return indices, [cut[i] for i in indices]


def is_longer(record: list, length: int) -> bool:
    """Return whether a sequence of a record has more than `length` tokens."""
    return any(len(ids) > length for ids, _ in record)


def cut_sequences(record: list, length: int) -> list:
    """Return a record's pairs of ids and labels, cut to `length` tokens."""
    return [(ids[:length], labels[:length]) for ids, labels in record]


def _has_lost_answer(record, cut):
    """Return whether the cut removed all labels of a sequence or made the sequences equal."""
    before = [np.not_equal(labels, IGNORED).any() for _, labels in record]
    after = [np.not_equal(labels, IGNORED).any() for _, labels in cut]
    is_equal = np.array_equal(cut[0], cut[-1]) and not np.array_equal(record[0], record[-1])
    return before != after or is_equal
