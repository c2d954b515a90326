"""The rules of generation that come with published weights: `generation_config.json`, by field."""

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
    """Return what a network's `generate` does by itself, and what its file asks for besides.

    Args:
        fields: those of `generation_config.json`.
        path: where they come from, for messages.
        has_source: whether the network is an encoder–decoder.
        vocab_size: number of ids.

    Returns:
        A dict of options of `GenerationOptions`, of `"min_length"`, with what comes before results,
        and of `"asks"`: a text, and by field what is not taken and the option that does it, or None.

    Raises:
        InputError: a field that is taken has another type, or an id is outside of the vocabulary.
    """
    rules, asks = {}, {}

    def ids(name, value):
        found = value if isinstance(value, list) else [value]
        if not all(type(one) is int and 0 <= one < vocab_size for one in found):
            raise InputError(
                f"{path}: {name} is {shown(value)}, expected ids of the vocabulary of {vocab_size}"
            )
        return found

    for name, value in fields.items():
        if value is None or name in SILENT:
            continue
        if name in _IDS:
            rules[_IDS[name]] = [*rules.get(_IDS[name], []), *ids(name, value)]
        elif name in _NUMBERS:
            if type(value) is not int or value < 0:
                raise InputError(f"{path}: {name} is {shown(value)}, expected an int of 0 or more")
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
    """Return the fields of `generation_config.json` that say rules: the opposite of `rules_of`."""
    names = {own: name for name, own in _IDS.items()}
    _, asks = rules.get("asks", ("", {}))
    found = {names.get(own, own): value for own, value in rules.items() if own != "asks"}
    if first := found.pop("first_ids", None):
        found["forced_bos_token_id"] = first[0] if len(first) == 1 else first
    return {**found, **{name: value for name, (value, _) in asks.items()}}


def end_ids(network, tokenizer: object) -> list[int]:
    """Return all known ids that end a text: the tokenizer's and the network's, without repetitions."""
    rules = getattr(network, "generation_rules", {}).get("stop_ids", ())
    ids = dict.fromkeys([*getattr(tokenizer, "stop_ids", ()), *rules, network.end_id])
    return [token_id for token_id in ids if token_id is not None]


def _are_single(words):
    """Return whether words that are not to come are single tokens, as a list of lists has them."""
    return isinstance(words, list) and all(isinstance(x, list) and len(x) == 1 for x in words)


def _asks(name, value, fields):
    """Return whether a field that is not taken asks for something."""
    if name in _DRAWING and not fields.get("do_sample"):
        return False
    if name in _BEAMS and fields.get("num_beams", 1) in (None, 1):
        return False
    neutral = _OPTIONS[name][1:] if name in _OPTIONS else (False, _NEUTRAL.get(name, 0))
    return value not in (*neutral, [], {})


def options_of(network, given: Mapping, before: int) -> GenerationOptions:
    """Return the options of a `generate`: those that are given, and the rules of the network.

    A warning names, once, what the network's file asks for and nobody does.

    Args:
        network: a network, which may have `generation_rules`.
        given: options by their names.
        before: number of tokens before each result.

    Raises:
        TypeError: there is no such option.
        ValueError: an option is out of range.
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
        hint = f"; {', '.join(dict.fromkeys(own))} can be given to generate" if own else ""
        warnings.warn(f"{path}: not taken by itself are {message}{hint}", stacklevel=3)
    return GenerationOptions.of(**{**rules, "min_new_tokens": least, **given})
