"""Generate texts from texts, with a model, a tokenizer and search options."""

from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np

from dtransformer.errors import short_repr
from dtransformer.models.causal_lm import CausalLM
from dtransformer.models.generation.options import GenerationOptions
from dtransformer.models.generation.rules import end_ids


def group_by_length(rows: Sequence[Sequence[int]], batch_size: int) -> Iterator[list[int]]:
    """Group rows of similar length, so that batches need little padding.

    Args:
        rows: Lists of token ids. Empty rows are skipped.
        batch_size: Integer. Maximum number of rows per batch.

    Yields:
        Lists of row indices, from the shortest rows to the longest.
    """
    by_length = sorted(
        (index for index, row in enumerate(rows) if len(row)),
        key=lambda index: len(rows[index]),
    )
    for start in range(0, len(by_length), batch_size):
        yield by_length[start : start + batch_size]


def pad_ids(rows: Sequence[Sequence[int]], pad_id: int) -> np.ndarray:
    """Return lists of ids as an int32 array [b, s], padded at the end with `pad_id`."""
    batch = np.full((len(rows), max(map(len, rows))), pad_id, "int32")
    for row, ids in zip(batch, rows, strict=True):
        row[: len(ids)] = ids
    return batch


def ids_to_lists(ids) -> list[list[int]]:
    """Return the ids from a tokenizer's `encode`, lists or a ragged tensor, as lists."""
    return ids.to_list() if hasattr(ids, "to_list") else [list(row) for row in ids]


_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # decoded from an incomplete byte sequence


