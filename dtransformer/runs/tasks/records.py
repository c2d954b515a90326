"""Records: examples of files, encoded once, which the tasks beyond plain text are trained on."""

import abc
import itertools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from dtransformer.datasets.record_batches import EncodedRecords, RecordBatches, prepared_lengths
from dtransformer.datasets.records import Record, read_records
from dtransformer.datasets.sample import evenly_spread
from dtransformer.errors import InputError
from dtransformer.parallel.runtime import job
from dtransformer.runs.identity import digest_of_records
from dtransformer.runs.tasks.base import PARTS, Task

Placed = tuple[str, Record]
_ENCODED = 4096  # records together, whose tokens are lists meanwhile


class RecordTask(Task):
    """A task of records: it says how one becomes tokens, and what a row has.

    Attributes:
        records: the `EncodedRecords` by parts.
    """

    def read(self, part: str | None = None) -> None:
        if part in (None, "train"):
            self.needed("data", "train")
        found = {
            name: [self._of_source(source) for source in getattr(self.config.data, name)]
            for name in PARTS
            if part in (None, name) and getattr(self.config.data, name)
        }
        for name, sources in found.items():
            self.digests[name] = digest_of_records(x for source in sources for _, x in source)
        self.find_tokenizer(lambda: self._texts(found))
        self.settle(found)
        self.records, self._sizes = {}, {}
        for name, sources in found.items():
            self.records[name], self._sizes[name] = self._encoded(name, sources)

    def _of_source(self, source):
        found = list(read_records(source.path, self.config.data.fields, source.target))
        if not found:
            raise InputError(f"{source.path}: holds no record")
        return found

    def _texts(self, found):
        """Return the texts of the records to train on."""
        if "train" not in found:
            raise InputError("tokenizer.folder is not given, and there are no data.train for one")
        placed = itertools.chain.from_iterable(found["train"])
        return evenly_spread(text for place, record in placed for text in self.texts(record, place))

    def settle(self, found: dict[str, list[list[Placed]]]) -> None:
        """Find out what all records say together, such as their labels.

        Args:
            found: the records of each source, by parts, each after its place.
        """

    @abc.abstractmethod
    def texts(self, record: Record, place: str) -> list[str]:
        """Return the texts of a record, to train a tokenizer on."""

    @abc.abstractmethod
    def encode(self, records: list[Placed]) -> tuple[list, list | None]:
        """Return the sequences of each record, pairs of ids and labels, and its targets or None.

        Raises:
            InputError: a record is wrong; says where.
        """

    def _encoded(self, name, sources):
        """Return the records of a part as tokens, and the number of each source's."""
        options, rows, targets, sizes = self.config.data, [], [], []
        longer = options.longer if name == "train" else "cut"
        for source in sources:
            own, their = [], []
            for start in range(0, len(source), _ENCODED):
                found, more = self.encode(source[start : start + _ENCODED])
                own += [[[np.asarray(x, np.int32) for x in pair] for pair in one] for one in found]
                their += more or ()
            kept, own = prepared_lengths(own, options.length, longer, f"Records ({name})")
            rows += own
            targets += [their[number] for number in kept] if their else []
            sizes.append(len(own))
        encoded = EncodedRecords(rows, targets or None, self.tokenizer.pad_id or 0)
        if min(sizes) == 0:
            raise InputError(
                f"data.{name}: all records of a file have more than data.length={options.length} "
                "tokens: give more"
            )
        if encoded.learnt_share == 0 and targets == []:
            raise InputError(f"data.{name}: nothing of the records is learnt: see data.train_on")
        return encoded, sizes

    def told(self) -> list[str]:
        return [
            f"Records ({name}): {len(x):,} with {x.num_tokens:,} tokens{self.describe(x)}"
            for name, x in self.records.items()
        ]

    def describe(self, records: EncodedRecords) -> str:
        """Return the end of the log line about some records: their targets."""
        return f", {records.learnt_share:.1%} of them in the loss"

    @abc.abstractmethod
    def form(self, *args) -> tuple:
        """Return a row, as of `RecordBatches`."""

    def batches(self, part: str) -> RecordBatches | None:
        if part not in self.records:
            return None
        options = self.config.data
        weights = [source.weight for source in getattr(options, part)]
        is_mixture = part == "train" and (options.mixture != "once" or any(weights))
        if is_mixture and None in weights:
            raise InputError(
                f"data.train: {weights.count(None)} of {len(weights)} files of a mixture have no "
                "weight. Give each of them one."
            )
        return RecordBatches(
            self.records[part],
            self.form,
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
                logs.update({f"val_{name}": x for name, x in self.scores_of_dev(trainer).items()})

        adds_scores = keras.callbacks.LambdaCallback(on_epoch_end=add_scores)
        return [adds_scores, *super().callbacks(trainer)]

    def predict(self, trainer: keras.Model, placed: list[Placed]) -> Iterator[dict[str, Any]]:
        """Yield the prediction for each record, in order. All ranks call it.

        Tokens after the first `data.length` ones are cut off. `num_cut` counts these records.

        Args:
            trainer: Trainer of the network.
            placed: Records without labels, each after its place.

        Raises:
            InputError: If a record has no text, or the task predicts nothing.
        """
        length, self.num_cut = self.config.data.length, 0
        for start in range(0, len(placed), _ENCODED):
            part = placed[start : start + _ENCODED]
            rows = self.encode_inputs(part)
            self.num_cut += sum(any(len(ids) > length for ids, _ in row) for row in rows)
            rows = [[(ids[:length], labels[:length]) for ids, labels in row] for row in rows]
            no_targets = [[0.0, 0.0]] * len(rows)
            self.records = {"inputs": EncodedRecords(rows, no_targets, self.tokenizer.pad_id or 0)}
            outputs = self.predictions(trainer, "inputs").astype(np.float32)
            for (_, record), row, output in zip(part, rows, outputs, strict=True):
                yield self.prediction(record, row, output)

    def encode_inputs(self, records: list[Placed]) -> list:
        """Return the sequences of each record, pairs of ids and labels, without reading a label."""
        raise InputError(
            f"task {self.config.task} predicts no label or number: dtransformer "
            + self.command.format("RUN")
        )

    def prediction(self, record: Record, row: list, output: np.ndarray) -> dict[str, Any]:
        """Return the prediction for a record from its sequences and the network's output."""
        return {"score": float(output.item())}

    def predictions(self, trainer: keras.Model, part: str) -> np.ndarray:
        """Return the network's outputs for the records of a part, in order. All ranks call it."""
        records, multiple = self.records[part], job.rows_multiple_of() * job.data_shard()[1]
        ordered = RecordBatches(
            records,
            self.form,
            length=self.config.data.length,
            # No batch but the last one gets rows that are padding.
            batch_size=-(-self.config.training.batch_size // multiple) * multiple,
            training=False,
            pad_rows_to_multiple_of=multiple,
        )
        return trainer.predict(ordered, verbose=0)[: len(records)]

    def preview(self, number: int) -> list[list[tuple[str, bool]]]:
        records = self.records.get("train") or self.records["dev"]
        return [
            [
                piece
                for side in range(records.num_sequences)
                for piece in self._pieces(*records.sequence(place, side))
            ]
            for place in range(min(number, len(records)))
        ]

    def _pieces(self, ids, labels):
        """Return the text of ids in pieces, each with whether it is learnt."""
        is_learnt = labels != -100
        bounds = [0, *(i for i in range(1, len(ids)) if is_learnt[i] != is_learnt[i - 1]), len(ids)]
        decode = lambda part: self.tokenizer.decode_all(part.tolist())
        return [
            (decode(ids[a:b]), bool(is_learnt[a])) for a, b in itertools.pairwise(bounds) if b > a
        ]
