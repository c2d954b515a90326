"""Token classification: a label of each word, by the first of its tokens."""

import numpy as np

from dtransformer.datasets.indexed_batches import IGNORED
from dtransformer.errors import InputError, shown
from dtransformer.layers.heads import TokenHead
from dtransformer.models.pretrained.families.task_heads import TOKENS
from dtransformer.runs.tasks.classification import Classification, label_name


class TokenClassification(Classification):
    """Words of texts are of one of several classes (Devlin et al., 2019, §5.3)."""

    ending = TOKENS

    def texts(self, record, place) -> list[str]:
        return [" ".join(self._words(record, place))]

    def _words(self, record, place):
        words, labels = record.get("tokens"), record.get("labels")
        if not isinstance(words, list) or not all(isinstance(x, str) and x for x in words):
            raise InputError(f"{place}: tokens are {shown(words)}, expected a list of words")
        if not isinstance(labels, list) or len(labels) != len(words):
            raise InputError(
                f"{place}: labels are {shown(labels)}, expected one for each of tokens"
            )
        return words

    def labels_of_record(self, record, place) -> list[str]:
        self._words(record, place)
        labels = (str(x) if isinstance(x, bool) else x for x in record["labels"])
        return [label_name(label, place) for label in labels]

    def encode(self, records):
        (before, after), rows = self.added, []
        found = self.tokenizer.encode_with_offsets([self.texts(x, p)[0] for p, x in records])
        for (place, record), (ids, places, _) in zip(records, found, strict=True):
            starts = np.cumsum([0, *(len(word) + 1 for word in record["tokens"])])
            # A token's first character that is no space tells its word.
            text = " ".join(record["tokens"])
            first = [a + len(text[a:b]) - len(text[a:b].lstrip()) for a, b in places]
            word_of = np.searchsorted(starts, first, "right") - 1
            is_first = np.diff(word_of, prepend=-1) > 0
            numbers = np.array(self.numbers(record, place), np.int32)
            own = np.where(is_first, numbers[np.minimum(word_of, len(numbers) - 1)], IGNORED)
            labels = [IGNORED] * len(before) + own.tolist() + [IGNORED] * len(after)
            rows.append([([*before, *ids, *after], labels)])
        return rows, None

    @property
    def added(self) -> tuple[list[int], list[int]]:
        """The special tokens that come before and after a text."""
        plain, whole = (
            self.tokenizer.encode(["a"], add_special_ids=adds).to_list()[0]
            for adds in (False, True)
        )
        start = next(x for x in range(len(whole)) if whole[x : x + len(plain)] == plain)
        return whole[:start], whole[start + len(plain) :]

    def plain_head(self, num_labels, core):
        return TokenHead(
            num_labels, dropout_rate=core.arguments["dropout_rate"], dtype=core.dtype_policy
        )

    def form(self, records, numbers, length) -> tuple:
        labels = np.full(length, IGNORED, np.int32)
        inputs = self.row(records, numbers, length)
        inputs.pop("token_types", None)  # what is kept are labels
        for number in numbers:
            own = records.sequence(int(number))[1]
            labels[: len(own)] = own
        return inputs, labels

    def labels_and_predicted(self, trainer) -> tuple[np.ndarray, np.ndarray]:
        outputs, records = self.predictions(trainer, "dev"), self.records["dev"]
        labels = np.concatenate([records.sequence(n)[1] for n in range(len(records))])
        found = [x[: len(records.sequence(n)[1])].argmax(-1) for n, x in enumerate(outputs)]
        return labels[labels >= 0], np.concatenate(found)[labels >= 0]


TASK = TokenClassification
