"""Chat: train on the answers in conversations, or on plain texts."""

import pathlib

import numpy as np

from dtransformer.datasets.chat_records import label_spans, render_record
from dtransformer.datasets.chat_template import CHATML, ChatTemplate
from dtransformer.datasets.indexed_batches import IGNORED
from dtransformer.datasets.record_batches import next_tokens
from dtransformer.errors import InputError
from dtransformer.inputs.files import read_bytes
from dtransformer.inputs.text import decode
from dtransformer.models import CausalLM
from dtransformer.runs.scores import get_labeled_spans, perplexities
from dtransformer.runs.tasks.records import RecordTask

_CHATML = "chatml"
_TEXT_KEYS = "text", "messages", "prompt", "completion", "chosen", "rejected", "tools"


class ChatRecords(RecordTask):
    """Base of tasks with conversations: applies the chat template and labels the tokens to learn."""

    kind = CausalLM
    algorithm = "byte_bpe"
    _template = None

    def texts(self, record, place) -> list[str]:
        return list(_strings([record[key] for key in _TEXT_KEYS if key in record]))

    def resolve_options(self, records) -> None:
        template = self.config.data.template
        if self.old_run is not None:
            return  # The tokenizer of the old run contains the template.
        if template == _CHATML:
            self.tokenizer.template_source = CHATML
        elif template is not None:
            self.tokenizer.template_source = decode(read_bytes(pathlib.Path(template)), template)

    @property
    def template(self) -> ChatTemplate:
        """The chat template, loaded on the first use. Plain texts do not need any."""
        if self._template is None:
            self._template = self.tokenizer.chat_template(self.config.data.date)
        return self._template

    @property
    def command(self) -> str:
        """Command that uses the network: `chat` if a conversation was read, else `generate`."""
        return "generate --model {} --prompt TEXT" if self._template is None else "chat --model {}"

    def encode_single(self, records) -> list:
        """Encode records of one conversation or text each.

        Returns:
            A list with one record per entry, each a list of a single (ids, labels) pair.
        """
        texts = []
        train_on = self.config.data.train_on
        for place, record in records:
            is_chat = "messages" in record or isinstance(record.get("prompt"), list)
            texts.append(render_record(record, self.template if is_chat else None, train_on, place))
        rows = self.encode_rendered(texts, [place for place, _ in records])
        return [[row] for row in rows]

    def encode_rendered(self, texts, places) -> list[tuple]:
        """Encode rendered texts as (ids, labels) pairs, see `datasets.chat_records.label_spans`.

        Plain texts get the tokenizer's start and end tokens. Conversations have their template's.

        Args:
            texts: List of `Rendered` texts.
            places: List of their positions in files, for error messages.

        Raises:
            InputError: If no token of a text has a label.
        """
        start = self.tokenizer.start_id
        end = self.tokenizer.end_id
        encoded = self.tokenizer.encode_with_offsets([item.text for item in texts])
        rows = []
        for item, (ids, offsets, _), place in zip(texts, encoded, places, strict=True):
            labels = label_spans(ids, offsets, item.spans)
            if item.is_plain and start is not None and ids[:1] != [start]:
                ids = [start, *ids]
                labels = [IGNORED, *labels]
            if item.is_plain and end is not None and ids[-1:] != [end]:
                ids = [*ids, end]
                labels = [*labels, end]
            if np.equal(labels, IGNORED).all():
                raise InputError(
                    f"{place}: no token has a label. Check that the answer is not empty."
                )
            rows.append((ids, labels))
        return rows


class Chat(ChatRecords):
    """Task that trains a decoder to answer (Ouyang et al., 2022, "InstructGPT", §3.5)."""

    def encode(self, records):
        return self.encode_single(records), None

    def build_row(self, *args) -> tuple:
        return next_tokens(*args)

    def results(self, trainer, batches) -> dict[str, float]:
        results = super().results(trainer, batches)
        records = self.records["dev"]
        spans = [x for n in range(len(records)) for x in get_labeled_spans(*records.sequence(n))]
        return {
            **results,
            **perplexities(results["loss"], spans, sum(map(len, spans)), self.tokenizer),
        }

    def prompts(self, texts):
        if self._template is None:
            return texts
        turns = [[{"role": "user", "content": text}] for text in texts]
        return [self._template.render(turn, True) for turn in turns]


def _strings(value):
    """Yield all strings in nested lists and dicts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


TASK = Chat
