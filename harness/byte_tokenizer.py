"""Byte-level tokenizers for small folders in the format of published models."""

import json
import pathlib
from collections.abc import Iterable

import tokenizers


def byte_tokenizer(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer that is trained on `texts`."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_byte_tokenizer(folder: pathlib.Path, texts: Iterable[str], chat_template: str) -> None:
    """Write a byte-level tokenizer trained on `texts`, and a chat template, into a folder."""
    byte_tokenizer(texts, 280).save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
