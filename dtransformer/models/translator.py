"""Sentences in, translations out: a model, its tokenizer and how to search."""

from collections.abc import Callable

import keras

from dtransformer.models.generation.text_generator import TextGenerator


class Translator(TextGenerator):
    """Translate sentences; those that are too long are cut off, and an empty one stays empty.

    Args:
        model: a `TranslationTransformer`.
        tokenizer: an object with `encode(sentences)`, ids as lists or a ragged tensor,
            and `decode(ids)`.
        beam_size: number of hypotheses; 1 is greedy search.
        length_penalty: exponent of the length penalty.
        max_length: largest number of tokens of a translation; None for what follows from the
            source's length.
        max_source_length: largest number of tokens of a source; longer ones are cut off.
        batch_size: number of sentences translated at once.
        on_truncation: called as `on_truncation(number, length, max_source_length)` for
            every sentence that is cut off; `number` counts from 0.

    Example:

    >>> from dtransformer.datasets import SubwordTokenizer
    >>> from dtransformer.models import TranslationTransformer
    >>> tokenizer = SubwordTokenizer.train(["Good morning.", "Bonjour."], vocab_size=39)
    >>> model = TranslationTransformer(
    ...     39, hidden_size=8, num_heads=2, encoder_layers=1, decoder_layers=1)
    >>> translate = Translator(model, tokenizer, beam_size=1, max_length=5)
    >>> len(translate(["Good morning.", ""]))
    2
    """

    def __init__(
        self,
        model: keras.Model,
        tokenizer: object,
        beam_size: int = 4,
        length_penalty: float = 0.6,
        max_length: int | None = None,
        max_source_length: int = 256,
        batch_size: int = 64,
        on_truncation: Callable | None = None,
    ):
        search = {"beam_size": beam_size, "length_penalty": length_penalty}
        super().__init__(model, tokenizer, max_length, batch_size, **search)
        self.max_source_length, self.on_truncation = max_source_length, on_truncation

    def _encode(self, prompts):
        rows = super()._encode(prompts)
        for number, row in enumerate(rows):
            if len(row) > self.max_source_length and self.on_truncation:
                self.on_truncation(number, len(row), self.max_source_length)
        return [row[: self.max_source_length] for row in rows]
