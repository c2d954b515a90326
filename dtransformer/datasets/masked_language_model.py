"""Batches of packed documents for a `MaskedLM`."""

import dataclasses

import numpy as np

from dtransformer.datasets.indexed_batches import IGNORED, Example
from dtransformer.datasets.language_model import PackedDocuments
from dtransformer.datasets.token_shards import TokenShards
from dtransformer.errors import InputError

# Masking of tokens: the choice of some, and what is seen in their place.


_NOT_TEXT = "pad", "start", "end", "cls", "sep", "mask"  # an unknown word may be masked, too
_MASKED, _RANDOM = 0.8, 0.1  # and what is left stays as it is


@dataclasses.dataclass(frozen=True)
class Masking:
    """Masks a share of the tokens of a text: BERT's rule.

    Of the tokens that are chosen 80 % become the mask token, 10 % a random one, and 10 % stay.

    Reference: Devlin et al., 2019, "BERT", arXiv 1810.04805, §3.1.

    Args:
        rate: share of the tokens that are chosen; at least one is.
        mask_id: id of the mask token.
        special_ids: ids that are never chosen, int [n].
        random_ids: ids that random tokens are drawn from, int [n].
    """

    rate: float
    mask_id: int
    special_ids: np.ndarray
    random_ids: np.ndarray

    @classmethod
    def of(cls, shards: TokenShards, rate: float, mask_id: int | None) -> "Masking":
        """Return the masking of a tokenizer's ids.

        Args:
            shards: the tokens.
            rate: see the class.
            mask_id: id of the mask token; None for the tokenizer's, or for one more id where it has
                none.

        Raises:
            InputError: the rate is not in (0, 1].
        """
        if not 0 < rate <= 1:
            raise InputError(f"rate={rate} has to be above 0, and at most 1")
        special = shards.special_ids
        mask_id = special.get("mask", shards.vocab_size) if mask_id is None else mask_id
        never = [special[name] for name in _NOT_TEXT if name in special] + [mask_id]
        texts = np.setdiff1d(np.arange(shards.vocab_size), [*special.values(), mask_id])
        return cls(rate, mask_id, np.unique(never), texts)

    def __call__(self, ids: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return what is seen of ids int32 [n], and the labels, int32 [n].

        Args:
            ids: the text with its special tokens.
            rng: what is drawn from.
        """
        seen, labels = ids.copy(), np.full_like(ids, IGNORED)
        places = np.flatnonzero(~np.isin(ids, self.special_ids))
        if not len(places):
            return seen, labels
        chosen = rng.choice(places, max(1, round(self.rate * len(places))), replace=False)
        labels[chosen] = ids[chosen]
        draw = rng.random(len(chosen))
        seen[chosen[draw < _MASKED]] = self.mask_id
        random = chosen[(draw >= _MASKED) & (draw < _MASKED + _RANDOM)]
        seen[random] = rng.choice(self.random_ids, len(random))
        return seen, labels


def row_generator(seed: int, epoch: int, number: int) -> np.random.Generator:
    """Return what a row of an epoch draws from."""
    # The 1 tells it from what the epoch draws from: NumPy takes [a, b] and [a, b, 0] for the same.
    return np.random.default_rng([seed, epoch, number, 1])


class MaskedLanguageModelBatches(PackedDocuments):
    """Batches of packed documents of which some tokens are masked, for `Trainer.fit` of a `MaskedLM`.

    Rows are those of `LanguageModelBatches`; documents stand between the tokenizer's `cls` and
    `sep` tokens, or its start and end tokens where it has none of these. A batch is

        ({"tokens": int32 [b, s], "segments": int32 [b, s]}, labels int32 [b, s])

    where labels are the tokens that are asked for, and `ignore_id` elsewhere. Which ones these are
    is drawn anew in each epoch, from seed, epoch and row.

    Reference: Devlin et al., 2019, "BERT", arXiv 1810.04805, §3.1; Liu et al., 2019, "RoBERTa",
    arXiv 1907.11692, §4.1, on dynamic masking, and §4.2, "DOC-SENTENCES", here with several a row.

    Args:
        shards: the documents.
        rate: share of the tokens that are asked for.
        mask_id: id of the mask token; by default the tokenizer's, or one more id where it has none.
        **options: `length`, `batch_size` and others, as `LanguageModelBatches`'.

    Attributes:
        vocab_size: number of ids, the mask token's included: that of the network.

    Raises:
        InputError: the text fills no batch, or an argument is out of range.

    Example:

    >>> from dtransformer.datasets import SubwordTokenizer, write_token_shards
    >>> tokenizer = SubwordTokenizer.train(["one two three"], vocab_size=26)
    >>> shards = write_token_shards(["one two", "three"], tokenizer, "shards")
    >>> batches = MaskedLanguageModelBatches(shards, length=6, batch_size=1)
    >>> inputs, labels = next(iter(batches.as_dataset()))
    >>> labels.shape, batches.vocab_size
    (TensorShape([1, 6]), 27)
    """

    _BEGIN, _END = ("cls", "start"), ("sep", "end")

    def __init__(
        self,
        shards: TokenShards,
        *,
        rate: float = 0.15,
        mask_id: int | None = None,
        **options,
    ):
        self._masking = Masking.of(shards, rate, mask_id)
        self.vocab_size = max(shards.vocab_size, self._masking.mask_id + 1)
        super().__init__(shards, **options)

    def row(self, epoch: int, number: int) -> Example:
        """Return {"tokens": int32 [s], "segments": int32 [s]} and labels int32 [s] of a row."""
        ids, segments = self._read(epoch, number, self.length)
        ids, labels = self._masking(ids, row_generator(self._seed, epoch, number))
        labels[segments == 0] = self.ignore_id
        return {"tokens": ids, "segments": segments}, labels

    def empty_row(self) -> Example:
        """Return a row in which nothing counts."""
        inputs = self._empty_inputs()
        return inputs, inputs["segments"] + self.ignore_id
