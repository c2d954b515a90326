"""A corpus of English-French sentence pairs that needs no download: a grammar writes it.

Words: `lexicon`, `adjectives`, `verbs`, `circumstances` (tables), `numerals`.
Rules: `english`, `french` (one language each), `noun_phrases`, `grammar` (both at once).
Chance: `draw`; `phrases` and `clauses` (pieces that make sense); `statements`, `descriptions`,
`surroundings`, `figures`, `compounds`, `questions`, `requests` (kinds of sentences).
`corpus` draws kinds by weight, keeps distinct pairs and writes the files.
"""

from dtransformer.datasets.embedded.corpus import sentence_pairs, write_corpus

__all__ = ["sentence_pairs", "write_corpus"]
