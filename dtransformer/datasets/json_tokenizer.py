"""Published tokenizers in `tokenizer.json`, by the library `tokenizers`."""

import pathlib

import tokenizers

from dtransformer.datasets.published_tokenizer import Encoding, PublishedTokenizer, encodings
from dtransformer.datasets.special_tokens import SpecialTokens
from dtransformer.errors import InputError, one_line


class JsonTokenizer(PublishedTokenizer):
    """A tokenizer of the library `tokenizers`: byte-pair encoding, WordPiece, Unigram, and others.

    Args:
        path: the file, whose folder may have files that name special tokens.
        text: what is in it.

    Raises:
        InputError: it is no such file, or the files beside it do not fit.
    """

    def __init__(self, path: pathlib.Path, text: str):
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises no other kind
            raise InputError(
                f"{path}: is no tokenizer of the library `tokenizers` ({one_line(error, 160)})"
            ) from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        special = SpecialTokens.of(path.parent, vocabulary.get, {})
        super().__init__(path, max(vocabulary.values(), default=-1) + 1, special)

    def encode_with_offsets(self, sentences, others=None) -> list[Encoding]:
        return encodings(self._tokenizer, sentences, others)

    def decode_all(self, ids: list[int]) -> str:
        """Return the text of ids, special tokens included."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _id_of(self, token):
        return self._tokenizer.token_to_id(token)

    def _rows(self, texts, add_special_ids):
        found = self._tokenizer.encode_batch(texts, add_special_tokens=add_special_ids)
        return [one.ids for one in found]

    def _texts(self, rows):
        return self._tokenizer.decode_batch(rows, skip_special_tokens=True)
