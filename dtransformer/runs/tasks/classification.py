"""Classification: a label of a text, or of a pair of texts."""

import keras
import numpy as np

from dtransformer.datasets.indexed_batches import IGNORED
from dtransformer.datasets.record_batches import EncodedRecords
from dtransformer.datasets.records import text_of
from dtransformer.errors import InputError, shown
from dtransformer.inputs.text import check_whole
from dtransformer.layers.heads import SequenceHead
from dtransformer.models import CausalLM, MaskedLM
from dtransformer.models.one_stack import OneStackModel, with_task_head
from dtransformer.models.pretrained.families.task_heads import SEQUENCE, new_head, usual_labels
from dtransformer.runs.scores import macro_f1, matthews
from dtransformer.runs.tasks.records import RecordTask

_MAX_NAME = 100  # characters, as of data.labels
_MAX_SHOWN = 30  # labels in a log line


class LabelTask(RecordTask):
    """What tasks of labelled texts share: an encoder or a decoder, texts with its special tokens."""

    kind, accepts, ending = MaskedLM, OneStackModel, SEQUENCE
    always_trained, command = "head/*", "predict --run {} < FILE"
    _sides = frozenset()  # numbers of texts of the records so far

    def texts(self, record, place) -> list[str]:
        names = ("text", "text_pair") if "text_pair" in record else ("text",)
        return [text_of(record, name, place) for name in names]

    def encode_texts(self, records) -> list[tuple]:
        """Return the ids of texts with their special tokens, and the types of the tokens.

        Pairs have `IGNORED` instead of type 0 outside the second text, so that a record is left out
        if a cut leaves nothing of its second text.
        """
        given = [self.texts(record, place) for place, record in records]
        self._sides |= {len(texts) for texts in given}
        if len(self._sides) > 1:
            raise InputError("data: some records have a text_pair, and some have none")
        if len(given[0]) == 2:
            found = self.tokenizer.encode_with_offsets(*zip(*given))
            return [(one.ids, one.types) for one in found]
        return self.encode_whole([text for (text,) in given])

    def encode_inputs(self, records):
        return [[row] for row in self.encode_texts(records)]

    def describe(self, records):
        return ""

    def encode_whole(self, texts: list[str]) -> list[tuple]:
        """Return the ids of texts, each with the special tokens of one, and the types of tokens."""
        rows = self.tokenizer.encode(texts, add_special_ids=True).to_list()
        return [(ids, [0] * len(ids)) for ids in rows]

    def head(self, num_labels: int, core: OneStackModel) -> keras.layers.Layer:
        """Return the head: the published family's, else as BERT's, or by a decoder's last token."""
        names = self.config.data.labels or usual_labels(num_labels)
        head = new_head(core, self.ending, names)
        if head is None or self.config.data.pooling:
            head = self.plain_head(num_labels, core)
            head.label_names = tuple(names)
        return head

    def plain_head(self, num_labels: int, core: OneStackModel) -> keras.layers.Layer:
        """Return the head of a network of no published family, or with a pooling of one's own."""
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
        old, head = core.head, self.head(self.num_labels, core)
        names = [getattr(one, "label_names", None) for one in (old, head)]
        goes_on = core.has_task_head and type(old) is type(head) and names[0] == names[1]
        if goes_on and getattr(old, "problem_type", None) == "multi_label_classification":
            raise InputError("model: its problem_type is multi_label, and records have one label")
        return core if goes_on else with_task_head(core, head)

    def row(self, records, numbers, length) -> dict:
        """Return the inputs of a row, int32 [s]: tokens, where there are some, and their types."""
        tokens, mask = np.full(length, records.pad_id, np.int32), np.zeros(length, np.int32)
        types = np.zeros(length, np.int32)
        for number in numbers:
            ids, own = records.sequence(int(number))
            tokens[: len(ids)], mask[: len(ids)] = ids, 1
            types[: len(ids)] = np.maximum(own, 0)
        inputs = {"tokens": tokens, "attention_mask": mask}
        return {**inputs, "token_types": types} if isinstance(self.core, MaskedLM) else inputs


class Classification(LabelTask):
    """Texts are of one of several classes (Devlin et al., 2019, §4.1)."""

    @property
    def num_labels(self) -> int:
        """The number of labels."""
        return len(self.config.data.labels)

    def settle(self, found) -> None:
        options = self.config.data
        if not options.labels:
            names = {
                label
                for source in found.get("train", ())
                for place, record in source
                for label in self.labels_of_record(record, place)
            }
            options.labels = sorted(
                names, key=lambda x: (not x.isdigit(), x.isdigit() and int(x), x)
            )
        if len(options.labels) < 2:
            raise InputError(f"data.labels: there are {len(options.labels)}: expected two or more")

    def labels_of_record(self, record, place) -> list[str]:
        """Return the labels of a record, as texts."""
        return [label_name(record.get("label"), place)]

    def numbers(self, record, place) -> list[int]:
        """Return the numbers of a record's labels.

        Raises:
            InputError: one is none of those that there are.
        """
        names, found = self.config.data.labels, self.labels_of_record(record, place)
        for name in found:
            if name not in names:
                raise InputError(
                    f"{place}: the label {shown(name)} is none of {shown(', '.join(names), 100)}"
                )
        return [names.index(name) for name in found]

    def encode(self, records):
        targets = [self.numbers(record, place) for place, record in records]
        return self.encode_inputs(records), targets

    def form(self, records, numbers, length) -> tuple:
        label = int(records.targets[int(numbers[0]), 0]) if len(numbers) else IGNORED
        return self.row(records, numbers, length), np.int32(label)

    def labels(self, records: EncodedRecords) -> list[np.ndarray]:
        """Return the label ids of each record, int [n]. Ids below 0 are ignored."""
        return list(records.targets.astype(int))

    def describe(self, records):
        names, labels = self.config.data.labels, np.concatenate(self.labels(records))
        counts = np.bincount(labels[labels >= 0], minlength=len(names))
        shown = [f"{name} {count:,}" for name, count in zip(names, counts)][:_MAX_SHOWN]
        shown += ["…"] * (len(names) > _MAX_SHOWN)
        return f", {len(names)} labels: {', '.join(shown)}"

    def scores_of_dev(self, trainer) -> dict[str, float]:
        outputs, labels = self.predictions(trainer, "dev"), self.labels(self.records["dev"])
        predicted = [np.atleast_2d(x)[: len(y)].argmax(-1) for x, y in zip(outputs, labels)]
        return self.label_scores(labels, predicted)

    def label_scores(self, labels: list, predicted: list) -> dict[str, float]:
        """Return scores of label ids, each a list of int arrays [n], one for each record."""
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
    """Return what a label of a record is called.

    Raises:
        InputError: it is no label; says where.
    """
    is_label = isinstance(label, (str, int)) and not isinstance(label, bool)
    if not is_label or not 0 < len(str(label)) <= _MAX_NAME:
        raise InputError(
            f"{place}: label is {shown(label)}, expected a text of at most {_MAX_NAME} characters or an "
            "integer: name it in data.fields"
        )
    return check_whole(str(label), f"{place}, label")


TASK = Classification
