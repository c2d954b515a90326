"""Options of every `generate`."""

import dataclasses
from collections.abc import Sequence

from dtransformer.errors import check_int
from dtransformer.parallel.config.validators import field, flag, non_negative, positive


def _int_from(least):
    return lambda name, value: check_int(name, value, least)


def _share(name, value):
    non_negative(name, value)
    if value > 1:
        raise ValueError(f"{name} must be a number from 0 to 1, got {value}")


def _ids(name, value):
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{name} must be a list of ints, got {value!r}")
    for one in value:
        check_int(name, one, 0)


def _ids_or_none(name, value):
    if value is not None:
        _ids(name, value)


@dataclasses.dataclass(frozen=True)
class GenerationOptions:
    """The options of a search, checked.

    Args:
        beam_size: number of hypotheses kept; 1 is greedy search, or drawing.
        length_penalty: exponent α of the length penalty of beam search (Wu et al., 2016, arXiv
            1609.08144, §7).
        early_stopping: whether beam search of a text ends as soon as `beam_size` hypotheses have
            ended; else when none that lives can beat one of them.
        num_return_sequences: number of results of each text, best first: of beams at most
            `beam_size`; or of draws.
        temperature: above 0, draw each token from the softmax of the logits divided by it.
        top_k: draw from the k most likely tokens only; 0 for all.
        top_p: draw from the fewest tokens that are as likely together (Holtzman et al., 2019,
            arXiv 1904.09751, §3.1); 1 for all.
        min_p: draw from tokens that are at least as likely as this share of the most likely one's
            probability (Nguyen et al., 2024, arXiv 2407.01082); 0 for all.
        repetition_penalty: what the logits of tokens that the text has are divided by, where they
            are positive, and multiplied by elsewhere (Keskar et al., 2019, arXiv 1909.05858, §4.1).
        no_repeat_ngram_size: no n tokens follow each other twice in a text; 0 for no such rule.
        stop_ids: ids of which each ends a text; None for the network's `end_id`, () for none.
        min_new_tokens: how many tokens a result has before one may end it.
        first_ids, last_ids: ids of which one is the first token of a result, or the last of one that
            is as long as it may be; () for any.
        suppressed_ids: ids that are never next.
        suppressed_first_ids: ids that are not first, or, with `first_ids`, not second.
        seed: int, for drawing.

    Raises:
        TypeError: there is no such option, or one is of another type.
        ValueError: an option is out of range, or does not go together with another.

    Example:

    >>> GenerationOptions(top_p=0.9)
    Traceback (most recent call last):
    ...
    ValueError: top_p=0.9 is for drawing: set a temperature, such as temperature=1.0
    """

    beam_size: int = field(1, _int_from(1))
    length_penalty: float = field(0.6, non_negative)
    early_stopping: bool = field(False, flag)
    num_return_sequences: int = field(1, _int_from(1))
    temperature: float = field(0.0, non_negative)
    top_k: int = field(0, _int_from(0))
    top_p: float = field(1.0, _share)
    min_p: float = field(0.0, _share)
    repetition_penalty: float = field(1.0, positive)
    no_repeat_ngram_size: int = field(0, _int_from(0))
    stop_ids: Sequence[int] | None = field(None, _ids_or_none)
    min_new_tokens: int = field(0, _int_from(0))
    first_ids: Sequence[int] = field((), _ids)
    last_ids: Sequence[int] = field((), _ids)
    suppressed_ids: Sequence[int] = field((), _ids)
    suppressed_first_ids: Sequence[int] = field((), _ids)
    seed: int = field(0, _int_from(-(2**31)))

    def __post_init__(self):
        for name, own in self.__dataclass_fields__.items():
            value = getattr(self, name)
            own.metadata["check"](name, value)
            if isinstance(value, Sequence):
                object.__setattr__(self, name, tuple(value))
        self._check_together()

    @classmethod
    def of(cls, **given) -> "GenerationOptions":
        """Return the options that are given by their names; errors as of the class."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in names:
                raise TypeError(f"there is no option {name!r} of generate: {', '.join(names)}")
        return cls(**given)

    @property
    def looks_back(self) -> bool:
        """Whether a rule depends on the tokens that a text has."""
        return self.repetition_penalty != 1 or self.no_repeat_ngram_size > 0

    def _check_together(self):
        if self.temperature == 0:
            for name in ("top_k", "top_p", "min_p"):
                if getattr(self, name) != getattr(type(self), name):
                    raise ValueError(
                        f"{name}={getattr(self, name)} is for drawing: set a temperature, such as "
                        "temperature=1.0"
                    )
        elif self.beam_size > 1:
            raise ValueError(
                f"beam_size={self.beam_size} searches and temperature={self.temperature} samples: "
                "set beam_size=1 or temperature=0"
            )
        if self.temperature == 0 and self.num_return_sequences > self.beam_size:
            raise ValueError(
                f"num_return_sequences={self.num_return_sequences} is more than "
                f"beam_size={self.beam_size}: set a larger beam, or a temperature to draw several"
            )


ID_LISTS = "stop_ids", "first_ids", "last_ids", "suppressed_ids", "suppressed_first_ids"
