"""Base of tasks that train on records, which are encoded once and kept in memory."""

import abc
import itertools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from dtransformer.datasets.record_batches import (
    EncodedRecords,
    RecordBatches,
    cut_sequences,
    is_longer,
    prepared_lengths,
)
from dtransformer.datasets.records import Record, read_records
from dtransformer.datasets.sample import sample_evenly
from dtransformer.errors import InputError
from dtransformer.parallel.runtime import job
from dtransformer.runs.identity import hash_records
from dtransformer.runs.tasks.base import PARTS, Task

Placed = tuple[str, Record]
_GROUP_SIZE = 4096  # Records are encoded in groups, because lists of tokens need much memory.


class RecordTask(Task):
    """Base of tasks that train on records. Subclasses encode records and build rows from them.

    Attributes:
        records: Dict of `EncodedRecords` by part, "train" and "dev".
    """

    def read(self, part: str | None = None) -> None:
        if part in (None, "train"):
            self.require_option("train")
        parts = {}
        for name in PARTS:
            sources = getattr(self.config.data, name)
            if part in (None, name) and sources:
                parts[name] = [self._read_source(source) for source in sources]
        for name, sources in parts.items():
            self.digests[name] = hash_records(x for source in sources for _, x in source)
        self.find_tokenizer(lambda: self._sample_texts(parts))
        self.resolve_options(parts)
        self.records = {}
        self._sizes = {}
        for name, sources in parts.items():
            self.records[name], self._sizes[name] = self._encode_part(name, sources)

    def _read_source(self, source):
        records = list(read_records(source.path, self.config.data.fields, source.target))
        if not records:
            raise InputError(f"`{source.path}` contains no records.")
        return records

    def _sample_texts(self, parts):
        """Return a sample of the training texts for a new tokenizer."""
        if "train" not in parts:
            raise InputError(
                "A tokenizer cannot be trained without data.train. Set tokenizer.folder."
            )
        placed = itertools.chain.from_iterable(parts["train"])
        return sample_evenly(text for place, record in placed for text in self.texts(record, place))

    def resolve_options(self, records: dict[str, list[list[Placed]]]) -> None:
        """Set options that depend on all records, such as the names of their labels.

        Args:
            records: Dict by part, "train" and "dev". Each value has one list per source, with
                (place, record) pairs.
        """

    @abc.abstractmethod
    def texts(self, record: Record, place: str) -> list[str]:
        """Return the texts of a record. A new tokenizer is trained on them."""

    @abc.abstractmethod
    def encode(self, records: list[Placed]) -> tuple[list, list | None]:
        """Encode records.

        Args:
            records: List of (place, record) pairs.

        Returns:
            A `(rows, targets)` tuple. `rows` has one list per record with its sequences, which are
            (ids, labels) pairs. `targets` has one list of floats per record, or is `None`.

        Raises:
            InputError: If a record is wrong. The message names its place.
        """

    def _encode_part(self, name, sources):
        """Return the `EncodedRecords` of a part, and the number of records of each source."""
        options = self.config.data
        rows = []
        targets = []
        sizes = []
        longer = options.longer if name == "train" else "cut"
        for source in sources:
            source_rows = []
            source_targets = []
            for start in range(0, len(source), _GROUP_SIZE):
                group, group_targets = self.encode(source[start : start + _GROUP_SIZE])
                source_rows += map(_as_int32, group)
                source_targets += group_targets or ()
            indices, source_rows = prepared_lengths(
                source_rows, options.length, longer, f"Records ({name})"
            )
            rows += source_rows
            targets += [source_targets[index] for index in indices] if source_targets else []
            sizes.append(len(source_rows))
        encoded = EncodedRecords(rows, targets or None, self.tokenizer.pad_id or 0)
        if min(sizes) == 0:
            raise InputError(
                f"`data.{name}`: all records of a file have more than data.length={options.length} "
                "tokens. Increase data.length."
            )
        if encoded.labeled_fraction == 0 and targets == []:
            raise InputError(f"`data.{name}`: no token has a label. Check data.train_on.")
        return encoded, sizes

    def summary_lines(self) -> list[str]:
        return [
            f"Records ({name}): {len(x):,} with {x.num_tokens:,} tokens{self.describe(x)}"
            for name, x in self.records.items()
        ]

    def describe(self, records: EncodedRecords) -> str:
        """Return text about labels or targets, which ends the printed line about the records."""
        return f", {records.labeled_fraction:.1%} of them in the loss"

    @abc.abstractmethod
    def build_row(self, *args) -> tuple:
        """Build a row from records, see the argument `build_row` of `RecordBatches`."""

    def batches(self, part: str) -> RecordBatches | None:
        if part not in self.records:
            return None
        options = self.config.data
        weights = [source.weight for source in getattr(options, part)]
        is_mixture = part == "train" and (options.mixture != "once" or any(weights))
        if is_mixture and None in weights:
            raise InputError(
                f"`data.train`: {weights.count(None)} of {len(weights)} files of a mixture have no "
                "weight. Set a weight for each file."
            )
        return RecordBatches(
            self.records[part],
            self.build_row,
            length=options.length,
            sizes=self._sizes[part],
            weights=weights if is_mixture else None,
            mixture=options.mixture,
            packed=options.packed,
            batch_size=self.config.training.batch_size,
            **self.batch_options(part),
        )

    def callbacks(self, trainer):
        def add_scores(_, logs):
            if "dev" in self.records:
                logs.update({f"val_{name}": x for name, x in self.score_dev(trainer).items()})

        adds_scores = keras.callbacks.LambdaCallback(on_epoch_end=add_scores)
        return [adds_scores, *super().callbacks(trainer)]

    def predict(self, trainer: keras.Model, placed: list[Placed]) -> Iterator[dict[str, Any]]:
        """Yield the prediction for each record, in order. All ranks call it.

        Records with more than `data.length` tokens are truncated. `num_cut` counts them.

        Args:
            trainer: Trainer of the network.
            placed: List of (place, record) pairs. Records need no labels.

        Raises:
            InputError: If a record has no text, or the task predicts nothing.
        """
        length = self.config.data.length
        self.num_cut = 0
        for start in range(0, len(placed), _GROUP_SIZE):
            part = placed[start : start + _GROUP_SIZE]
            rows = self.encode_inputs(part)
            self.num_cut += sum(is_longer(row, length) for row in rows)
            rows = [cut_sequences(row, length) for row in rows]
            no_targets = [[0.0, 0.0]] * len(rows)
            self.records = {"inputs": EncodedRecords(rows, no_targets, self.tokenizer.pad_id or 0)}
            outputs = self.predictions(trainer, "inputs").astype(np.float32)
            for (_, record), row, output in zip(part, rows, outputs, strict=True):
                yield self.prediction(record, row, output)

    def encode_inputs(self, records: list[Placed]) -> list:
        """Encode records for prediction, without reading labels. Returns `rows`, see `encode`."""
        raise InputError(
            f"Task {self.config.task} predicts neither labels nor numbers. Use `dtransformer "
            f"{self.command.format('RUN')}`."
        )

    def prediction(self, record: Record, row: list, output: np.ndarray) -> dict[str, Any]:
        """Return the prediction for a record as a dict.

        Args:
            record: The record.
            row: Its encoded sequences.
            output: Float array. The network's output for the record.
        """
        return {"score": float(output.item())}

    def predictions(self, trainer: keras.Model, part: str) -> np.ndarray:
        """Return the network's outputs [n, …] for the records of a part. All ranks call it."""
        records = self.records[part]
        multiple = job.row_multiple() * job.data_shard()[1]
        ordered = RecordBatches(
            records,
            self.build_row,
            length=self.config.data.length,
            # A batch size that all ranks divide evenly keeps padding rows out of all but the last batch.
            batch_size=-(-self.config.training.batch_size // multiple) * multiple,
            training=False,
            pad_rows_to_multiple_of=multiple,
        )
        return trainer.predict(ordered, verbose=0)[: len(records)]

    def preview(self, count: int) -> list[list[tuple[str, bool]]]:
        records = self.records.get("train") or self.records["dev"]
        previews = []
        for place in range(min(count, len(records))):
            pieces = []
            for side in range(records.num_sequences):
                pieces += self._pieces(*records.sequence(place, side))
            previews.append(pieces)
        return previews

    def _pieces(self, ids, labels):
        """Return the text of ids as (text, has_labels) pairs."""
        has_label = labels != -100
        bounds = [0, *(i for i in range(1, len(ids)) if has_label[i] != has_label[i - 1]), len(ids)]

        def decode(part):
            return self.tokenizer.decode_all(part.tolist())

        return [
            (decode(ids[a:b]), bool(has_label[a])) for a, b in itertools.pairwise(bounds) if b > a
        ]


def _as_int32(record):
    """Return a record's pairs of ids and labels as int32 arrays."""
    return [[np.asarray(values, np.int32) for values in pair] for pair in record]
