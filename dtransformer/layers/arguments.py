"""Validation of layer arguments by type hint and name, and layer settings in configs.

Settings made after construction are part of the config, so `from_config` and `.keras` files restore
them: sharding rules, recompute, low-rank adapters, formats of quantized kernels, the origin of the
weights, generation options and label names.
"""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterable

import keras

from dtransformer import _compat
from dtransformer.errors import check_argument, hint_types
from dtransformer.parallel.config.config import (
    MoEConfig,
    TransformerRecomputeConfig,
    get_parallel_config,
)
from dtransformer.parallel.recompute.recompute import as_recompute_config


def get_init_arguments(names: dict) -> dict:
    """Return the arguments of an `__init__` from its `locals()`, for the layer's config.

    Call it in the first line of `__init__`. `self`, `name` and `kwargs` are excluded.
    """
    return {
        key: value
        for key, value in names.items()
        if key not in ("self", "__class__", "name", "kwargs")
    }


def pop_arguments(arguments: dict, names: Iterable[str]) -> dict:
    """Remove the arguments with these names from a dictionary, and return them."""
    return {name: arguments.pop(name) for name in names if name in arguments}


def validate_arguments(init: Callable) -> Callable:
    """Return an `__init__` that validates arguments annotated as bool, int, float, str or `None`.

    A bool is not accepted as a number, nor a number as a bool. `num_layers` must be at least 0,
    `epsilon` positive and finite, and `..._compute_type` the name of a floating-point type.

    Args:
        init: The `__init__` to wrap. Its signature is preserved.

    Returns:
        The wrapped function. It raises `TypeError` for a wrong type and `ValueError` for a value
        out of range.
    """
    signature = inspect.signature(init)
    kinds = {name: hint_types(p.annotation) for name, p in signature.parameters.items()}
    kinds = {name: types for name, types in kinds.items() if types}

    @functools.wraps(init)
    def with_checks(self, *args, **kwargs):
        bound = signature.bind_partial(self, *args, **kwargs).arguments if kinds else {}
        for name in bound.keys() & kinds.keys():
            check_argument(name, bound[name], kinds[name])
        return init(self, *args, **kwargs)

    with_checks.__signature__ = signature  # Keras reads the signature to serialize layers.
    return with_checks


def check_floating(name: str, x: typing.Any) -> None:
    """Check that a tensor has a floating-point type.

    Raises:
        TypeError: If it has another type.
    """
    if not x.dtype.is_floating:
        raise TypeError(f"`{name}` must have a floating-point type, got {x.dtype.name}.")


KEY = "settings"


def _copy_adapters(adapters):
    return {name: dict(options) for name, options in adapters.items()}


# Key in a config -> attribute of the layer, conversion to the config, conversion from the config.
_SETTINGS = {
    "recomputes_call": ("recomputes_call", bool, bool),
    "rules": ("_sharding_rules", dict, dict),
    "low_rank": ("low_rank", _copy_adapters, _copy_adapters),
    "quantized": ("quantized", dict, dict),
    "origin": ("origin", list, tuple),
    "generation": ("generation_rules", dict, dict),
    "labels": ("label_names", list, tuple),
    "problem": ("problem_type", str, str),
}


def serialize_arguments(arguments: dict) -> dict:
    """Return a layer's arguments in a form that Keras can serialize.

    An activation class becomes the config of an instance. Dataclasses, such as a `MoEConfig` or a
    `Rotary`, become dictionaries.
    """
    config = dict(arguments)
    activation = arguments.get("hidden_act")
    if isinstance(activation, type):
        config["hidden_act"] = keras.saving.serialize_keras_object(activation())
    for name, value in arguments.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            config[name] = dataclasses.asdict(value)
    return config


def get_settings(layer: keras.layers.Layer) -> dict:
    """Return the settings of a layer and its inner layers for the config.

    Recompute is included only if it differs from the parallel config's default.

    Returns:
        `{KEY: {index of the inner layer, as a string: {"rules": ..., "recompute": ..., ...}}}`, or
        `{}` if nothing was set.
    """
    settings = {}
    default = as_recompute_config(get_parallel_config().recompute)
    for index, inner in enumerate(_compat.flat_layers(layer)):
        layer_settings = {}
        recompute = getattr(inner, "recompute_config", None)
        if recompute is not None and recompute != default:
            layer_settings["recompute"] = {
                **dataclasses.asdict(recompute),
                "select": list(recompute.select),
            }
        for name, (attribute, to_config, _) in _SETTINGS.items():
            if value := getattr(inner, attribute, None):
                layer_settings[name] = to_config(value)
        if layer_settings:
            settings[str(index)] = layer_settings
    return {KEY: settings} if settings else {}


def apply_settings(layer: keras.layers.Layer, settings: dict | None) -> None:
    """Apply settings from `get_settings` to a layer of the same structure.

    Args:
        layer: The new layer.
        settings: The dictionary under `KEY` in the config, or `None`.
    """
    layers = _compat.flat_layers(layer)
    for index, layer_settings in (settings or {}).items():
        inner = layers[int(index)]
        if "recompute" in layer_settings:
            fields = {
                **layer_settings["recompute"],
                "select": tuple(layer_settings["recompute"]["select"]),
            }
            inner.recompute(TransformerRecomputeConfig(**fields))
        for name in layer_settings.keys() & _SETTINGS.keys():
            attribute, _, from_config = _SETTINGS[name]
            setattr(inner, attribute, from_config(layer_settings[name]))


class SettingsMixin:
    """Mixin of Keras layers and models that restores settings from a config."""

    @classmethod
    def from_config(cls, config: dict):
        """Return a layer with the config's arguments and settings."""
        config = dict(config)
        settings = config.pop(KEY, None)
        # A `.keras` file stores a function as a dictionary.
        if isinstance(config.get("lambda_func"), dict):
            place = keras.saving.deserialize_keras_object(config["lambda_func"])
            config["lambda_func"] = place
        layer = super().from_config(config)
        apply_settings(layer, settings)
        return layer


def as_moe_config(value: MoEConfig | dict) -> MoEConfig:
    """Return a copy of a `MoEConfig`, or build one from a dictionary of its fields.

    Raises:
        TypeError: If the value has another type or a field is unknown.
        ValueError: If a field is out of range.
    """
    if isinstance(value, dict):
        return MoEConfig(**value)
    if not isinstance(value, MoEConfig):
        raise TypeError(
            f"`moe_config` must be a MoEConfig, got {value!r} ({type(value).__name__})."
        )
    return dataclasses.replace(value)
