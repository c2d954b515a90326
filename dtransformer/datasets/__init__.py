"""Sentence pairs and documents, from files to batches.

Pairs. Files: `sgm` and `text` read sentences (on `text_files`), `wmt14` fetches and prepares the
sample's, `embedded` generates a corpus. Ids: `tokenizer` (on `words` and `vocabulary`),
`wmt14_examples`. Batches: `batching` (on `batch_plan`, `padding` and `packing`), `synthetic`.

Published tokenizers: `tokenizer_folder` (on `json_tokenizer` and `sentencepiece_tokenizer`, and these
on `published_tokenizer` and `special_tokens`).

Documents, for language models. Files: `documents` reads them. Ids: `shard_writer` writes token shards
(on `shard_files` and `shard_manifest`), `token_shards` reads them. Batches are all `indexed_batches`
(on `permutation`): of packed rows (`packed_documents`, on `token_stream`) those of `language_model`,
`masked_language_model` (on `masking`) and `span_corruption`; of their own `next_sentences` and
`instructions`. Where a run stands, `epochs` says for all.
"""

import dtransformer.start  # noqa: F401 (first: it keeps notes off the terminal)
from dtransformer.datasets.batch_plan import plan_batches
from dtransformer.datasets.batching import TranslationBatches
from dtransformer.datasets.documents import read_documents
from dtransformer.datasets.instructions import InstructionBatches
from dtransformer.datasets.language_model import LanguageModelBatches
from dtransformer.datasets.masked_language_model import MaskedLanguageModelBatches
from dtransformer.datasets.next_sentences import NextSentenceBatches
from dtransformer.datasets.sgm import read_sgm, read_sgm_pairs, write_sgm
from dtransformer.datasets.shard_writer import write_token_shards
from dtransformer.datasets.span_corruption import SpanCorruptionBatches
from dtransformer.datasets.synthetic import random_translation_batches
from dtransformer.datasets.text import clean_pairs, read_lines, read_pairs, read_tsv
from dtransformer.datasets.token_shards import TokenShards

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
    "random_translation_batches",
    "read_documents",
    "read_lines",
    "read_pairs",
    "read_sgm",
    "read_sgm_pairs",
    "read_tsv",
    "write_sgm",
    "write_token_shards",
]


def __getattr__(name):
    # tensorflow-text takes its time to load, and reading files does not need it.
    if name == "load_tokenizer":
        from dtransformer.datasets.tokenizer_folder import load_tokenizer

        return load_tokenizer
    if name == "SubwordTokenizer":
        from dtransformer.datasets.tokenizer import SubwordTokenizer

        return SubwordTokenizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
