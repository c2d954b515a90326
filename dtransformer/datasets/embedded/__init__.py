"""A corpus of English-French sentence pairs that needs no download: a grammar writes it.

The words are tables (`lexicon`); `english`, `french` and `numerals` hold the rules of a language,
`phrases` builds noun phrases and clauses in both at once, `sentences` are the patterns, and
`corpus` draws from them, keeps distinct pairs and writes the files.
"""

from dtransformer.datasets.embedded.corpus import sentence_pairs, write_corpus

__all__ = ["sentence_pairs", "write_corpus"]
