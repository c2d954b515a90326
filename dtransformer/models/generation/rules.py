"""Generation settings of published weights, from `generation_config.json`."""

import os
import warnings
from collections.abc import Mapping

from dtransformer.errors import InputError, shown
from dtransformer.models.generation.options import GenerationOptions
from dtransformer.models.published_fields import FIELDS

_FIELDS = FIELDS["generation"]
SILENT, _IDS, _NUMBERS = set(_FIELDS["silent"]), _FIELDS["ids"], _FIELDS["numbers"]
TAKEN = {*_IDS, *_NUMBERS, *_FIELDS["also_taken"]}
_DRAWING, _BEAMS, _NEUTRAL = _FIELDS["drawing"], _FIELDS["beams"], _FIELDS["neutral"]
_OPTIONS = {**_FIELDS["others"], **_DRAWING, **_BEAMS}
NAMED = {*_OPTIONS, *_NEUTRAL}


def rules_of(fields: Mapping, path: os.PathLike, has_source: bool, vocab_size: int) -> dict:
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
    rules, asks = {}, {}

    def ids(name, value):
        found = value if isinstance(value, list) else [value]
        if not all(type(one) is int and 0 <= one < vocab_size for one in found):
            raise InputError(
                f"{path}: `{name}` must have ids in the vocabulary of {vocab_size} entries, got "
                f"{shown(value)}."
            )
        return found

    for name, value in fields.items():
        if value is None or name in SILENT:
            continue
        if name in _IDS:
            rules[_IDS[name]] = [*rules.get(_IDS[name], []), *ids(name, value)]
        elif name in _NUMBERS:
            if type(value) is not int or value < 0:
                raise InputError(
                    f"{path}: `{name}` must be an integer of at least 0, got {shown(value)}."
                )
            rules[name] = value
        elif name == "forced_bos_token_id" and has_source:
            rules["first_ids"] = ids(name, value)
        elif name == "bad_words_ids" and _are_single(value):
            end = fields.get("eos_token_id")
            ends = [] if end is None else ids("eos_token_id", end)
            own = [one for (one,) in value if [one] != ends]
            rules["suppressed_ids"] = rules.get("suppressed_ids", []) + ids(name, own)
        elif _asks(name, value, fields):
            asks[name] = [value, _OPTIONS.get(name, (None,))[0]]
    return {**rules, **({"asks": [str(path), asks]} if asks else {})}


def fields_of(rules: Mapping) -> dict:
    """Return the fields of `generation_config.json` for rules. The inverse of `rules_of`."""
    names = {own: name for name, own in _IDS.items()}
    _, asks = rules.get("asks", ("", {}))
    found = {names.get(own, own): value for own, value in rules.items() if own != "asks"}
    if first := found.pop("first_ids", None):
        found["forced_bos_token_id"] = first[0] if len(first) == 1 else first
    return {**found, **{name: value for name, (value, _) in asks.items()}}


def end_ids(network, tokenizer: object) -> list[int]:
    """Return the ids that end a text, without duplicates.

    They come from the tokenizer's `stop_ids`, the network's generation rules and its
    `end_id`, in this order.
    """
    rules = getattr(network, "generation_rules", {}).get("stop_ids", ())
    ids = dict.fromkeys([*getattr(tokenizer, "stop_ids", ()), *rules, network.end_id])
    return [token_id for token_id in ids if token_id is not None]


def _are_single(words):
    """Return whether `words` is a list of lists with one token each."""
    return isinstance(words, list) and all(isinstance(x, list) and len(x) == 1 for x in words)


def _asks(name, value, fields):
    """Return whether an unsupported field has a value that would change the generation."""
    if name in _DRAWING and not fields.get("do_sample"):
        return False
    if name in _BEAMS and fields.get("num_beams", 1) in (None, 1):
        return False
    neutral = _OPTIONS[name][1:] if name in _OPTIONS else (False, _NEUTRAL.get(name, 0))
    return value not in (*neutral, [], {})


def options_of(network, given: Mapping, before: int) -> GenerationOptions:
    """Merge the options of a `generate` call with the network's generation rules.

    Explicit options take precedence. The first call warns about the unsupported fields of
    the network's `generation_config.json` that no option replaces.

    Args:
        network: Network, possibly with `generation_rules`.
        given: Dict of the explicit options.
        before: Integer. Number of tokens before each result.

    Returns:
        A `GenerationOptions`.

    Raises:
        TypeError: If an option is unknown.
        ValueError: If an option is out of range.
    """
    rules = dict(network.generation_rules)
    path, asks = rules.pop("asks", ("", {}))
    least = max(rules.pop("min_length", 0) - before, rules.get("min_new_tokens", 0), 0)
    given = {name: x for name, x in given.items() if x is not None or name != "stop_ids"}
    open_ = {name: (x, own) for name, (x, own) in asks.items() if own not in given}
    if open_ and not network.has_told_rules:
        network.has_told_rules = True
        message = ", ".join(f"{name}={shown(x)}" for name, (x, _) in open_.items())
        own = [option for _, option in open_.values() if option is not None]
        hint = f" Pass {', '.join(dict.fromkeys(own))} to `generate`." if own else ""
        warnings.warn(f"{path}: `generate` ignores {message}.{hint}", stacklevel=3)
    return GenerationOptions.of(**{**rules, "min_new_tokens": least, **given})