class TextGenerator:
    """Callable that continues prompts, or generates targets from source texts.

    Args:
        model: A `CausalLM`, or an encoder–decoder, which generates a separate target text.
        tokenizer: Object with `encode(texts)`, which returns lists of ids or a ragged
            tensor, and `decode(ids)`; see `load_tokenizer`. Its method `encode_prompts`, if
            any, encodes the prompts. Otherwise, prompts of a `CausalLM` begin with the
            model's start token, if it has one.
        max_new_tokens: Integer. Maximum number of tokens per result. `None` selects the
            default of an encoder–decoder's `generate`.
        batch_size: Integer. Number of prompts per batch.
        max_source_length: Integer. Maximum number of tokens per source or prompt. Longer
            sources lose their end, and longer prompts of a `CausalLM` their start.
            `None` disables the limit.
        on_truncation: Callable `on_truncation(index, length, max_source_length)`, called for
            each truncated source, with its index from 0 and its token count.
        **options: Fields of `GenerationOptions`. `stop_ids` defaults to all known end ids of
            the tokenizer, the model and its generation rules.

    Raises:
        TypeError: If an option is unknown.
        ValueError: If an option is out of range.

    Example:

    >>> from dtransformer.datasets import SubwordTokenizer
    >>> from dtransformer.models import CausalLM
    >>> tokenizer = SubwordTokenizer.train(["Good morning."], vocab_size=29)
    >>> model = CausalLM(29, hidden_size=8, num_heads=2, num_layers=1)
    >>> generate = TextGenerator(model, tokenizer, max_new_tokens=5)
    >>> len(generate(["Good", "Good morning"]))
    2
    """

    def __init__(
        self,
        model: keras.Model,
        tokenizer: object,
        max_new_tokens: int | None = 64,
        batch_size: int = 16,
        max_source_length: int | None = None,
        on_truncation: Callable | None = None,
        **options,
    ):
        self._silent_ids = set(end_ids(model, tokenizer))
        if options.get("stop_ids") is None:
            options["stop_ids"] = end_ids(model, tokenizer) or None
        self.model = model
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        self.batch_size = batch_size
        self._max_source_length = max_source_length
        self._on_truncation = on_truncation
        self._continues = isinstance(model, CausalLM)
        self._search = GenerationOptions.from_options(**options)
        self._options = options
        self._end_ids = self._search.stop_ids or ()

    @property
    def num_results(self) -> int:
        """Number of texts generated per prompt."""
        return self._search.num_return_sequences

    def __call__(
        self, prompts: list[str], on_text: Callable[[int, str], None] | None = None
    ) -> list[str]:
        """Generate texts for a list of prompts.

        Args:
            prompts: List of strings.
            on_text: Callable `on_text(index, text)` for streaming. It receives the index of a
                result and its next part. Not supported with beams.

        Returns:
            A list of strings with n = `num_return_sequences` consecutive texts per prompt, in
            the order of the prompts. Continuations exclude the prompt. A source without tokens
            gives `""`.

        Raises:
            TypeError: If `prompts` is a string.
            ValueError: If a prompt has no token or is too long for the model, or `on_text` is
                combined with beams.
        """
        if isinstance(prompts, str):
            raise TypeError(
                f"`prompts` must be a list of strings, got the string {short_repr(prompts)}."
            )
        rows = self._encode(prompts)
        n = self.num_results
        if self._continues and not all(rows):
            raise ValueError(
                f"Prompt {rows.index([])} has no token, and the model has no start token to begin with."
            )
        texts = [""] * (n * len(rows))
        for start, batch in enumerate(group_by_length(rows, self.batch_size)):
            indices = [n * index + i for index in batch for i in range(n)]
            decoders = [
                _IncrementalDecoder(self.tokenizer, self._context(rows[x // n])) for x in indices
            ]

            def stream_part(row_index, ids, decoders=decoders, indices=indices):
                if new_text := decoders[row_index].add(self._until_end(ids)):
                    on_text(indices[row_index], new_text)

            results = self.model.generate(
                self._prompts([rows[index] for index in batch]),
                self.max_new_tokens,
                on_tokens=None if on_text is None else stream_part,
                **{**self._options, "seed": self._search.seed + start},
            )
            for index, decoder, ids in zip(
                indices, decoders, results.numpy().tolist(), strict=True
            ):
                texts[index] = decoder.text(self._until_end(ids))
                if on_text is not None and (tail := decoder.rest(texts[index])):
                    on_text(index, tail)
        return texts

    def _encode(self, prompts):
        if not prompts:
            return []
        if hasattr(self.tokenizer, "encode_prompts"):
            rows = ids_to_lists(self.tokenizer.encode_prompts(list(prompts)))
            start = None
        else:
            rows = ids_to_lists(self.tokenizer.encode(list(prompts)))
            start = self.model.start_id
        if not self._continues:
            return self._truncate(rows)
        if start is not None:
            rows = [row if row[:1] == [start] else [start, *row] for row in rows]
        start_ids = [] if self.model.start_id is None else [self.model.start_id]
        return self._truncate([row or start_ids for row in rows])

    def _truncate(self, rows):
        max_length = self._max_source_length
        for index, row in enumerate(rows):
            if max_length is not None and len(row) > max_length and self._on_truncation:
                self._on_truncation(index, len(row), max_length)
        return [row[-(max_length or 0) :] if self._continues else row[:max_length] for row in rows]

    def _prompts(self, rows):
        """Return prompts in the form that the model's `generate` expects."""
        return rows if self._continues else pad_ids(rows, self.model.pad_id)

    def _context(self, prompt):
        """Return the prompt's ids after its last end token. Decoding a text may depend on them."""
        if not self._continues:
            return []
        ends = [index for index, token_id in enumerate(prompt) if token_id in self._end_ids]
        return prompt[ends[-1] + 1 :] if ends else prompt

    def _until_end(self, ids):
        """Return the ids up to the first end id. Keep the end id if the user chose it."""
        for index, token_id in enumerate(ids):
            if token_id in self._end_ids:
                return ids[: index + (token_id not in self._silent_ids)]
        return ids


class _IncrementalDecoder:
    """Incremental decoder of a continuation.

    Args:
        tokenizer: Tokenizer with `decode`.
        context: Ids before the continuation. Some tokenizers decode a leading space only
            after another word.
    """

    def __init__(self, tokenizer, context):
        self._tokenizer = tokenizer
        self._context = context
        (self._context_text,) = tokenizer.decode([context])
        self._ids = []
        self._returned = ""

    def text(self, ids):
        """Return the text of `ids` after the context."""
        (full_text,) = self._tokenizer.decode([self._context + ids])
        if full_text.startswith(self._context_text):
            return full_text[len(self._context_text) :]
        return self._tokenizer.decode([ids])[0]

    def add(self, ids):
        """Add ids and return the new text, or "" if the last character is incomplete."""
        self._ids += ids
        text = self.text(self._ids)
        return "" if text.endswith(_UNFINISHED) else self.rest(text)

    def rest(self, text):
        """Return the part of `text` that was not returned before, and mark it as returned."""
        if not text.startswith(self._returned):
            return ""
        new_text = text[len(self._returned) :]
        self._returned = text
        return new_text
