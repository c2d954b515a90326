"""The grammar that wrote the embedded corpus, `dtransformer/datasets/embedded.tsv.xz`.

The words are tables (`lexicon`); `english`, `french` and `numerals` hold the rules of a language,
`phrases` builds noun phrases and clauses in both at once, `sentences` are the patterns, and
`corpus` draws from them. `python -m harness.corpus` writes the file anew.
"""
