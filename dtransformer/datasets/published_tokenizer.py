"""Base classes for tokenizers."""

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
from dtransformer.files import add_to_folder
from dtransformer.inputs.files import read_bytes
from dtransformer.inputs.text import decode, whole_texts


class Encoding(NamedTuple):
    """The tokens of a text or a pair of texts.

    Args:
        ids: List of token ids.
        places: List of `(start, end)` tuples, the characters of each token; (0, 0) for special
            tokens.
        types: List of token type ids. Outside the second text of a pair, -100 instead of 0.
    """

    ids: list[int]
    places: list[tuple[int, int]]
    types: list[int]


def _second_text_types(encoding):
    pairs = zip(encoding.type_ids, encoding.sequence_ids, strict=True)
    return [kind if kind or part else IGNORED for kind, part in pairs]


class BaseTokenizer:
    """Base class for tokenizers.

    Subclasses define `vocab_size`, the special ids, `_texts`, and either `_library` or both `_rows`
    and `_token_to_id`.

    Attributes:
        template_source: Text of a custom chat template, which `save` also writes. `None` uses the
            template of the tokenizer's files, if they have one.
        pad_id, unk_id, start_id, end_id, cls_id, sep_id, mask_id: Special ids, or `None`.
        stop_ids: Tuple of all ids that end a text.
    """

    template_source: str | None = None
    _library: tokenizers.Tokenizer | None = None  # `None` if another library tokenizes.
    pad_id = unk_id = start_id = end_id = cls_id = sep_id = mask_id = None
    stop_ids: tuple[int, ...] = ()

    def encode(self, sentences: Iterable[str], add_special_ids: bool = False) -> tf.RaggedTensor:
        """Return the ids of texts.

        Args:
            sentences: Iterable of texts, not a single string.
            add_special_ids: Boolean. Whether to add the start and end ids that the model was
                trained with: Llama's texts start with one, T5's end with one, GPT-2's have none.
                Ids that a text already has, such as one from a chat template, are not repeated.
                Defaults to `False`.

        Returns:
            int32 `tf.RaggedTensor` of shape [texts, (pieces)].

        Raises:
            InputError: If `sentences` is a single string, or a text has half of a surrogate pair.
        """
        ids, row_splits = self.encode_to_numpy(sentences, add_special_ids)
        return tf.RaggedTensor.from_row_splits(ids, row_splits, validate=False)

    def encode_to_numpy(
        self, sentences: Iterable[str], add_special_ids: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of texts as NumPy arrays; see `encode`.

        Returns:
            An `(ids, row_splits)` tuple: int32 [pieces of all texts] and int64 [texts + 1]. Text i
            is `ids[row_splits[i]:row_splits[i + 1]]`.
        """
        texts = whole_texts(sentences)
        rows = self._rows(texts)
        if add_special_ids:
            rows = [self._add_special_ids(row) for row in rows]
        ids = [np.asarray(row, "int32") for row in rows]
        row_splits = np.cumsum([0, *map(len, ids)], dtype="int64")
        return np.concatenate([np.zeros(0, "int32"), *ids]), row_splits

    def encode_with_offsets(
        self, sentences: Iterable[str], others: Iterable[str] | None = None
    ) -> list[Encoding]:
        """Return the tokens of texts or pairs of texts with their positions in the text.

        Single texts get no special tokens. Pairs get the model's special tokens; a `SubwordTokenizer`
        adds the start token at the beginning and the end token after each text.

        Args:
            sentences: Iterable of texts.
            others: Iterable with the second text of each pair. Defaults to `None`: single texts.

        Returns:
            List of `Encoding`, one for each text or pair.

        Raises:
            InputError: If the tokenizer has no `tokenizer.json`. SentencePiece models do not report
                positions.
        """
        if self._library is None:
            raise InputError(
                f"{self._path} does not provide the characters of a token. Put the model's "
                "tokenizer.json into the folder."
            )
        inputs = whole_texts(sentences)
        if others is not None:
            inputs = list(zip(inputs, whole_texts(others), strict=True))
        encodings = self._library.encode_batch(inputs, add_special_tokens=others is not None)
        places = [encoding.offsets for encoding in encodings]
        if others is None and self._stripping_token_ids:
            places = [self._stripped_places(*x) for x in zip(inputs, encodings)]
        return [
            Encoding(x.ids, y, _second_text_types(x))
            for x, y in zip(encodings, places, strict=True)
        ]

    @functools.cached_property
    def _stripping_token_ids(self) -> set[int]:
        """The ids of added tokens that remove white space before or after them."""
        added = self._library.get_added_tokens_decoder().items()
        return {token_id for token_id, token in added if token.lstrip or token.rstrip}

    def _stripped_places(self, text, encoding):
        """Return the places of tokens, without the white space that an added token strips."""
        places = list(encoding.offsets)
        for index, token_id in enumerate(encoding.ids):
            if token_id in self._stripping_token_ids:
                start, end = places[index]
                start += len(text[start:end]) - len(text[start:end].lstrip())
                places[index] = start, start + len(text[start:end].strip())
        return places

    @functools.cached_property
    def _ends(self) -> tuple[list[int], list[int]]:
        """The ids that the model expects before a text and after it, two lists."""
        # Encode texts until one has an ordinary token between its special tokens.
        texts = itertools.chain("a", self._library.get_vocab())
        encoding = next(
            candidate
            for candidate in map(self._library.encode, texts)
            if 0 in candidate.special_tokens_mask
        )
        mask = encoding.special_tokens_mask
        return encoding.ids[: mask.index(0)], encoding.ids[len(mask) - mask[::-1].index(0) :]

    def _add_special_ids(self, row):
        """Add the model's start and end ids, except those that the row already has."""
        prefix, suffix = self._ends
        prefix = [] if row[: len(prefix)] == prefix else prefix
        suffix = [] if row[len(row) - len(suffix) :] == suffix else suffix
        return [*prefix, *row, *suffix]

    def decode(self, ids: tf.RaggedTensor | tf.Tensor | np.ndarray | Sequence) -> list[str]:
        """Return the texts of ids.

        A text stops at its first end id. An end id in the first position is skipped if it is also
        the start id, as in GPT-2. Special ids and ids of at least `vocab_size` are left out.

        Args:
            ids: Array or tensor [texts, pieces], `tf.RaggedTensor`, or list of lists, with one text
                per row.

        Returns:
            List of strings.

        Raises:
            InputError: If `ids` is a single row.
        """
        if isinstance(ids, tf.RaggedTensor):
            ids = ids.to_list()
        rows = [self._until_end(np.asarray(row, "int64")) for row in ids]
        return self._texts([row[(row >= 0) & (row < self.vocab_size)].tolist() for row in rows])

    def encode_stop(self, text: str) -> list[int]:
        """Return the ids of a stop text: one id if the text is a token, otherwise its encoding."""
        token_id = self._token_to_id(text)
        return self.encode([text]).to_list()[0] if token_id is None else [token_id]

    def decode_all(self, ids: list[int]) -> str:
        """Return the text of a list of ids.

        The text contains special tokens, except for SentencePiece models, which drop them.
        """
        if self._library is None:
            return self.decode([ids])[0]
        return self._library.decode(ids, skip_special_tokens=False)

    def chat_template(self, date: str | None = None) -> ChatTemplate:
        """Return the chat template.

        Args:
            date: Date that the template receives as today, such as "2024-07-26". Defaults to the
                current date.

        Returns:
            A `ChatTemplate`.

        Raises:
            InputError: If the tokenizer has no template or a damaged one.
        """
        if self.template_source is None:
            raise InputError("The tokenizer has no chat template. Set `data.template`.")
        tokens = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "")
        return ChatTemplate(self.template_source, tokens, "The chat template", date)

    def chat(
        self, messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping] | None = None
    ) -> str:
        """Return the prompt for the next answer in a conversation, using the model's template.

        Args:
            messages: List of dicts with `"role"`, such as `"user"`, and `"content"`.
            tools: Tools that the model may call, as JSON schemas. Defaults to none.

        Returns:
            The prompt, a string. Encode it with `encode_prompts`.

        Raises:
            InputError: If the tokenizer has no template, or the template refuses the messages.
        """
        return self.chat_template().render(messages, True, tools)

    def save_template(self, folder: pathlib.Path) -> None:
        """Write the custom chat template, if any, into a folder."""
        if self.template_source is not None:
            (folder / TEMPLATE).write_text(self.template_source, encoding="utf-8", newline="")

    def load_template(self, folder: pathlib.Path) -> None:
        """Use the chat template of a folder, if it has one."""
        if (folder / TEMPLATE).is_file():
            self.template_source = decode(read_bytes(folder / TEMPLATE), folder / TEMPLATE)

    def _until_end(self, row):
        if row.ndim != 1:
            raise InputError(
                "`decode` expects a row of ids per text. Put a single row into a list."
            )
        ends = np.isin(row, [*self.stop_ids, -1 if self.end_id is None else self.end_id])
        if self.start_id is not None and row.size and row[0] == self.start_id:
            ends[0] = False
        return row[: np.argmax(ends)] if ends.any() else row

    def _rows(self, texts: list[str]) -> list[list[int]]:
        """Return a list of ids for each text, without special tokens."""
        encodings = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def _token_to_id(self, token: str) -> int | None:
        """Return the id of a token, or `None` if there is no such token."""
        return self._library.token_to_id(token)

    def _texts(self, rows: list[list[int]]) -> list[str]:
        """Return the texts of rows of ids below `vocab_size`, without special tokens."""
        raise NotImplementedError


