"""Published tokenizers in SentencePiece's `.model` files, run by tensorflow-text.

The file is a `ModelProto` as defined in sentencepiece_model.proto.

Reference:
    Kudo and Richardson, 2018, "SentencePiece", arXiv 1808.06226.
"""

import pathlib
import re

import tensorflow as tf
import tensorflow_text as tf_text
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from dtransformer.datasets.published_tokenizer import PublishedTokenizer
from dtransformer.datasets.special_tokens import CONFIG, special_tokens
from dtransformer.errors import InputError, short_repr

_DEFAULT_TOKENS = {"pad": "<pad>", "unk": "<unk>", "start": "<s>", "end": "</s>"}
# Tokenizer classes: whether their texts have a start id and an end id. Other classes shift the ids.
_CLASSES = {
    None: (False, False),
    "LlamaTokenizer": (True, False),
    "GemmaTokenizer": (True, False),
    "T5Tokenizer": (False, True),
}
# Field numbers of `ModelProto` and its messages.
_PIECES = 1
_TEXT = 1
_TYPE = 3
_NORMALIZER = 3
_PREFIXES = 3
_REMOVES_SPACES = 4
_SPACE = "▁"
_CONTROL = 3  # Type of control pieces.
_NO_PREFIX = b"\x1a\x02\x18\x00"  # Appended to a model, sets its `add_dummy_prefix` to false.


class SentencePieceTokenizer(PublishedTokenizer):
    """Tokenizer of a SentencePiece model. Decoding returns the normalized text.

    Special tokens in a prompt, such as `<s>` from a chat template, become their ids. As in
    `transformers`, the text after such a token has no space prefix, except for T5 and
    `"legacy": true`. In other texts special tokens are plain text.

    Args:
        path: Path of the model. Files in the same folder may name special tokens.
        data: Content of the file, bytes.

    Raises:
        InputError: If the file is not a SentencePiece model, or the files in its folder do not fit,
            use different ids or have tokens that the model lacks.
    """

    def __init__(self, path: pathlib.Path, data: bytes):
        pieces = _pieces(data)
        if not pieces:
            raise InputError(f"{path} is not a SentencePiece model or is damaged. Copy it again.")
        ids = {text: index for index, (text, _) in enumerate(pieces)}
        special, config = special_tokens(path.parent, ids.get, _DEFAULT_TOKENS)
        super().__init__(path, len(pieces), special, config)
        self._data = data
        self._ids = ids
        self._libraries = {}
        self._pieces = [text for text, _ in pieces]
        self._check_added(config)
        rules = dict(_fields(next((x for index, x in _fields(data) if index == _NORMALIZER), b"")))
        self._keeps_spaces = not rules.get(_REMOVES_SPACES, 1) and rules.get(_PREFIXES, 1)
        silent_ids = {index for index, (_, kind) in enumerate(pieces) if kind == _CONTROL}
        self._silent_ids = silent_ids | {self.pad_id, self.start_id, self.end_id}
        kind = config.get("tokenizer_class")
        name = kind.removesuffix("Fast") if isinstance(kind, str) else kind
        if name not in _CLASSES:
            raise InputError(
                f"{path.parent / CONFIG}: {short_repr(kind)} uses other ids than its .model file. "
                "Put the model's tokenizer.json into the folder."
            )
        self._repeats_prefix = name == "T5Tokenizer" or config.get("legacy") is True
        added = map(int, config.get("added_tokens_decoder") or ())
        marks = {self._pieces[x] for x in {*self._silent_ids, self.unk_id, *added} - {None}} - {""}
        by_length = sorted(map(re.escape, marks), key=len, reverse=True)
        self._special_pattern = re.compile(f"({'|'.join(by_length)})")
        special = zip(("bos", "eos"), _CLASSES[name], (self.start_id, self.end_id), strict=True)
        self._ends = tuple(
            [token_id] if config.get(f"add_{end}_token", default) and token_id is not None else []
            for end, default, token_id in special
        )

    def _check_added(self, config):
        """Refuse a config whose added tokens are not pieces of the model."""
        for token_id, token in (config.get("added_tokens_decoder") or {}).items():
            text = token.get("content") if isinstance(token, dict) else token
            if self._ids.get(text) != int(token_id):
                raise InputError(
                    f"{self._path.parent / CONFIG}: `added_tokens_decoder` has {short_repr(text)}, "
                    f"which is not in {self._path.name}. Put the model's tokenizer.json into the folder."
                )

    def _token_to_id(self, token):
        return self._ids.get(token)

    def _rows(self, texts):
        return self._tokenize(texts, True)

    def _encode_prompt_rows(self, texts):
        # Splitting gives a text, a special token, a text, a special token and so on.
        parts = [self._special_pattern.split(text) for text in texts]
        first_ids = iter(self._tokenize([part[0] for part in parts], True))
        later_texts = [text for part in parts for text in part[2::2]]
        if self._repeats_prefix:  # A prefix is not added to a space.
            later_texts = [text.removeprefix(" ") for text in later_texts]
        later_texts = iter(self._tokenize(later_texts, self._repeats_prefix))
        rows = []
        for part in parts:
            row = next(first_ids)
            for mark, ids in zip(part[1::2], later_texts):
                row = [*row, self._ids[mark], *ids]
            rows.append(row)
        return rows

    def _tokenize(self, texts, adds_prefix):
        return (
            self._library_for(adds_prefix).tokenize(tf.constant(texts)).to_list() if texts else []
        )

    def _without_silent_ids(self, row):
        return [token_id for token_id in row if token_id not in self._silent_ids]

    def _texts(self, rows):
        if not rows:
            return []
        rows = list(map(self._without_silent_ids, rows))
        decoded = self._library_for(True).detokenize(
            tf.ragged.constant(rows, "int32", ragged_rank=1)
        )
        texts = [text.decode("utf-8", "replace") for text in decoded.numpy()]
        return [
            " " * self._num_lost_spaces(row) + text for row, text in zip(rows, texts, strict=True)
        ]

    def _num_lost_spaces(self, row):
        """Return the number of leading spaces that TensorFlow's old SentencePiece drops wrongly.

        It drops one space from every piece until the text begins. Later versions drop only one.
        """
        num_spaces = next(
            (i for i, token_id in enumerate(row) if self._pieces[token_id] != _SPACE), len(row)
        )
        if not num_spaces or not self._keeps_spaces:
            return 0
        return (
            num_spaces
            - 1
            + (num_spaces < len(row) and self._pieces[row[num_spaces]].startswith(_SPACE))
        )

    def _library_for(self, adds_prefix):
        """Return TensorFlow's tokenizer, built on first use, after a mesh has reset TensorFlow."""
        if adds_prefix not in self._libraries:
            data = self._data if adds_prefix else self._data + _NO_PREFIX
            self._libraries[adds_prefix] = tf_text.SentencepieceTokenizer(data, out_type=tf.int32)
        return self._libraries[adds_prefix]


def _pieces(data):
    """Return the (text, type) of each piece of a serialized `ModelProto`, or [] for other data."""
    try:
        pieces = [dict(_fields(value)) for field, value in _fields(data) if field == _PIECES]
        return [(piece[_TEXT].decode("utf-8"), piece.get(_TYPE, 1)) for piece in pieces]
    except (AttributeError, DecodeError, KeyError, TypeError, ValueError):
        return []


def _fields(data):
    """Return the (number, value) of each field of a serialized message of any type."""
    return [(x.field_number, x.data) for x in UnknownFieldSet(Empty.FromString(data))]
