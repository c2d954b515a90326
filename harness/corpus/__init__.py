"""Grammar that generates the embedded corpus, `dtransformer/datasets/embedded.tsv.xz`.

`lexicon` contains the words, and `english`, `french` and `numerals` the rules of each language.
`phrases` builds noun phrases and clauses in both languages, `sentences` contains the patterns, and
`corpus` draws from them. `python -m harness.corpus` writes the file again.
"""