class PublishedTokenizer(BaseTokenizer):
    """Base class for tokenizers of published models, with the interface of `SubwordTokenizer`.

    Args:
        path: Path of the tokenizer's file.
        vocab_size: Integer. Number of ids. The embedding table of the model may have more.
        ids: Dict of the special ids, by the names of the attributes below.
        config: Dict of the fields of its `tokenizer_config.json`.

    Attributes:
        pad_id, unk_id, start_id, end_id, cls_id, sep_id, mask_id: Special ids, or `None`.
        stop_ids: Tuple of all ids that end a text.
        vocab_size: Number of ids.
    """

    def __init__(self, path: pathlib.Path, vocab_size: int, ids: dict, config: dict):
        self._path = path
        self.vocab_size = vocab_size
        self._config = config
        vars(self).update(ids)
        source = path.parent
        paths = [path, *(source / name for name in (*FILES, TEMPLATE))]
        paths += source.glob(f"{TEMPLATES}/*.jinja")
        self._files = {x.relative_to(source): read_bytes(x) for x in paths if x.exists()}

    def encode_prompts(self, sentences: Iterable[str]) -> tf.RaggedTensor:
        """Return the ids of prompts. Special tokens in a prompt become their ids; see `encode`.

        The model's start and end ids are added, unless the prompt already has them.
        """
        rows = map(self._add_special_ids, self._encode_prompt_rows(whole_texts(sentences)))
        return tf.ragged.constant(list(rows), "int32", ragged_rank=1)

    def _encode_prompt_rows(self, texts):
        return self._rows(texts)

    def chat_template(self, date: str | None = None) -> ChatTemplate:
        return ChatTemplate.from_folder(self._path.parent, self._config, date, self.template_source)

    def save(self, folder: str | os.PathLike) -> None:
        """Copy the tokenizer's files, as they were loaded, into a folder for `load_tokenizer`.

        A custom chat template replaces the templates of the files.

        Raises:
            InputError: If the folder cannot be written, or has different files with these names.
        """
        with add_to_folder(folder) as fresh:
            for name, data in self._files.items():
                if self.template_source is None or name.parent.name != TEMPLATES:
                    (fresh / name).parent.mkdir(exist_ok=True)
                    (fresh / name).write_bytes(data)
            self._save_stop_ids(fresh / GENERATION)
            self.save_template(fresh)

    def _save_stop_ids(self, path):
        """Save all end ids. Some come from the model's `config.json`, which is not copied."""
        fields = optional_fields(path)
        ends = list(self.stop_ids)
        if ends not in ([], [self.end_id], fields.get("eos_token_id")):
            text = json.dumps({**fields, "eos_token_id": ends}, indent=2)
            path.write_text(text + "\n", encoding="utf-8")
