"""Masking of tokens, and batches of packed documents for a `MaskedLM`."""

import dataclasses

import numpy as np

from dtransformer.datasets.indexed_batches import IGNORED, Example
from dtransformer.datasets.language_model import PackedDocuments
from dtransformer.datasets.token_shards import TokenShards
from dtransformer.errors import InputError, check_int

_NEVER_MASKED = "pad", "start", "end", "cls", "sep", "mask"  # Unknown words may be masked.
# Fractions of the chosen tokens. The others are unchanged.
_MASKED = 0.8
_RANDOM = 0.1


@dataclasses.dataclass(frozen=True)
class Masking:
    """BERT's masking of a fraction of the tokens.

    Of the chosen tokens 80% become the mask token, 10% a random token, and 10% are unchanged.

    Reference: Devlin et al., 2019, "BERT", arXiv 1810.04805, §3.1.

    Args:
        rate: Float. Fraction of the tokens to choose. At least one token is chosen.
        mask_id: Integer. Id of the mask token.
        special_ids: int [n], ids that are never chosen.
        random_ids: int [n], ids from which random tokens are drawn.
    """

    rate: float
    mask_id: int
    special_ids: np.ndarray
    random_ids: np.ndarray

    @classmethod
    def from_shards(cls, shards: TokenShards, rate: float, mask_id: int | None) -> "Masking":
        """Return the masking for the tokenizer of token shards.

        Args:
            shards: The `TokenShards`.
            rate: Float. Fraction of the tokens to choose.
            mask_id: Integer. Id of the mask token. `None` uses the tokenizer's mask token, or the
                additional id `vocab_size` if it has none.

        Raises:
            InputError: If `rate` is not in (0, 1].
        """
        if not 0 < rate <= 1:
            raise InputError(f"`{rate=}` must be greater than 0 and at most 1.")
        special = shards.special_ids
        mask_id = special.get("mask", shards.vocab_size) if mask_id is None else mask_id
        unmasked = [special[name] for name in _NEVER_MASKED if name in special] + [mask_id]
        text_ids = np.setdiff1d(np.arange(shards.vocab_size), [*special.values(), mask_id])
        return cls(rate, mask_id, np.unique(unmasked), text_ids)

    def __call__(self, ids: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Mask random tokens.

        Args:
            ids: int32 [n], tokens of a text, including special tokens.
            rng: Random generator.

        Returns:
            An `(ids, labels)` tuple of int32 arrays [n]: the masked tokens, and the original ids of
            the chosen tokens or `IGNORED`.
        """
        masked = ids.copy()
        labels = np.full_like(ids, IGNORED)
        places = np.flatnonzero(~np.isin(ids, self.special_ids))
        if not len(places):
            return masked, labels
        chosen = rng.choice(places, max(1, round(self.rate * len(places))), replace=False)
        labels[chosen] = ids[chosen]
        draw = rng.random(len(chosen))
        masked[chosen[draw < _MASKED]] = self.mask_id
        random = chosen[(draw >= _MASKED) & (draw < _MASKED + _RANDOM)]
        masked[random] = rng.choice(self.random_ids, len(random))
        return masked, labels


def num_positions(length: int, rate: float, multiple: int = 1) -> int:
    """Return the number P of positions in a row's `masked_lm_positions`.

    `Masking` chooses at most this many tokens, so no label is ever left out.

    Args:
        length: Integer. Maximum number of tokens of a row that may be masked.
        rate: Float. Fraction of the tokens to choose.
        multiple: Integer. The number is rounded up to a multiple of it. Defaults to 1.

    Raises:
        InputError: If `multiple` is less than 1.

    Example:

    >>> num_positions(512, 0.15), num_positions(512, 0.15, multiple=4)
    (77, 80)
    """
    check_int("pad_positions_to_multiple_of", multiple)
    count = max(1, round(rate * length))
    return -(-count // multiple) * multiple


def select_masked(
    inputs: dict[str, np.ndarray], labels: np.ndarray, count: int | None
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Add the masked positions to a row's inputs, and select the labels at them.

    Args:
        inputs: Dict of the row's inputs.
        labels: int32 [s], `IGNORED` at positions that are not masked.
        count: Integer. Number P of positions. Position 0 with the label `IGNORED` fills the row.
            `None` returns both arguments unchanged.

    Returns:
        A tuple of the inputs with `"masked_lm_positions"`, int32 [P], and labels int32 [P].
    """
    if count is None:
        return inputs, labels
    masked = np.flatnonzero(labels != IGNORED).astype(np.int32)
    fill = (0, count - len(masked))
    inputs = {**inputs, "masked_lm_positions": np.pad(masked, fill)}
    return inputs, np.pad(labels[masked], fill, constant_values=IGNORED)


def row_generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return the random generator of a row, which depends on seed, epoch and row index."""
    # NumPy treats the seeds [a, b] and [a, b, 0] as equal. The 1 separates rows from epochs.
    return np.random.default_rng([seed, epoch, index, 1])


class MaskedLanguageModelBatches(PackedDocuments):
    """Batches of packed documents with masked tokens, for `Trainer.fit` of a `MaskedLM`.

    Rows are packed as in `LanguageModelBatches`. Documents are enclosed in the tokenizer's `cls`
    and `sep` tokens, or in its start and end tokens if it lacks these. A batch is

        ({"tokens": int32 [b, s], "segments": int32 [b, s], "masked_lm_positions": int32 [b, P]},
         labels int32 [b, P])

    where labels are the original ids at the positions of the chosen tokens. P is `rate` times the
    length, rounded. Rows with fewer chosen tokens are filled with position 0 and the label
    `ignore_id`. With `all_positions=True` a batch has no positions, and labels are int32 [b, s],
    `ignore_id` at tokens that are not chosen. Each epoch chooses different tokens, depending on
    seed, epoch and row.

    Reference: Devlin et al., 2019, "BERT", arXiv 1810.04805, §3.1; Liu et al., 2019, "RoBERTa",
    arXiv 1907.11692, §4.1 on dynamic masking, and §4.2 on "DOC-SENTENCES", here with several
    documents per row.

    Args:
        shards: The `TokenShards`.
        rate: Float. Fraction of the tokens to choose. Defaults to 0.15.
        mask_id: Integer. Id of the mask token. `None` (default) uses the tokenizer's mask token, or
            an additional id if it has none.
        all_positions: Boolean. Whether labels have all positions of a row, instead of the chosen
            ones. The network then computes logits at all positions. Defaults to `False`.
        pad_positions_to_multiple_of: Integer. P is rounded up to a multiple of it. Context
            parallelism shards logits only if it divides P. Defaults to 1.
        **options: `length`, `batch_size` and other arguments of `LanguageModelBatches`.

    Attributes:
        vocab_size: Number of ids, including the mask token, for the network.

    Raises:
        InputError: If the text fills no batch, or an argument is out of range.

    Example:

    >>> from dtransformer.datasets import SubwordTokenizer, write_token_shards
    >>> tokenizer = SubwordTokenizer.train(["one two three"], vocab_size=26)
    >>> shards = write_token_shards(["one two", "three"], tokenizer, "shards")
    >>> batches = MaskedLanguageModelBatches(shards, length=6, batch_size=1)
    >>> inputs, labels = next(iter(batches.as_dataset()))
    >>> labels.shape, batches.vocab_size
    (TensorShape([1, 1]), 27)
    """

    _START_NAMES = ("cls", "start")
    _END_NAMES = ("sep", "end")

    def __init__(
        self,
        shards: TokenShards,
        *,
        rate: float = 0.15,
        mask_id: int | None = None,
        all_positions: bool = False,
        pad_positions_to_multiple_of: int = 1,
        **options,
    ):
        self._masking = Masking.from_shards(shards, rate, mask_id)
        self.vocab_size = max(shards.vocab_size, self._masking.mask_id + 1)
        super().__init__(shards, **options)
        self._num_positions = None
        if not all_positions:
            self._num_positions = num_positions(self.length, rate, pad_positions_to_multiple_of)

    def row(self, epoch: int, index: int) -> Example:
        """Return the inputs and labels of a row, without the batch dimension."""
        ids, segments = self._read(epoch, index, self.length)
        ids, labels = self._masking(ids, row_generator(self._seed, epoch, index))
        labels[segments == 0] = self.ignore_id
        inputs = {"tokens": ids, "segments": segments}
        return select_masked(inputs, labels, self._num_positions)

    def empty_row(self) -> Example:
        """Return a row of padding, whose labels are ignored."""
        inputs = self._empty_inputs()
        return select_masked(inputs, inputs["segments"] + self.ignore_id, self._num_positions)
