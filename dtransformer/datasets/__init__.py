"""Sentence pairs and documents, from files to batches.

Pairs. Files: `text` reads sentences, `embedded` is a corpus that is there. Ids: `tokenizer`
(on `vocabulary` and `published_form`), and `byte_level` for language models. Batches: `batching`
(on `batch_plan` and `packing`).

Published tokenizers: `tokenizer_folder` (on `sentencepiece_tokenizer`, `published_tokenizer` and
`special_tokens`).

Documents, for language models. Files: `documents` reads them. Ids: `shard_writer` writes token shards
(on `shard_manifest`), `token_shards` reads them. Batches are all `indexed_batches`
(on `mixture`): of packed rows those of `language_model`,
`masked_language_model` and `span_corruption`; of their own `next_sentences` and
`instructions`. Where a run stands, `epochs` says for all.

Reading files needs no TensorFlow; it is imported when a name that needs it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING

from dtransformer.datasets.batch_plan import plan_batches
from dtransformer.datasets.documents import read_documents
from dtransformer.datasets.text import clean_pairs, read_lines, read_pairs, read_tsv

if TYPE_CHECKING:
    from dtransformer.datasets.batching import TranslationBatches
    from dtransformer.datasets.byte_level import train_byte_level
    from dtransformer.datasets.instructions import InstructionBatches
    from dtransformer.datasets.language_model import LanguageModelBatches
    from dtransformer.datasets.masked_language_model import MaskedLanguageModelBatches
    from dtransformer.datasets.next_sentences import NextSentenceBatches
    from dtransformer.datasets.shard_writer import write_token_shards
    from dtransformer.datasets.span_corruption import SpanCorruptionBatches
    from dtransformer.datasets.token_shards import TokenShards
    from dtransformer.datasets.tokenizer import SubwordTokenizer
    from dtransformer.datasets.tokenizer_folder import load_tokenizer

__all__ = [
    "InstructionBatches",
    "LanguageModelBatches",
    "MaskedLanguageModelBatches",
    "NextSentenceBatches",
    "SpanCorruptionBatches",
    "SubwordTokenizer",
    "TokenShards",
    "TranslationBatches",
    "clean_pairs",
    "load_tokenizer",
    "plan_batches",
    "read_documents",
    "read_lines",
    "read_pairs",
    "read_tsv",
    "train_byte_level",
    "write_token_shards",
]


# The modules of the names that need TensorFlow; tensorflow-text, which takes its time, comes last.
_HOMES = (
    "batching",
    "byte_level",
    "instructions",
    "language_model",
    "masked_language_model",
    "next_sentences",
    "shard_writer",
    "span_corruption",
    "token_shards",
    "tokenizer_folder",
    "tokenizer",
)


def __getattr__(name):
    if name in __all__:
        importlib.import_module("dtransformer.start")
        for home in _HOMES:
            module = importlib.import_module(f"dtransformer.datasets.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
