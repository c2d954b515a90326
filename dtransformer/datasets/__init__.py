"""Datasets, tokenizers and batches for `Trainer.fit`.

Sentence pairs: `text` reads files, `embedded` is a bundled corpus, and `batching` makes batches,
using `batch_plan` and `packing`.

Documents: `documents` reads files. `shard_writer` tokenizes documents and writes token shards, and
`token_shards` reads them. Both use `shard_manifest`. `language_model`, `masked_language_model` and
`span_corruption` make batches of packed documents. `next_sentences` and `instructions` build rows
from the parts of documents. All of them derive from `indexed_batches`, which shuffles with
`mixture`. `shard_mixture` mixes folders of token shards by weights.

Tokenizers: `tokenizer` trains subword tokenizers, using `vocabulary` and `published_form`.
`byte_level` trains lossless tokenizers for language models. `tokenizer_folder` loads published
tokenizers, using `sentencepiece_tokenizer`, `published_tokenizer` and `special_tokens`.

`epochs` stores and restores the position of a run for all batches.

Reading files does not import TensorFlow. The names that need it are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING

from dtransformer.datasets.batch_plan import LengthBuckets, plan_batches
from dtransformer.datasets.documents import read_documents
from dtransformer.datasets.text import clean_pairs, read_lines, read_pairs, read_tsv

if TYPE_CHECKING:
    from dtransformer.datasets.batching import SpecialTokenIds, TranslationBatches
    from dtransformer.datasets.byte_level import train_byte_level
    from dtransformer.datasets.instructions import InstructionBatches
    from dtransformer.datasets.language_model import LanguageModelBatches
    from dtransformer.datasets.masked_language_model import MaskedLanguageModelBatches
    from dtransformer.datasets.next_sentences import NextSentenceBatches
    from dtransformer.datasets.shard_mixture import MixedBatches, ShardMixture
    from dtransformer.datasets.shard_writer import write_token_shards
    from dtransformer.datasets.span_corruption import SpanCorruptionBatches
    from dtransformer.datasets.token_shards import TokenShards
    from dtransformer.datasets.tokenizer import SubwordTokenizer
    from dtransformer.datasets.tokenizer_folder import load_tokenizer

__all__ = [
    "InstructionBatches",
    "LanguageModelBatches",
    "LengthBuckets",
    "MaskedLanguageModelBatches",
    "MixedBatches",
    "NextSentenceBatches",
    "ShardMixture",
    "SpanCorruptionBatches",
    "SpecialTokenIds",
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


# Modules that need TensorFlow. Imports of tensorflow-text are slow and come last.
_MODULES = (
    "batching",
    "byte_level",
    "instructions",
    "language_model",
    "masked_language_model",
    "next_sentences",
    "shard_mixture",
    "shard_writer",
    "span_corruption",
    "token_shards",
    "tokenizer_folder",
    "tokenizer",
)


def __getattr__(name):
    if name in __all__:
        importlib.import_module("dtransformer.start")
        for home in _MODULES:
            module = importlib.import_module(f"dtransformer.datasets.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
