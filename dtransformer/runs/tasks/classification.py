"""Classification: a label of a text, or of a pair of texts."""

import keras
import numpy as np

from dtransformer.datasets.indexed_batches import IGNORED
from dtransformer.datasets.records import text_of
from dtransformer.errors import InputError, shown
from dtransformer.layers.heads import SequenceHead
from dtransformer.models import CausalLM, MaskedLM
from dtransformer.models.one_stack import OneStackModel, with_task_head
from dtransformer.models.pretrained.families.task_heads import SEQUENCE, new_head, usual_labels
from dtransformer.runs.scores import macro_f1, matthews
from dtransformer.runs.tasks.records import RecordTask

_MAX_NAME = 100  # characters, as of data.labels


class LabelTask(RecordTask):
    """What tasks of labelled texts share: an encoder or a decoder, texts with its special tokens."""

    kind, accepts, ending = MaskedLM, OneStackModel, SEQUENCE
    always_trained, learnt = "head/*", ""
    _sides = frozenset()  # numbers of texts of the records so far

    def texts(self, record, place) -> list[str]:
        names = ("text", "text_pair") if "text_pair" in record else ("text",)
        return [text_of(record, name, place) for name in names]

    def encode_texts(self, records) -> list[tuple]:
        """Return the ids of texts with their special tokens, and the types of tokens."""
        given = [self.texts(record, place) for place, record in records]
        self._sides |= {len(texts) for texts in given}
        if len(self._sides) > 1:
            raise InputError("data: some records have a text_pair, and some have none")
        if len(given[0]) == 2:
            found = self.tokenizer.encode_with_offsets(*zip(*given))
            return [(one.ids, one.types) for one in found]
        return self.encode_whole([text for (text,) in given])

    def encode_whole(self, texts: list[str]) -> list[tuple]:
        """Return the ids of texts, each with the special tokens of one, and the types of tokens."""
        rows = self.tokenizer.encode(texts, add_special_ids=True).to_list()
        return [(ids, [0] * len(ids)) for ids in rows]

    def head(self, num_labels: int, core: OneStackModel) -> keras.layers.Layer:
        """Return the head: the published family's, else as BERT's, or by a decoder's last token."""
        own = new_head(core, self.ending, self.config.data.labels or usual_labels(num_labels))
        if own is not None and not self.config.data.pooling:
            return own
        return self.plain_head(num_labels, core)

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
        rows = self.encode_texts(records)
        return [[row] for row in rows], [self.numbers(record, place) for place, record in records]

    def form(self, records, numbers, length) -> tuple:
        label = int(records.targets[int(numbers[0]), 0]) if len(numbers) else IGNORED
        return self.row(records, numbers, length), np.int32(label)

    def results(self, trainer, batches) -> dict[str, float]:
        labels, predicted = self.labels_and_predicted(trainer)
        scores = {"f1": macro_f1(labels, predicted), "matthews": matthews(labels, predicted)}
        return {**super().results(trainer, batches), **scores}

    def labels_and_predicted(self, trainer) -> tuple[np.ndarray, np.ndarray]:
        """Return the labels of the held-out records, and the likeliest ones, int [n]."""
        outputs = self.predictions(trainer, "dev")
        return self.records["dev"].targets[:, 0].astype(int), outputs.argmax(-1)


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
    return str(label)


TASK = Classification
