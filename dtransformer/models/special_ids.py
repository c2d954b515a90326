"""The ids of a vocabulary that a search knows of."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class SpecialIds:
    """What a search knows of a vocabulary.

    Args:
        vocab_size: number V of entries.
        pad_id: what results are padded with.
        end_ids: tuple of the ids that end a text.
        never: tuple of the ids that are never next.
    """

    vocab_size: int
    pad_id: int
    end_ids: tuple[int, ...]
    never: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, model, stop_ids: tuple[int, ...] | None = None, never: tuple[int | None, ...] = ()
    ) -> "SpecialIds":
        """Return those of a network: its ends pad where it has no padding, as 0 where none.

        Args:
            model: what has `vocab_size`, `pad_id` and `end_id`, of which the last two may be None.
            stop_ids: those that end a text; None for the network's `end_id`.
            never: those that are never next, where they end no text; None is no id.

        """
        if stop_ids is None:
            stop_ids = () if model.end_id is None else (model.end_id,)
        pad_id = model.pad_id
        if pad_id is None:
            pad_id = stop_ids[0] if stop_ids else 0
        never = tuple(x for x in never if x is not None and x not in stop_ids)
        return cls(model.vocab_size, pad_id, tuple(stop_ids), never)
