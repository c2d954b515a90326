"""Sentences in, translations out: a model, its tokenizer and how to search."""

from collections.abc import Callable

from dtransformer.models.text_batches import as_lists, batches_by_length, padded


class Translator:
    """Translate sentences.

    Args:
        model: a `TranslationTransformer`.
        tokenizer: an object with `encode(sentences)`, ids as lists or a ragged tensor,
            and `decode(ids)`; `source_tokenizer` where the source has its own.
        source_tokenizer: the source's tokenizer; `tokenizer` by default.
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
        model,
        tokenizer,
        source_tokenizer=None,
        beam_size: int = 4,
        length_penalty: float = 0.6,
        max_length: int | None = None,
        max_source_length: int = 256,
        batch_size: int = 64,
        on_truncation: Callable | None = None,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.source_tokenizer = source_tokenizer or tokenizer
        self.search = {
            "beam_size": beam_size,
            "length_penalty": length_penalty,
            "max_length": max_length,
        }
        self.max_source_length = max_source_length
        self.batch_size = batch_size
        self.on_truncation = on_truncation

    def __call__(self, sentences: list[str]) -> list[str]:
        """Translate a list of sentences; an empty sentence stays empty.

        Args:
            sentences: list of str.

        Returns:
            A list of str, in the same order.
        """
        sources = [self._truncate(i, ids) for i, ids in enumerate(self._encode(sentences))]
        translations = [""] * len(sources)
        for batch in batches_by_length(sources, self.batch_size):
            ids = self.model.generate(
                padded([sources[i] for i in batch], self.model.pad_id), **self.search
            )
            for i, translation in zip(batch, self.tokenizer.decode(ids.numpy())):
                translations[i] = translation
        return translations

    def _encode(self, sentences):
        if not sentences:
            return []
        return as_lists(self.source_tokenizer.encode(list(sentences)))

    def _truncate(self, number, ids):
        if len(ids) > self.max_source_length and self.on_truncation:
            self.on_truncation(number, len(ids), self.max_source_length)
        return ids[: self.max_source_length]
