"""Bases of tokenizers, and of published ones, whatever their files are."""

import functools
import itertools
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf
import tokenizers

from dtransformer.datasets.chat_template import FILE as TEMPLATE
from dtransformer.datasets.chat_template import FOLDER as TEMPLATES
from dtransformer.datasets.chat_template import ChatTemplate
from dtransformer.datasets.indexed_batches import IGNORED
from dtransformer.datasets.special_tokens import FILES, GENERATION, optional_fields
from dtransformer.errors import InputError
from dtransformer.files import adding_to
from dtransformer.inputs.files import read_bytes
from dtransformer.inputs.text import decode, whole_texts


class Encoding(NamedTuple):
    """The tokens of a text.

    Args:
        ids: list of ints.
        places: list of (start, end), the characters of each; (0, 0) of special tokens.
        types: List of token type ids. Outside the second text of a pair, -100 instead of 0.
    """

    ids: list[int]
    places: list[tuple[int, int]]
    types: list[int]


def _second_text_types(encoding):
    pairs = zip(encoding.type_ids, encoding.sequence_ids, strict=True)
    return [kind if kind or part else IGNORED for kind, part in pairs]


class BaseTokenizer:
    """What tokenizers share: a subclass has `_library`, `_texts`, `vocab_size` and special ids.

    Attributes:
        template_source: the text of a chat template that was given, which folders keep; None for
            none, or for that of its files.
    """

    template_source: str | None = None
    _library: tokenizers.Tokenizer | None = None  # None where it is of another one
    pad_id = unk_id = start_id = end_id = cls_id = sep_id = mask_id = None
    stop_ids: tuple[int, ...] = ()

    def encode(self, sentences: Iterable[str], add_special_ids: bool = False) -> tf.RaggedTensor:
        """Return the ids of texts.

        Args:
            sentences: the texts, not a single string.
            add_special_ids: whether a text has the start and end ids that its model was trained
                with: Llama's begin with one, T5's end with one, GPT-2's have none. Where a text
                has them already, as from a chat template, they are not added.

        Returns:
            Ids [texts, (pieces)], int32.

        Raises:
            InputError: a single string was given, or a text has half of a surrogate pair.
        """
        ids, row_splits = self.encode_to_numpy(sentences, add_special_ids)
        return tf.RaggedTensor.from_row_splits(ids, row_splits, validate=False)

    def encode_to_numpy(
        self, sentences: Iterable[str], add_special_ids: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `encode`, as arrays: text i is `ids[row_splits[i]:row_splits[i + 1]]`.

        Returns:
            `(ids, row_splits)`: int32 [pieces of all texts], int64 [texts + 1].
        """
        texts = whole_texts(sentences)
        rows = self._rows(texts)
        if add_special_ids:
            rows = [self._with_ends(row) for row in rows]
        ids = [np.asarray(row, "int32") for row in rows]
        row_splits = np.cumsum([0, *map(len, ids)], dtype="int64")
        return np.concatenate([np.zeros(0, "int32"), *ids]), row_splits

    def encode_with_offsets(
        self, sentences: Iterable[str], others: Iterable[str] | None = None
    ) -> list[Encoding]:
        """Return the ids of texts, or of pairs of texts, with the places that they come from.

        Args:
            sentences: the texts. They get no special tokens; pairs do, as the model has them. Those
                of a `SubwordTokenizer` have the start token before them, and the end token after
                each text.
            others: the second text of each pair.

        Raises:
            InputError: the tokenizer does not tell places: it has no `tokenizer.json`.
        """
        if self._library is None:
            raise InputError(
                f"{self._path}: does not tell which characters a token has: put the model's "
                "tokenizer.json into the folder"
            )
        inputs = whole_texts(sentences)
        if others is not None:
            inputs = list(zip(inputs, whole_texts(others), strict=True))
        encodings = self._library.encode_batch(inputs, add_special_tokens=others is not None)
        places = [encoding.offsets for encoding in encodings]
        if others is None and self._stripping_ids:
            places = [self._stripped_places(*x) for x in zip(inputs, encodings)]
        return [
            Encoding(x.ids, y, _second_text_types(x))
            for x, y in zip(encodings, places, strict=True)
        ]

    @functools.cached_property
    def _stripping_ids(self) -> set[int]:
        """The ids of added tokens that remove white space before or after them."""
        added = self._library.get_added_tokens_decoder().items()
        return {token_id for token_id, token in added if token.lstrip or token.rstrip}

    def _stripped_places(self, text, encoding):
        """Return the places of tokens. An added token's place has no white space that it removes."""
        places = list(encoding.offsets)
        for index, token_id in enumerate(encoding.ids):
            if token_id in self._stripping_ids:
                start, end = places[index]
                start += len(text[start:end]) - len(text[start:end].lstrip())
                places[index] = start, start + len(text[start:end].strip())
        return places

    @functools.cached_property
    def _ends(self) -> tuple[list[int], list[int]]:
        """The ids that the model has before a text, and after it."""
        texts = itertools.chain("a", self._library.get_vocab())  # of which some have tokens
        found = next(
            one for one in map(self._library.encode, texts) if 0 in one.special_tokens_mask
        )
        mask = found.special_tokens_mask
        return found.ids[: mask.index(0)], found.ids[len(mask) - mask[::-1].index(0) :]

    def _with_ends(self, row):
        """Return the ids of a text with those of its ends, where it has them not already."""
        begin, finish = self._ends
        begin = [] if row[: len(begin)] == begin else begin
        finish = [] if row[len(row) - len(finish) :] == finish else finish
        return [*begin, *row, *finish]

    def decode(self, ids: tf.RaggedTensor | tf.Tensor | np.ndarray | Sequence) -> list[str]:
        """Return the texts of ids.

        A text stops at its first end id, but for one that it starts with, as GPT-2's do. Special
        ids leave no trace, nor do those after `vocab_size`, for which there is no text.

        Args:
            ids: one text a row: array or tensor [texts, pieces], `tf.RaggedTensor`, or a list of
                lists.
        """
        if isinstance(ids, tf.RaggedTensor):
            ids = ids.to_list()
        rows = [self._until_end(np.asarray(row, "int64")) for row in ids]
        return self._texts([row[(row >= 0) & (row < self.vocab_size)].tolist() for row in rows])

    def ids_of_stop(self, text: str) -> list[int]:
        """Return the ids of a text that is to end others: one where it is a token."""
        one = self._id_of(text)
        return self.encode([text]).to_list()[0] if one is None else [one]

    def decode_all(self, ids: list[int]) -> str:
        """Return the text of ids, special tokens included where the tokenizer can say them."""
        if self._library is None:
            return self.decode([ids])[0]
        return self._library.decode(ids, skip_special_tokens=False)

    def chat_template(self, date: str | None = None) -> ChatTemplate:
        """Return the chat template.

        Args:
            date: what it takes for today, "2024-07-26"; None for the day it is.

        Raises:
            InputError: there is none, or it is damaged.
        """
        if self.template_source is None:
            raise InputError("the tokenizer has no chat template: give data.template")
        tokens = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "")
        return ChatTemplate(self.template_source, tokens, "the chat template", date)

    def chat(
        self, messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping] | None = None
    ) -> str:
        """Return the prompt for the next answer of a chat, by the model's template.

        Args:
            messages: Dicts of `"role"`, such as `"user"`, and `"content"`.
            tools: Tools that the model may call, as JSON schemas.

        Raises:
            InputError: If there is no template, or it refuses the messages.
        """
        return self.chat_template().render(messages, True, tools)

    def save_template(self, folder: pathlib.Path) -> None:
        """Write the template that was given into a folder."""
        if self.template_source is not None:
            (folder / TEMPLATE).write_text(self.template_source, encoding="utf-8", newline="")

    def load_template(self, folder: pathlib.Path) -> None:
        """Take the template of a folder, where it has one."""
        if (folder / TEMPLATE).is_file():
            self.template_source = decode(read_bytes(folder / TEMPLATE), folder / TEMPLATE)

    def _until_end(self, row):
        if row.ndim != 1:
            raise InputError("decode takes one row of ids a text: put a single row in a list")
        ends = np.isin(row, [*self.stop_ids, -1 if self.end_id is None else self.end_id])
        if self.start_id is not None and row.size and row[0] == self.start_id:
            ends[0] = False
        return row[: np.argmax(ends)] if ends.any() else row

    def _rows(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of texts."""
        found = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [one.ids for one in found]

    def _id_of(self, token: str) -> int | None:
        """Return the id of a token, None where there is no such token."""
        return self._library.token_to_id(token)

    def _texts(self, rows: list[list[int]]) -> list[str]:
        """Return the texts of ids that are in the vocabulary, without special ones."""
        raise NotImplementedError


class PublishedTokenizer(BaseTokenizer):
    """A tokenizer of a published model, with the interface of `SubwordTokenizer`.

    Args:
        path: its file.
        vocab_size: number of ids; the tables of its model may have more.
        ids: dict of the special ids, by the attributes below.
        config: dict of the fields of its `tokenizer_config.json`.

    Attributes:
        pad_id, unk_id, start_id, end_id, cls_id, sep_id, mask_id: special ids; None for none.
        stop_ids: tuple of all ids that end a text.
        vocab_size: number of ids.
    """

    def __init__(self, path: pathlib.Path, vocab_size: int, ids: dict, config: dict):
        self._path, self.vocab_size, self._config = path, vocab_size, config
        vars(self).update(ids)
        source = path.parent
        paths = [path, *(source / name for name in (*FILES, TEMPLATE))]
        paths += source.glob(f"{TEMPLATES}/*.jinja")
        self._files = {x.relative_to(source): read_bytes(x) for x in paths if x.exists()}

    def encode_prompts(self, sentences: Iterable[str]) -> tf.RaggedTensor:
        """Return the ids of prompts, in which special tokens have their ids; see `encode`."""
        rows = map(self._with_ends, self._prompt_rows(whole_texts(sentences)))
        return tf.ragged.constant(list(rows), "int32", ragged_rank=1)

    def _prompt_rows(self, texts):
        return self._rows(texts)

    def chat_template(self, date: str | None = None) -> ChatTemplate:
        return ChatTemplate.of_tokenizer(
            self._path.parent, self._config, date, self.template_source
        )

    def save(self, folder: str | os.PathLike) -> None:
        """Write the tokenizer's files, as they were loaded, into a folder for `load_tokenizer`.

        Raises:
            InputError: If the folder cannot be written, or has other files of these names.
        """
        with adding_to(folder) as fresh:
            for name, data in self._files.items():
                if self.template_source is None or name.parent.name != TEMPLATES:
                    (fresh / name).parent.mkdir(exist_ok=True)
                    (fresh / name).write_bytes(data)
            self._save_stop_ids(fresh / GENERATION)
            self.save_template(fresh)

    def _save_stop_ids(self, path):
        """Save all end ids, also the ones of the model's `config.json`, which is not copied."""
        fields, ends = optional_fields(path), list(self.stop_ids)
        if ends not in ([], [self.end_id], fields.get("eos_token_id")):
            text = json.dumps({**fields, "eos_token_id": ends}, indent=2)
            path.write_text(text + "\n", encoding="utf-8")
