"""Generation settings of published weights, from `generation_config.json`."""

import os
import warnings
from collections.abc import Mapping

from dtransformer.errors import InputError, short_repr
from dtransformer.models.generation.options import GenerationOptions
from dtransformer.models.published_fields import FIELDS

_FIELDS = FIELDS["generation"]
IGNORED_FIELDS = set(_FIELDS["ignored"])
_IDS = _FIELDS["ids"]
_NUMBERS = _FIELDS["numbers"]
SUPPORTED_FIELDS = {*_IDS, *_NUMBERS, *_FIELDS["also_supported"]}
_SAMPLING = _FIELDS["sampling"]
_BEAMS = _FIELDS["beams"]
_NEUTRAL = _FIELDS["neutral"]
_OPTIONS = {**_FIELDS["others"], **_SAMPLING, **_BEAMS}
REPORTED_FIELDS = {*_OPTIONS, *_NEUTRAL}


def parse_rules(fields: Mapping, path: os.PathLike, has_source: bool, vocab_size: int) -> dict:
    """Sort the fields of `generation_config.json` into supported and unsupported settings.

    Args:
        fields: Dict of the file's content.
        path: Path of the file, for messages.
        has_source: Boolean. Whether the network is an encoder–decoder.
        vocab_size: Integer. Size of the vocabulary.

    Returns:
        A dict of `GenerationOptions` fields that `generate` uses by default, with two
        possible other keys. `"min_length"` is the minimum length including the prompt.
        `"asks"` is a list of the path and a dict from unsupported fields to
        `[value, option]`, where `option` is the option with the same effect, or `None`.

    Raises:
        InputError: If a supported field has a wrong type, or an id is out of the vocabulary.
    """
    rules = {}
    asks = {}

    def ids(name, value):
        id_list = value if isinstance(value, list) else [value]
        if not all(type(token_id) is int and 0 <= token_id < vocab_size for token_id in id_list):
            raise InputError(
                f"{path}: `{name}` must have ids in the vocabulary of {vocab_size} entries, got "
                f"{short_repr(value)}."
            )
        return id_list

    for name, value in fields.items():
        if value is None or name in IGNORED_FIELDS:
            continue
        if name in _IDS:
            rules[_IDS[name]] = [*rules.get(_IDS[name], []), *ids(name, value)]
        elif name in _NUMBERS:
            if type(value) is not int or value < 0:
                raise InputError(
                    f"{path}: `{name}` must be an integer of at least 0, got {short_repr(value)}."
                )
            rules[name] = value
        elif name == "forced_bos_token_id" and has_source:
            rules["first_ids"] = ids(name, value)
        elif name == "bad_words_ids" and _are_single_tokens(value):
            end = fields.get("eos_token_id")
            ends = [] if end is None else ids("eos_token_id", end)
            other_words = [token_id for (token_id,) in value if [token_id] != ends]
            rules["suppressed_ids"] = rules.get("suppressed_ids", []) + ids(name, other_words)
        elif _changes_generation(name, value, fields):
            asks[name] = [value, _OPTIONS.get(name, (None,))[0]]
    return {**rules, **({"asks": [str(path), asks]} if asks else {})}


def rules_to_fields(rules: Mapping) -> dict:
    """Return the fields of `generation_config.json` for rules. The inverse of `parse_rules`."""
    field_names = {option: name for name, option in _IDS.items()}
    _, asks = rules.get("asks", ("", {}))
    fields = {
        field_names.get(option, option): value
        for option, value in rules.items()
        if option != "asks"
    }
    if first := fields.pop("first_ids", None):
        fields["forced_bos_token_id"] = first[0] if len(first) == 1 else first
    return {**fields, **{name: value for name, (value, _) in asks.items()}}


def end_ids(network, tokenizer: object) -> list[int]:
    """Return the ids that end a text, without duplicates.

    They come from the tokenizer's `stop_ids`, the network's generation rules and its
    `end_id`, in this order.
    """
    rules = getattr(network, "generation_rules", {}).get("stop_ids", ())
    ids = dict.fromkeys([*getattr(tokenizer, "stop_ids", ()), *rules, network.end_id])
    return [token_id for token_id in ids if token_id is not None]


def _are_single_tokens(words):
    """Return whether `words` is a list of lists with one token each."""
    return isinstance(words, list) and all(isinstance(x, list) and len(x) == 1 for x in words)


def _changes_generation(name, value, fields):
    """Return whether an unsupported field has a value that would change the generation."""
    if name in _SAMPLING and not fields.get("do_sample"):
        return False
    if name in _BEAMS and fields.get("num_beams", 1) in (None, 1):
        return False
    neutral = _OPTIONS[name][1:] if name in _OPTIONS else (False, _NEUTRAL.get(name, 0))
    return value not in (*neutral, [], {})


def resolve_options(network, explicit: Mapping, num_before: int) -> GenerationOptions:
    """Merge the options of a `generate` call with the network's generation rules.

    Explicit options take precedence. The first call warns about the unsupported fields of
    the network's `generation_config.json` that no option replaces.

    Args:
        network: Network, possibly with `generation_rules`.
        explicit: Dict of the explicit options.
        num_before: Integer. Number of tokens before each result.

    Returns:
        A `GenerationOptions`.

    Raises:
        TypeError: If an option is unknown.
        ValueError: If an option is out of range.
    """
    rules = dict(network.generation_rules)
    path, asks = rules.pop("asks", ("", {}))
    min_new_tokens = max(rules.pop("min_length", 0) - num_before, rules.get("min_new_tokens", 0), 0)
    explicit = {name: x for name, x in explicit.items() if x is not None or name != "stop_ids"}
    ignored = {name: (x, option) for name, (x, option) in asks.items() if option not in explicit}
    if ignored and not network.has_warned_rules:
        network.has_warned_rules = True
        message = ", ".join(f"{name}={short_repr(x)}" for name, (x, _) in ignored.items())
        replacements = [option for _, option in ignored.values() if option is not None]
        hint = (
            f" Pass {', '.join(dict.fromkeys(replacements))} to `generate`." if replacements else ""
        )
        warnings.warn(f"{path}: `generate` ignores {message}.{hint}", stacklevel=3)
    return GenerationOptions.from_options(**{**rules, "min_new_tokens": min_new_tokens, **explicit})
