"""Sentence pairs, from files to batches.

Files: `sgm` and `text` read sentences (on `text_files`), `wmt14` fetches and prepares the sample's,
`embedded` generates a corpus. Ids: `tokenizer` (on `words` and `vocabulary`), `wmt14_examples`.
Batches: `batching` (on `batch_plan` and `padding`), `synthetic`.
"""

from dtransformer.datasets.batch_plan import plan_batches
from dtransformer.datasets.batching import TranslationBatches
from dtransformer.datasets.sgm import read_sgm, read_sgm_pairs, write_sgm
from dtransformer.datasets.synthetic import random_translation_batches
from dtransformer.datasets.text import clean_pairs, read_lines, read_pairs, read_tsv

__all__ = [
    "SubwordTokenizer",
    "TranslationBatches",
    "clean_pairs",
    "plan_batches",
    "random_translation_batches",
    "read_lines",
    "read_pairs",
    "read_sgm",
    "read_sgm_pairs",
    "read_tsv",
    "write_sgm",
]


def __getattr__(name):
    # tensorflow-text takes its time to load, and reading files does not need it.
    if name == "SubwordTokenizer":
        from dtransformer.datasets.tokenizer import SubwordTokenizer

        return SubwordTokenizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
