"""Arguments of layers and models are what their type hints say, and in the ranges of their names.

Settings of a layer after it is made, rules, recompute, low-rank additions, origin and names of labels,
are kept by configs, so that `from_config` and `.keras` files have them.
"""

import dataclasses
import functools
import inspect
import math
import numbers
import typing
from collections.abc import Callable

import keras

from dtransformer import _compat
from dtransformer.parallel.config.config import (
    MoEConfig,
    TransformerRecomputeConfig,
    get_parallel_config,
)
from dtransformer.parallel.recompute.recompute import as_recompute_config

_SIMPLE = {bool: "a bool", int: "an int", float: "a number", str: "a str", type(None): "None"}
_COMPUTE_TYPES = "float16", "bfloat16", "float32", "float64"


def given_arguments(names: dict) -> dict:
    """Return the arguments of an `__init__`, for the config: of its `locals()` at its beginning.

    `name` and others that Keras takes are left out.
    """
    return {
        key: value
        for key, value in names.items()
        if key not in ("self", "__class__", "name", "kwargs")
    }


def checked(init: Callable) -> Callable:
    """Return an `__init__` that checks the arguments whose hints are bool, int, float or str.

    A bool is no int, and what is no bool has no truth. `num_layers` is not less than 0, an
    `epsilon` more than 0, and a `..._compute_type` is the name of a floating type.

    Raises:
        TypeError: an argument is of another type.
        ValueError: it is out of its range.
    """
    signature = inspect.signature(init)
    kinds = {name: _kinds(p.annotation) for name, p in signature.parameters.items()}
    kinds = {name: found for name, found in kinds.items() if found}

    @functools.wraps(init)
    def with_checks(self, *args, **kwargs):
        given = signature.bind_partial(self, *args, **kwargs).arguments if kinds else {}
        for name in given.keys() & kinds.keys():
            check_argument(name, given[name], kinds[name])
        return init(self, *args, **kwargs)

    with_checks.__signature__ = signature  # which Keras reads, to serialize
    return with_checks


def check_argument(name: str, value: object, kinds: tuple[type, ...]) -> None:
    """Check one argument; see `checked`."""
    if not any(_is(value, kind) for kind in kinds):
        wanted = " or ".join(_SIMPLE[kind] for kind in kinds)
        raise TypeError(f"{name} must be {wanted}, got {value!r} ({type(value).__name__})")
    if name == "num_layers" and value < 0:
        raise ValueError(f"{name} must not be less than 0, got {value}")
    if name == "epsilon" and value is not None and not 0 < value < math.inf:
        raise ValueError(f"{name} must be a number of more than 0, got {value}")
    if name.endswith("_compute_type") and value not in _COMPUTE_TYPES:
        raise ValueError(f"{name} must be one of {', '.join(_COMPUTE_TYPES)}, got {value!r}")


def check_floating(name: str, x: typing.Any) -> None:
    """Check that a tensor of a layer's call has floats.

    Raises:
        TypeError: it has not; names the argument.
    """
    if not x.dtype.is_floating:
        raise TypeError(f"{name} must be of a floating type, got {x.dtype.name}")


def _kinds(annotation):
    """Return the types that a hint allows, if all are simple; else ()."""
    kinds = typing.get_args(annotation) or (annotation,)
    return kinds if all(kind in _SIMPLE for kind in kinds) else ()


def _is(value, kind):
    if kind is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return isinstance(value, kind)


KEY = "settings"
_of_factors = lambda asked: {name: dict(one) for name, one in asked.items()}
# A setting in configs -> the attribute that has it, and functions that return it for a file, and of one.
_SETTINGS = {
    "rules": ("_own_rules", dict, dict),
    "low_rank": ("low_rank", _of_factors, _of_factors),
    "origin": ("origin", list, tuple),
    "generation": ("generation_rules", dict, dict),
    "labels": ("label_names", list, tuple),
    "problem": ("problem_type", str, str),
}


def as_config(arguments: dict) -> dict:
    """Return a layer's arguments as a config has them.

    An activation's class is a layer of it, and a `MoEConfig` a dict.
    """
    found, kind = dict(arguments), arguments.get("hidden_act")
    if isinstance(kind, type):
        found["hidden_act"] = keras.saving.serialize_keras_object(kind())
    if isinstance(moe := found.get("moe_config"), MoEConfig):
        found["moe_config"] = dataclasses.asdict(moe)
    return found


def settings_of(layer: keras.layers.Layer) -> dict:
    """Return what was set on a layer and those inside of it, for its config; {} for nothing.

    Returns:
        `{KEY: {number of the layer inside: {"rules": ..., "recompute": ..., "low_rank": ...}}}`.
    """
    found, usual = {}, as_recompute_config(get_parallel_config().recompute)
    for number, inner in enumerate(_compat.flat_layers(layer)):
        own = {}
        recompute = getattr(inner, "recompute_config", None)
        if recompute is not None and recompute != usual:
            own["recompute"] = {**dataclasses.asdict(recompute), "select": list(recompute.select)}
        for name, (attribute, to_file, _) in _SETTINGS.items():
            if value := getattr(inner, attribute, None):
                own[name] = to_file(value)
        if own:
            found[str(number)] = own
    return {KEY: found} if found else {}


def set_on(layer: keras.layers.Layer, settings: dict | None) -> None:
    """Set on a new layer what `settings_of` told of another of its class."""
    layers = _compat.flat_layers(layer)
    for number, own in (settings or {}).items():
        inner = layers[int(number)]
        if "recompute" in own:
            fields = {**own["recompute"], "select": tuple(own["recompute"]["select"])}
            inner.recompute(TransformerRecomputeConfig(**fields))
        for name in own.keys() & _SETTINGS.keys():
            attribute, _, of_file = _SETTINGS[name]
            setattr(inner, attribute, of_file(own[name]))


class KeepsSettings:
    """A mixin of Keras layers and models, whose `get_config` adds `settings_of` them."""

    @classmethod
    def from_config(cls, config: dict):
        """Return the layer of a config; what was set on the one that it is of is set."""
        config = dict(config)
        settings = config.pop(KEY, None)
        if isinstance(config.get("lambda_func"), dict):  # from a file
            place = keras.saving.deserialize_keras_object(config["lambda_func"])
            config["lambda_func"] = place
        layer = super().from_config(config)
        set_on(layer, settings)
        return layer


def as_moe_config(value: MoEConfig | dict) -> MoEConfig:
    """Return a copy of a `MoEConfig`, or one of a dict of its fields.

    Raises:
        TypeError: it is neither, or a field is unknown.
        ValueError: a field has a value that is not allowed.
    """
    if isinstance(value, dict):
        return MoEConfig(**value)
    if not isinstance(value, MoEConfig):
        raise TypeError(f"moe_config must be a MoEConfig, got {value!r} ({type(value).__name__})")
    return dataclasses.replace(value)
