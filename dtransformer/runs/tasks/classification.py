"""Classification: predict the label of a text or a pair of texts."""

import keras
import numpy as np

from dtransformer.datasets.indexed_batches import IGNORED
from dtransformer.datasets.record_batches import EncodedRecords
from dtransformer.datasets.records import get_text
from dtransformer.errors import InputError, short_repr
from dtransformer.inputs.text import check_whole
from dtransformer.layers.heads import SequenceHead
from dtransformer.models import CausalLM, MaskedLM
from dtransformer.models.one_stack import OneStackModel, with_task_head
from dtransformer.models.pretrained.families.task_heads import SEQUENCE, default_labels, new_head
from dtransformer.runs.scores import macro_f1, matthews
from dtransformer.runs.tasks.records import RecordTask

_MAX_NAME = 100  # characters, the same limit as in data.labels
_MAX_SHOWN = 30  # labels in a log line


class LabelTask(RecordTask):
    """Base of tasks that label texts or pairs of texts with an encoder or a decoder.

    Subclasses define `num_labels`.
    """

    kind = MaskedLM
    accepts = OneStackModel
    ending = SEQUENCE
    always_trained = "head/*"
    command = "predict --run {} < FILE"
    _sides = frozenset()  # numbers of texts per record that were read so far: 1, 2 or both

    def texts(self, record, place) -> list[str]:
        names = ("text", "text_pair") if "text_pair" in record else ("text",)
        return [get_text(record, name, place) for name in names]

    def encode_texts(self, records) -> list[tuple]:
        """Encode records with special tokens as (ids, token types) pairs.

        The types of pairs are `IGNORED` instead of 0 outside the second text. A record is therefore
        left out if truncation removes its second text.

        Raises:
            InputError: If only some of the records have a second text.
        """
        inputs = [self.texts(record, place) for place, record in records]
        self._sides |= {len(texts) for texts in inputs}
        if len(self._sides) > 1:
            raise InputError("Some records have a text_pair and others do not. Use one kind only.")
        if len(inputs[0]) == 2:
            encodings = self.tokenizer.encode_with_offsets(*zip(*inputs))
            return [(encoding.ids, encoding.types) for encoding in encodings]
        return self.encode_whole([text for (text,) in inputs])

    def encode_inputs(self, records):
        return [[row] for row in self.encode_texts(records)]

    def describe(self, records):
        return ""

    def encode_whole(self, texts: list[str]) -> list[tuple]:
        """Encode single texts with special tokens as (ids, token types) pairs. All types are 0."""
        rows = self.tokenizer.encode(texts, add_special_ids=True).to_list()
        return [(ids, [0] * len(ids)) for ids in rows]

    def head(self, num_labels: int, core: OneStackModel) -> keras.layers.Layer:
        """Return a new head: the family's published head, or else `plain_head`.

        `data.pooling` also selects `plain_head`.
        """
        names = self.config.data.labels or default_labels(num_labels)
        head = new_head(core, self.ending, names)
        if head is None or self.config.data.pooling:
            head = self.plain_head(num_labels, core)
            head.label_names = tuple(names)
        return head

    def plain_head(self, num_labels: int, core: OneStackModel) -> keras.layers.Layer:
        """Return a head for a network without a published family, or with `data.pooling`.

        Encoders default to the first token and a dense layer with tanh, as BERT, and decoders to the
        last token.
        """
        is_decoder = isinstance(core, CausalLM)
        pooling = self.config.data.pooling or ("last" if is_decoder else "first")
        return SequenceHead(
            num_labels,
            pooling,
            hidden_act=None if is_decoder or pooling != "first" else "tanh",
            use_bias=not is_decoder,
            dropout_rate=core.arguments["dropout_rate"],
            dtype=core.dtype_policy,
        )

    def with_head(self, core: OneStackModel) -> OneStackModel:
        old = core.head
        head = self.head(self.num_labels, core)
        names = [getattr(layer, "label_names", None) for layer in (old, head)]
        keeps_head = core.has_task_head and type(old) is type(head) and names[0] == names[1]
        if keeps_head and getattr(old, "problem_type", None) == "multi_label_classification":
            raise InputError(
                "The model's problem_type is multi_label_classification, but each record has a single "
                "label. Choose another model."
            )
        return core if keeps_head else with_task_head(core, head)

    def row(self, records, indices, length, side=0) -> dict:
        """Return the inputs of a row of `length` tokens as a dict of int32 arrays [s].

        The keys are "tokens" and "attention_mask". Encoders also get "token_types". `side` is the
        index of the sequence in its record.
        """
        tokens = np.full(length, records.pad_id, np.int32)
        mask = np.zeros(length, np.int32)
        types = np.zeros(length, np.int32)
        for index in indices:
            ids, row_types = records.sequence(int(index), side)
            tokens[: len(ids)] = ids
            mask[: len(ids)] = 1
            types[: len(ids)] = np.maximum(row_types, 0)
        inputs = {"tokens": tokens, "attention_mask": mask}
        return {**inputs, "token_types": types} if isinstance(self.core, MaskedLM) else inputs


