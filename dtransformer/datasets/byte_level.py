"""Byte-level byte-pair encoding that restores every text: line ends, tabs and spaces.

Reference:
    Radford et al., 2019, "Language models are unsupervised multitask learners", §2.2.
"""

import json
import pathlib
import tempfile
from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from dtransformer.datasets.published_form import config_fields
from dtransformer.datasets.special_tokens import CONFIG
from dtransformer.datasets.tokenizer import FILE
from dtransformer.datasets.tokenizer_folder import BYTE_LEVEL, JsonTokenizer
from dtransformer.errors import InputError
from dtransformer.inputs.text import whole_texts

_NAMES = "pad_token", "unk_token", "bos_token", "eos_token"
_SPECIAL = "<|pad|>", "<|unk|>", "<|start|>", "<|end|>"


def train_byte_level(
    texts: Iterable[str], vocab_size: int, lower_case: bool = False, allow_smaller: bool = False
) -> JsonTokenizer:
    """Train a lossless tokenizer for language models: `decode(encode(text)) == text`.

    Its pieces are four special tokens, the 256 bytes, and merges of the most frequent pairs. A
    vocabulary too small for this has only the bytes of `texts`, and other bytes become unknown.

    Args:
        texts: Iterable of texts to train on.
        vocab_size: Integer. Number of pieces.
        lower_case: Boolean. Whether text is converted to lower case. Decoding does not restore the
            case. Defaults to `False`.
        allow_smaller: Boolean. Whether to return fewer pieces if the texts have fewer pairs that occur
            twice, instead of raising an error. Defaults to `False`.

    Returns:
        A `JsonTokenizer`.

    Raises:
        InputError: If there is no text, or `vocab_size` is too small or too large for the texts.

    Example:

    >>> tokenizer = train_byte_level(["if x:\\n\\n\\treturn  x\\n"], vocab_size=262)
    >>> tokenizer.decode(tokenizer.encode(["\\treturn  é\\n\\n"]))
    ['\\treturn  é\\n\\n']
    """
    texts = whole_texts(texts)
    if not any(map(str.strip, texts)):
        raise InputError("The texts to train a tokenizer on are empty. Give at least one word.")
    library = tokenizers.Tokenizer(models.BPE(unk_token=_SPECIAL[1]))
    if lower_case:
        library.normalizer = normalizers.Lowercase()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.post_processor = processors.TemplateProcessing(
        single=f"{_SPECIAL[2]} $A", special_tokens=[(_SPECIAL[2], 2)]
    )
    has_all_bytes = vocab_size >= len(_SPECIAL) + 256
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2 if allow_smaller else 0,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if has_all_bytes else [],
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    size = library.get_vocab_size()
    if size > vocab_size or (size < vocab_size and not allow_smaller):
        limit = "need at least" if size > vocab_size else "yield at most"
        raise InputError(
            f"`{vocab_size=}` does not fit the texts, which {limit} {size} pieces. Set it to {size} "
            "or use other texts."
        )
    config = config_fields() | dict(zip(_NAMES, _SPECIAL)) | BYTE_LEVEL
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        library.save(str(folder / FILE))
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        return JsonTokenizer(folder / FILE)
