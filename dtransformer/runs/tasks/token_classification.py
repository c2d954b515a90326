"""Token classification: predict a label for each word, at its first token."""

import re

import numpy as np

from dtransformer.datasets.indexed_batches import IGNORED
from dtransformer.datasets.records import get_text
from dtransformer.errors import InputError, short_repr
from dtransformer.layers.heads import TokenHead
from dtransformer.models.pretrained.families.task_heads import TOKENS
from dtransformer.runs.scores import entities
from dtransformer.runs.tasks.classification import Classification, label_name

# Words of a text. Punctuation before and after a word is separate, punctuation inside is not.
_WORD = re.compile(r"\w(?:\S*\w)?|[^\w\s]")


class TokenClassification(Classification):
    """Task that assigns one of several labels to each word (Devlin et al., 2019, §5.3)."""

    ending = TOKENS

    def texts(self, record, place) -> list[str]:
        return [" ".join(self._words(record, place))]

    def _words(self, record, place):
        if "tokens" not in record and "text" in record:
            return _WORD.findall(get_text(record, "text", place))
        words = record.get("tokens")
        if not isinstance(words, list) or not all(isinstance(x, str) and x for x in words):
            raise InputError(f"{place}: tokens is {short_repr(words)}, expected a list of words.")
        return words

    def get_label_names(self, record, place) -> list[str]:
        words = self._words({"tokens": record.get("tokens")}, place)
        labels = record.get("labels")
        if not isinstance(labels, list) or len(labels) != len(words):
            raise InputError(
                f"{place}: labels is {short_repr(labels)}, expected one label per token."
            )
        labels = (str(x) if isinstance(x, bool) else x for x in labels)
        return [label_name(label, place) for label in labels]

    def encode(self, records):
        rows = self.encode_inputs(records)
        for (place, record), [(_, words)] in zip(records, rows, strict=True):
            numbers = self.get_label_ids(record, place)
            words[:] = [IGNORED if word == IGNORED else numbers[word] for word in words]
        return rows, None

    def encode_inputs(self, records):
        """Encode records. Labels are the index of the word at its first token, else `IGNORED`."""
        (before, after) = self.added
        rows = []
        texts = [self.texts(record, place)[0] for place, record in records]
        encodings = self.tokenizer.encode_with_offsets(texts)
        for (place, record), text, (ids, offsets, _) in zip(records, texts, encodings, strict=True):
            starts = np.cumsum([0, *(len(word) + 1 for word in self._words(record, place))])
            # The first character of a token that is not a space decides the word of the token.
            first = [a + len(text[a:b]) - len(text[a:b].lstrip()) for a, b in offsets]
            word_of = np.searchsorted(starts, first, "right") - 1
            is_first = np.diff(word_of, prepend=-1) > 0
            words = np.where(is_first, word_of, IGNORED).tolist()
            words = [IGNORED] * len(before) + words + [IGNORED] * len(after)
            rows.append([([*before, *ids, *after], words)])
        return rows

    @property
    def added(self) -> tuple[list[int], list[int]]:
        """Lists of the special token ids that the tokenizer adds before and after a text."""
        plain, full = (
            self.tokenizer.encode(["a"], add_special_ids=adds).to_list()[0]
            for adds in (False, True)
        )
        start = next(x for x in range(len(full)) if full[x : x + len(plain)] == plain)
        return full[:start], full[start + len(plain) :]

    def plain_head(self, num_labels, core):
        return TokenHead(
            num_labels, dropout_rate=core.arguments["dropout_rate"], dtype=core.dtype_policy
        )

    def build_row(self, records, indices, length) -> tuple:
        labels = np.full(length, IGNORED, np.int32)
        inputs = self.row(records, indices, length)
        inputs.pop("token_types", None)  # `row` filled them with labels.
        for index in indices:
            row_labels = records.sequence(int(index))[1]
            labels[: len(row_labels)] = row_labels
        return inputs, labels

    def labels(self, records):
        return [records.sequence(index)[1] for index in range(len(records))]

    def label_scores(self, labels, predicted):
        scores = super().label_scores(labels, predicted)
        names = [*self.config.data.labels, "O"]
        if any(map(entities, zip(names))):
            # A word outside all entities follows each sentence, so that entities end there.
            outside = len(names) - 1
            sides = []
            is_word = np.concatenate([np.append(ids, outside) >= 0 for ids in labels])
            for side in (labels, predicted):
                ids = np.concatenate([np.append(ids, outside) for ids in side])[is_word]
                sides.append(entities(names[x] for x in ids))
            scores["f1"] = 2 * len(sides[0] & sides[1]) / max(sum(map(len, sides)), 1)
        return scores

    def prediction(self, record, row, output):
        words = self._words(record, "")
        end = 0
        results = []
        text = " ".join(words) if "tokens" in record else record["text"]
        probabilities = np.exp(output - np.logaddexp.reduce(output, axis=-1, keepdims=True))
        positions = {word: position for position, word in enumerate(row[0][1])}
        for index, word in enumerate(words):
            start = text.index(word, end)
            end = start + len(word)
            results.append({"word": word, "start": start, "end": end, "label": None})
            if index in positions:  # Truncated words have no place.
                word_probabilities = probabilities[positions[index]]
                label = self.config.data.labels[word_probabilities.argmax()]
                results[-1] |= {"label": label, "probability": float(word_probabilities.max())}
        spans = [
            {"type": kind, "start": results[first]["start"], "end": results[last - 1]["end"]}
            for first, last, kind in sorted(entities(word["label"] or "O" for word in results))
        ]
        return {"words": results, "entities": spans}


TASK = TokenClassification
