"""Rows of a family's table of config keys."""

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any

from dtransformer.errors import InputError, short_repr
from dtransformer.models.base import value_or_default

_REQUIRED = object()
# Names of activations in configs of `transformers` -> names here.
_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
}


class Row(typing.Protocol):
    """Row of a table of config keys: a mapping between config keys and network arguments.

    Attributes:
        arguments: Tuple of the names of the arguments.
    """

    arguments: tuple[str, ...]

    def from_hf(self, config: Mapping) -> dict:
        """Return network arguments from a config."""

    def to_hf(self, arguments: Mapping) -> dict:
        """Return config keys from network arguments. The inverse of `from_hf`."""


@dataclasses.dataclass(frozen=True)
class Key:
    """Row for one config key and one network argument.

    Args:
        key: Config key of `transformers`.
        argument: Name of the network argument.
        default: Value for a config without the key, or a function of the config that returns
            it. Without it, the key is required.
        to_argument, to_config: Functions from the config's value to the argument's value, and back.
        same: Tuple of names of other arguments with the same value.
        takes_null: Boolean. Whether null in a config is a value. Otherwise null means
            `default`.
        unset: Value in configs of an argument that is `None`, or a function of the network's
            arguments that returns it. Defaults to null.
        older: Optional name of the key in older configs.
        equal_keys: Tuple of other config keys that must have the same value.
        needs_equal_keys: Boolean. Whether `equal_keys` are required.
    """

    key: str
    argument: str
    default: Any = _REQUIRED
    to_argument: Callable = lambda value: value
    to_config: Callable = lambda value: value
    same: tuple[str, ...] = ()
    takes_null: bool = False
    unset: Any = None
    older: str | None = None
    equal_keys: tuple[str, ...] = ()
    needs_equal_keys: bool = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments that the row sets."""
        return (self.argument, *self.same)

    def from_hf(self, config: Mapping) -> dict:
        """Return the arguments from a config; see `Row`. A missing key or null means `default`.

        Raises:
            InputError: If keys that must have equal values differ.
        """
        is_required = self.default is _REQUIRED
        value = config[self.key] if is_required else config.get(self.key)
        if value is None and self.older is not None:
            value = config.get(self.older)
        is_null = self.takes_null and self.key in config
        if value is None and not is_required and not is_null:
            value = self.default(config) if callable(self.default) else self.default
        for key in self.equal_keys:
            default = (
                config[key] if self.needs_equal_keys else value_or_default(config.get(key), value)
            )
            if default != value:
                raise InputError(
                    f"`{self.key}={short_repr(value)}` and `{key}={short_repr(default)}` must be equal."
                )
        return dict.fromkeys(self.arguments, self.to_argument(value))

    def to_hf(self, arguments: Mapping) -> dict:
        """Return the config keys from network arguments; see `Row`.

        Raises:
            InputError: If arguments that must have equal values differ.
        """
        values = {name: self._config_value(arguments, name) for name in self.arguments}
        if len({*map(repr, values.values())}) > 1:
            raise InputError(
                f"The network has {values}, but the family stores them in one field, "
                f"`{self.key}`. Use equal values, or save the network as another family."
            )
        return dict.fromkeys((self.key, *self.equal_keys), values[self.argument])

    def _config_value(self, arguments, name):
        value = arguments[name]
        if value is None:
            value = self.unset(arguments) if callable(self.unset) else self.unset
        return self.to_config(value)


def replace_rows(rows: tuple[Row, ...], *changes: Row, without: tuple = ()) -> tuple[Row, ...]:
    """Return a table with changed rows.

    Args:
        rows: Tuple of rows.
        *changes: Rows that replace all rows with the same arguments.
        without: Names of arguments whose rows are removed.
    """
    replaced = {*without, *(name for row in changes for name in row.arguments)}
    return (*(row for row in rows if not replaced & {*row.arguments}), *changes)


def activation(name: str) -> str:
    """Return the Keras name of an activation in a published config.

    Raises:
        InputError: If the activation is unknown.
    """
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise InputError(
            f"The activation must be one of {', '.join(_ACTIVATIONS)}, got {short_repr(name)}."
        )
    return _ACTIVATIONS[name]


def hf_activation(name: str) -> str:
    """Return the name of an activation in published configs.

    Raises:
        InputError: If `transformers` has no name for the activation.
    """
    config_names = {keras_name: name for name, keras_name in reversed(_ACTIVATIONS.items())}
    if name not in config_names:
        raise InputError(f"`hidden_act={name!r}` has no name in configs of `transformers`.")
    return config_names[name]


def hidden_act(key: str = "hidden_act", default: str = "silu", **meanings: str) -> Key:
    """Return the row of the feed-forward activation.

    Args:
        key: Config key.
        default: Default activation of a config without the key.
        **meanings: Names in configs that mean other activations.
    """

    def to_argument(name):
        return activation(meanings.get(name, name))

    return Key(key, "hidden_act", default, to_argument, hf_activation)


def unsupported_argument(name: str, value: object, supported: object) -> InputError:
    """Return the error for a network that the configs of a family cannot represent.

    Args:
        name: Name of the argument.
        value: Value in the network, or a set or list of values.
        supported: Value that the family supports.
    """
    value = ", ".join(map(str, value)) if isinstance(value, set | list) else value
    return InputError(
        f"The network has `{name}={value}`, but the family needs `{name}={supported}`. Create it with "
        "this value, or save it as another family."
    )


def choice(key: str, argument: str, default: Any, values: Mapping) -> Key:
    """Return a row with a fixed set of values.

    Args:
        key: Config key.
        argument: Name of the network argument.
        default: Default value in configs.
        values: Dict from values in configs to values of the argument.
    """

    def to_argument(value):
        if value not in [*values]:
            raise InputError(f"`{key}` must be one of {[*values]}, got {short_repr(value)}.")
        return values[value]

    def to_config(value):
        names = [name for name, argument_value in values.items() if argument_value == value]
        if not names:
            supported = " or ".join(map(repr, values.values()))
            raise unsupported_argument(argument, repr(value), supported)
        return names[0]

    return Key(key, argument, default, to_argument, to_config)


@dataclasses.dataclass(frozen=True)
class PositionsAfterPadding:
    """Row of learned positions that start after the padding id, as in RoBERTa.

    Args:
        length: Integer. Default number of positions.
        default: Integer. Default padding id. Without it, the key is required.
        counts_padding: Boolean. Whether the length in configs includes the positions before
            the first used one.
    """

    length: int
    default: int | None = None
    counts_padding: bool = False
    arguments: tuple[str, ...] = ("position_offset", "max_length")

    def from_hf(self, config: Mapping) -> dict:
        """Return the arguments from a config; see `Row`.

        Raises:
            InputError: If the config has no padding id.
        """
        pad_id = value_or_default(config.get("pad_token_id"), self.default)
        if pad_id is None:
            raise InputError("The field `pad_token_id` is missing. Positions start after it.")
        length = value_or_default(config.get("max_position_embeddings"), self.length)
        if self.counts_padding:
            length -= pad_id + 1
        return {"position_offset": pad_id + 1, "max_length": length}

    def to_hf(self, arguments: Mapping) -> dict:
        """Return the config keys from network arguments; see `Row`.

        Raises:
            InputError: If the positions do not start after the padding id.
        """
        offset = arguments["position_offset"]
        pad_id = arguments["pad_id"]
        if pad_id is None or offset != pad_id + 1:
            expected = "pad_id + 1" if pad_id is None else pad_id + 1
            raise unsupported_argument("position_offset", offset, expected)
        length = arguments["max_length"]
        return {"max_position_embeddings": length + offset if self.counts_padding else length}


def reciprocal(value: float) -> float:
    """Return 1 / value."""
    return 1 / value


def epsilon(
    default: float,
    key: str = "rms_norm_eps",
    same: tuple[str, ...] = (),
    unset: float = 1e-6,
) -> Key:
    """Return the row of the constant that norms add to the variance.

    Args:
        default: Default of a config without the key.
        key: Config key.
        same: Other arguments that the key sets, such as `qk_norm_epsilon`.
        unset: Value that `None` means in a network.
    """
    return Key(key, "norm_epsilon", default, same=same, unset=unset)


def layer_norm_epsilon(default: float, key: str = "layer_norm_eps") -> Key:
    """Return the row of the constant that layer norms add to the variance."""
    return epsilon(default, key, unset=1e-5)


HEADS = Key("num_attention_heads", "num_heads")
TIED = Key("tie_word_embeddings", "tied_head", True)


def head_size(arguments: Mapping) -> int:
    """Return the size of a head of a network without `head_dim`."""
    return arguments["hidden_size"] // arguments["num_heads"]


def kv_heads(default: int | None = None) -> Key:
    """Return the row of the number of key and value heads.

    A missing key means `default`, by default the number of query heads. Null means the latter.
    """

    def number(config):
        if default and "num_key_value_heads" not in config:
            return default
        return config["num_attention_heads"]

    return Key(
        "num_key_value_heads",
        "num_kv_heads",
        number,
        unset=lambda arguments: arguments["num_heads"],
    )


def head_dim(default: int | None = None) -> Key:
    """Return the row of the head size. A missing key means `default`, by default h / n."""

    def size(config):
        if default and "head_dim" not in config:
            return default
        return config["hidden_size"] // config["num_attention_heads"]

    return Key("head_dim", "head_dim", size, unset=head_size)


def query_scale(key: str, default: float, is_square: bool = False) -> Key:
    """Return the row of the factor of queries. `None` means 1/√d in a network.

    Args:
        key: Config key.
        default: Default of a config without the key.
        is_square: Boolean. Whether the config contains an integer n that stands for 1/√n.
    """

    def default_scale(arguments):
        size = arguments["head_dim"] or head_size(arguments)
        return size**-0.5

    def to_integer(scale):
        n = round(scale**-2)
        if not math.isclose(n**-0.5, scale, rel_tol=1e-6):
            raise InputError(
                f"`query_scale={scale}` must be 1/√n for an integer n, which `{key}` stores."
            )
        return n

    if not is_square:
        return Key(key, "query_scale", default, unset=default_scale)
    return Key(key, "query_scale", default, lambda n: n**-0.5, to_integer, unset=default_scale)
