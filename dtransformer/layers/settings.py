"""Settings of layers after they are made: rules, recompute, low-rank additions, origin.

Configs keep it, so that `from_config` and `.keras` files do. And a `MoEConfig` as layers take it.
"""

import dataclasses

import keras

from dtransformer import _compat
from dtransformer.parallel.config.config import (
    MoEConfig,
    TransformerRecomputeConfig,
    get_parallel_config,
)
from dtransformer.parallel.recompute.recompute import as_recompute_config

KEY = "settings"
_of_factors = lambda asked: {name: dict(one) for name, one in asked.items()}
# A setting in configs -> the attribute that has it, and functions that return it for a file, and of one.
_SETTINGS = {
    "rules": ("_own_rules", dict, dict),
    "low_rank": ("low_rank", _of_factors, _of_factors),
    "origin": ("origin", list, tuple),
    "generation": ("generation_rules", dict, dict),
}


def as_config(arguments: dict) -> dict:
    """Return a layer's arguments as a config has them.

    An activation's class is a layer of it, and a `MoEConfig` a dict.
    """
    found, kind = dict(arguments), arguments.get("hidden_act")
    if isinstance(kind, type):
        found["hidden_act"] = keras.saving.serialize_keras_object(kind())
    if "moe_config" in found:
        found["moe_config"] = moe_as_dict(found["moe_config"])
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
        TypeError: it is neither, or a field is unknown or of the wrong type.
        ValueError: a field has a value that is not allowed.
    """
    if isinstance(value, dict):
        return MoEConfig(**value)
    if not isinstance(value, MoEConfig):
        raise TypeError(f"moe_config must be a MoEConfig, got {value!r} ({type(value).__name__})")
    return dataclasses.replace(value)


def moe_as_dict(value: MoEConfig | dict | None) -> dict | None:
    """Return the fields of a `MoEConfig`, for a file; None for none."""
    return dataclasses.asdict(value) if isinstance(value, MoEConfig) else value
