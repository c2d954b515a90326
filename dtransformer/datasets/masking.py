"""Masking of tokens: the choice of some, and what is seen in their place."""

import dataclasses

import numpy as np

from dtransformer.datasets.token_shards import TokenShards
from dtransformer.errors import InputError

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
        ignore_id: label of tokens that are not chosen.
    """

    rate: float
    mask_id: int
    special_ids: np.ndarray
    random_ids: np.ndarray
    ignore_id: int

    @classmethod
    def of(cls, shards: TokenShards, rate: float, mask_id: int | None, ignore_id: int) -> "Masking":
        """Return the masking of a tokenizer's ids.

        Args:
            shards: the tokens.
            rate: see the class.
            mask_id: id of the mask token; None for the tokenizer's, or for one more id where it has
                none.
            ignore_id: see the class.

        Raises:
            InputError: the rate is not in (0, 1].
        """
        if not 0 < rate <= 1:
            raise InputError(f"rate={rate} has to be above 0, and at most 1")
        special = shards.special_ids
        mask_id = special.get("mask", shards.vocab_size) if mask_id is None else mask_id
        never = [special[name] for name in _NOT_TEXT if name in special] + [mask_id]
        texts = np.setdiff1d(np.arange(shards.vocab_size), [*special.values(), mask_id])
        return cls(rate, mask_id, np.unique(never), texts, ignore_id)

    def __call__(self, ids: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return what is seen of ids int32 [n], and the labels, int32 [n].

        Args:
            ids: the text with its special tokens.
            rng: what is drawn from.
        """
        seen, labels = ids.copy(), np.full_like(ids, self.ignore_id)
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
