"""Published tokenizers in SentencePiece's `.model` files, by tensorflow-text.

Reference: Kudo and Richardson, 2018, "SentencePiece", arXiv 1808.06226; the file is a `ModelProto` of
its sentencepiece_model.proto.
"""

import pathlib

import tensorflow as tf
import tensorflow_text as tf_text
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from dtransformer.datasets.published_tokenizer import PublishedTokenizer
from dtransformer.datasets.special_tokens import CONFIG, special_tokens
from dtransformer.errors import InputError, shown

_USUAL = {"pad": "<pad>", "unk": "<unk>", "start": "<s>", "end": "</s>"}
# Whether texts of these have a start and an end id; the ids of other classes are moved.
_CLASSES = {
    None: (False, False),
    "LlamaTokenizer": (True, False),
    "GemmaTokenizer": (True, False),
    "T5Tokenizer": (False, True),
}
_PIECES, _TEXT, _TYPE = 1, 1, 3  # numbers of fields
_NORMALIZER, _PREFIXES, _REMOVES_SPACES = 3, 3, 4
_SPACE = "▁"
_CONTROL = 3  # a type of pieces


class SentencePieceTokenizer(PublishedTokenizer):
    """A tokenizer of SentencePiece: text comes back as its normalization has it.

    Special tokens that stand in a text are text.

    Args:
        path: the file, whose folder may have files that name special tokens.
        data: what is in it.

    Raises:
        InputError: it is no such file, or the files beside it do not fit, or say that the ids of
            its model are others, or that there are tokens that it lacks.
    """

    def __init__(self, path: pathlib.Path, data: bytes):
        pieces = _pieces(data)
        if not pieces:
            raise InputError(f"{path}: is no model of SentencePiece, or is damaged")
        ids = {text: number for number, (text, _) in enumerate(pieces)}
        special, config = special_tokens(path.parent, ids.get, _USUAL)
        super().__init__(path, len(pieces), special, config)
        self._data, self._ids, self._tokenizer = data, ids, None
        self._pieces = [text for text, _ in pieces]
        self._check_added(config)
        rules = dict(
            _fields(next((x for number, x in _fields(data) if number == _NORMALIZER), b""))
        )
        self._keeps_spaces = not rules.get(_REMOVES_SPACES, 1) and rules.get(_PREFIXES, 1)
        silent = {number for number, (_, kind) in enumerate(pieces) if kind == _CONTROL}
        self._silent = silent | {self.pad_id, self.start_id, self.end_id}
        kind = config.get("tokenizer_class")
        name = kind.removesuffix("Fast") if isinstance(kind, str) else kind
        if name not in _CLASSES:
            raise InputError(
                f"{path.parent / CONFIG}: the ids of {shown(kind)} are not those of its .model "
                "file: put its tokenizer.json into the folder"
            )
        special = zip(("bos", "eos"), _CLASSES[name], (self.start_id, self.end_id), strict=True)
        self._ends = tuple(
            [one] if config.get(f"add_{end}_token", usual) and one is not None else []
            for end, usual, one in special
        )

    def _check_added(self, config):
        """Refuse a config with tokens, by their ids, that the model lacks: they stand in texts."""
        for number, token in (config.get("added_tokens_decoder") or {}).items():
            text = token.get("content") if isinstance(token, dict) else token
            if self._ids.get(text) != int(number):
                raise InputError(
                    f"{self._path.parent / CONFIG}: added_tokens_decoder has {shown(text)}, which is "
                    f"not in {self._path.name}: put the model's tokenizer.json into the folder"
                )

    def _id_of(self, token):
        return self._ids.get(token)

    def _rows(self, texts):
        return self._made().tokenize(tf.constant(texts)).to_list() if texts else []

    def _texts(self, rows):
        if not rows:
            return []
        rows = [[one for one in row if one not in self._silent] for row in rows]
        found = self._made().detokenize(tf.ragged.constant(rows, "int32", ragged_rank=1))
        texts = [text.decode("utf-8", "replace") for text in found.numpy()]
        return [" " * self._lost_spaces(row) + text for row, text in zip(rows, texts, strict=True)]

    def _lost_spaces(self, row):
        """Return how many spaces before a text TensorFlow's SentencePiece drops, and later ones do not.

        It drops one of each piece as long as the text is empty, not of the first piece alone.
        """
        marks = next((i for i, one in enumerate(row) if self._pieces[one] != _SPACE), len(row))
        if not marks or not self._keeps_spaces:
            return 0
        return marks - 1 + (marks < len(row) and self._pieces[row[marks]].startswith(_SPACE))

    def _made(self):
        """Return TensorFlow's tokenizer, made where it is used: a mesh forgets earlier ones."""
        if self._tokenizer is None:
            self._tokenizer = tf_text.SentencepieceTokenizer(self._data, out_type=tf.int32)
        return self._tokenizer


def _pieces(data):
    """Return (text, type) of each piece of a serialized `ModelProto`; [] where it is none."""
    try:
        pieces = [dict(_fields(value)) for number, value in _fields(data) if number == _PIECES]
        return [(piece[_TEXT].decode("utf-8"), piece.get(_TYPE, 1)) for piece in pieces]
    except (AttributeError, DecodeError, KeyError, TypeError, ValueError):
        return []


def _fields(data):
    """Return (number, value) of each field of serialized bytes, whatever its message is."""
    return [(x.field_number, x.data) for x in UnknownFieldSet(Empty.FromString(data))]
