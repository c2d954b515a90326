"""Options of all `generate` methods."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from dtransformer.parallel.config.validators import NotNegative, Positive, checked_value

NonNegativeInt = Annotated[int, Field(ge=0, lt=2**31)]
FromOne = Annotated[int, Field(ge=1, lt=2**31)]
Share = Annotated[float, Field(ge=0, le=1)]
Ids = Sequence[NonNegativeInt]


@dataclasses.dataclass(frozen=True)
class GenerationOptions:
    """Validated options of greedy search, beam search and sampling.

    Args:
        beam_size: Integer. Number of hypotheses. 1 selects greedy search or sampling.
        length_penalty: Float. Exponent α of the length penalty in beam search (Wu et al.,
            2016, arXiv 1609.08144, §7).
        early_stopping: Boolean. Whether the beam search of a text ends as soon as
            `beam_size` hypotheses have finished. By default it ends when no unfinished
            hypothesis can beat a finished one.
        num_return_sequences: Integer. Number of results per text. Beam search returns the
            best ones first, at most `beam_size`. Sampling returns independent samples.
        temperature: Float. If positive, sample from the softmax of the logits divided by
            `temperature`. 0 disables sampling.
        top_k: Integer. Sample from the k most likely tokens only. 0 disables the limit.
        top_p: Float. Sample from the fewest tokens with this total probability (Holtzman et
            al., 2019, arXiv 1904.09751, §3.1). 1 disables the limit.
        min_p: Float. Sample from tokens with at least this fraction of the most likely
            token's probability (Nguyen et al., 2024, arXiv 2407.01082). 0 disables the
            limit.
        repetition_penalty: Float. Divides positive logits of tokens that the text already
            contains, and multiplies negative ones (Keskar et al., 2019, arXiv 1909.05858,
            §4.1). 1 disables it.
        no_repeat_ngram_size: Integer n. No n-gram occurs twice in a text. 0 disables the
            rule.
        stop_ids: Ids that end a text. Defaults to the network's `end_id`. `()` means that
            no id ends a text.
        min_new_tokens: Integer. Minimum number of tokens before an end token.
        first_ids, last_ids: Allowed ids of the first token, and of the last token of a
            result with the maximum length. `()` allows all.
        suppressed_ids: Ids that are never generated.
        suppressed_first_ids: Ids that are not allowed as the first token, or, with
            `first_ids`, as the second.
        seed: Integer. Seed of sampling.

    Raises:
        TypeError: If an option has a wrong type.
        ValueError: If an option is out of range, or conflicts with another option.

    Example:

    >>> GenerationOptions(top_p=0.9)
    Traceback (most recent call last):
    ...
    ValueError: `top_p=0.9` only affects sampling. Set a temperature, such as `temperature=1.0`.
    """

    beam_size: FromOne = 1
    length_penalty: NotNegative = 0.6
    early_stopping: bool = False
    num_return_sequences: FromOne = 1
    temperature: NotNegative = 0.0
    top_k: NonNegativeInt = 0
    top_p: Share = 1.0
    min_p: Share = 0.0
    repetition_penalty: Positive = 1.0
    no_repeat_ngram_size: NonNegativeInt = 0
    stop_ids: Ids | None = None
    min_new_tokens: NonNegativeInt = 0
    first_ids: Ids = ()
    last_ids: Ids = ()
    suppressed_ids: Ids = ()
    suppressed_first_ids: Ids = ()
    seed: int = 0

    def __post_init__(self):
        for name in self.__dataclass_fields__:
            value = checked_value(type(self), name, getattr(self, name))
            object.__setattr__(self, name, value)
        self._check_together()

    @classmethod
    def from_options(cls, **options) -> "GenerationOptions":
        """Return the given options. Raise a TypeError that lists all options for an unknown name."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in names:
                raise TypeError(
                    f"`generate` has no option {name!r}. The options are {', '.join(names)}."
                )
        return cls(**options)

    @property
    def needs_history(self) -> bool:
        """True if a rule depends on the previous tokens of a text."""
        return self.repetition_penalty != 1 or self.no_repeat_ngram_size > 0

    def _check_together(self):
        if self.temperature == 0:
            for name in ("top_k", "top_p", "min_p"):
                if getattr(self, name) != getattr(type(self), name):
                    raise ValueError(
                        f"`{name}={getattr(self, name)}` only affects sampling. Set a temperature, such "
                        "as `temperature=1.0`."
                    )
        elif self.beam_size > 1:
            raise ValueError(
                f"`beam_size={self.beam_size}` and `temperature={self.temperature}` cannot be "
                "combined. Set `beam_size=1` to sample, or `temperature=0` to search."
            )
        if self.temperature == 0 and self.num_return_sequences > self.beam_size:
            raise ValueError(
                f"`num_return_sequences={self.num_return_sequences}` must not exceed "
                f"`beam_size={self.beam_size}`. Increase `beam_size`, or set a temperature to sample."
            )


ID_LISTS = "stop_ids", "first_ids", "last_ids", "suppressed_ids", "suppressed_first_ids"
