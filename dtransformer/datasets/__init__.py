"""Sentence pairs, from files to batches.

`sgm` and `text` read files, `wmt14` prepares the sample's, `embedded` generates a corpus,
`tokenizer` turns text into ids, `batching` ids into batches, `synthetic` makes random ones.
"""

from dtransformer.datasets.batching import TranslationBatches, plan_batches
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