class Classification(LabelTask):
    """Task that assigns one of several labels to each text (Devlin et al., 2019, §4.1)."""

    @property
    def num_labels(self) -> int:
        """Number of labels."""
        return len(self.config.data.labels)

    def resolve_options(self, records) -> None:
        options = self.config.data
        if not options.labels:
            names = {
                label
                for source in records.get("train", ())
                for place, record in source
                for label in self.get_label_names(record, place)
            }
            options.labels = sorted(
                names, key=lambda x: (not x.isdigit(), x.isdigit() and int(x), x)
            )
        if len(options.labels) < 2:
            raise InputError(f"`data.labels` must have at least two labels, got {options.labels}.")

    def get_label_names(self, record, place) -> list[str]:
        """Return the names of a record's labels."""
        return [label_name(record.get("label"), place)]

    def get_label_ids(self, record, place) -> list[int]:
        """Return the label ids of a record: the indices of its labels in `data.labels`.

        Raises:
            InputError: If a label is not in `data.labels`.
        """
        names = self.config.data.labels
        labels = self.get_label_names(record, place)
        for name in labels:
            if name not in names:
                raise InputError(
                    f"{place}: the label {short_repr(name)} is not in "
                    f"{short_repr(', '.join(names), 100)}. Add it to data.labels, or correct the record."
                )
        return [names.index(name) for name in labels]

    def encode(self, records):
        targets = [self.get_label_ids(record, place) for place, record in records]
        return self.encode_inputs(records), targets

    def build_row(self, records, indices, length) -> tuple:
        label = int(records.targets[int(indices[0]), 0]) if len(indices) else IGNORED
        return self.row(records, indices, length), np.int32(label)

    def labels(self, records: EncodedRecords) -> list[np.ndarray]:
        """Return an int array [n] of label ids for each record. Ids below 0 are ignored."""
        return list(records.targets.astype(int))

    def describe(self, records):
        names = self.config.data.labels
        labels = np.concatenate(self.labels(records))
        counts = np.bincount(labels[labels >= 0], minlength=len(names))
        entries = [f"{name} {count:,}" for name, count in zip(names, counts)][:_MAX_SHOWN]
        if len(names) > _MAX_SHOWN:
            entries.append("…")
        return f", {len(names)} labels: {', '.join(entries)}"

    def score_dev(self, trainer) -> dict[str, float]:
        outputs = self.predictions(trainer, "dev")
        labels = self.labels(self.records["dev"])
        predicted = [np.atleast_2d(x)[: len(y)].argmax(-1) for x, y in zip(outputs, labels)]
        return self.label_scores(labels, predicted)

    def label_scores(self, labels: list, predicted: list) -> dict[str, float]:
        """Return a dict of scores.

        Args:
            labels: List of int arrays [n], one per record. Ids below 0 are ignored.
            predicted: List of int arrays [n] with the predicted ids.
        """
        is_counted = np.concatenate(labels) >= 0
        flat = [np.concatenate(ids)[is_counted] for ids in (labels, predicted)]
        return {"f1": macro_f1(*flat), "matthews": matthews(*flat)}

    def prediction(self, record, row, output):
        values = np.exp(output - np.logaddexp.reduce(output)).tolist()
        probabilities = dict(zip(self.config.data.labels, values))
        label = max(probabilities, key=probabilities.get)
        probability = probabilities[label]
        return {"label": label, "probability": probability, "probabilities": probabilities}


def label_name(label: object, place: str) -> str:
    """Return the name of a label, a string or an integer in a record.

    Args:
        label: Value from the record.
        place: Position of the record in its file, for error messages.

    Raises:
        InputError: If the value is neither a string of 1 to 100 characters nor an integer.
    """
    is_label = isinstance(label, (str, int)) and not isinstance(label, bool)
    if not is_label or not 0 < len(str(label)) <= _MAX_NAME:
        raise InputError(
            f"{place}: label is {short_repr(label)}, expected a text of at most {_MAX_NAME} "
            "characters or an integer. If the label has another name, set data.fields."
        )
    return check_whole(str(label), f"{place}, label")


TASK = Classification
