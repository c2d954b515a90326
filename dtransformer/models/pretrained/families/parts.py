"""Two-way mappings between config keys of `transformers` and network arguments, as data."""

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any

from dtransformer.errors import InputError, shown
from dtransformer.models.base import first_given

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


class Part(typing.Protocol):
    """Mapping between some config keys and some network arguments.

    Attributes:
        arguments: Tuple of the names of the arguments.
    """

    arguments: tuple[str, ...]

    def from_hf(self, config: Mapping) -> dict:
        """Return network arguments from a config."""

    def to_hf(self, arguments: Mapping) -> dict:
        """Return config fields from network arguments. The inverse of `from_hf`."""


@dataclasses.dataclass(frozen=True)
class Field:
    """Mapping between one config key and one network argument.

    Args:
        argument: Name of the network argument.
        field: Config key of `transformers`.
        default: Value for a config without the key, or a function of the config that returns
            it. Without it, the key is required.
        to_argument, to_config: Functions from the config's value to the argument's value, and back.
        same: Tuple of names of other arguments with the same value.
        takes_null: Boolean. Whether null in a config is a value. Otherwise null means
            `default`.
        none_value: Function from the network's arguments to the meaning of an argument that
            is `None`. Defaults to null.
        also: Tuple of other config keys that must have the same value.
        needs_also: Boolean. Whether the keys in `also` are required.
    """

    argument: str
    field: str
    default: Any = _REQUIRED
    to_argument: Callable = lambda value: value
    to_config: Callable = lambda value: value
    same: tuple[str, ...] = ()
    takes_null: bool = False
    none_value: Callable[[Mapping], Any] = lambda arguments: None
    also: tuple[str, ...] = ()
    needs_also: bool = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments that the field sets."""
        return (self.argument, *self.same)

    def from_hf(self, config: Mapping) -> dict:
        """Return the arguments from a config; see `Part`. A missing key or null means `default`.

        Raises:
            InputError: If keys that must have equal values differ.
        """
        value = config[self.field] if self.default is _REQUIRED else config.get(self.field)
        is_present = value is not None or (self.takes_null and self.field in config)
        if not is_present and self.default is not _REQUIRED:
            value = self.default(config) if callable(self.default) else self.default
        for field in self.also:
            alias = config[field] if self.needs_also else first_given(config.get(field), value)
            if alias != value:
                raise InputError(
                    f"`{self.field}={shown(value)}` and `{field}={shown(alias)}` must be equal."
                )
        return dict.fromkeys(self.arguments, self.to_argument(value))

    def to_hf(self, arguments: Mapping) -> dict:
        """Return the config fields from network arguments; see `Part`.

        Raises:
            InputError: If arguments that must have equal values differ.
        """
        inputs = {name: arguments[name] for name in self.arguments}
        values = {
            name: self.to_config(self.none_value(arguments) if value is None else value)
            for name, value in inputs.items()
        }
        if len({*map(repr, values.values())}) > 1:
            raise InputError(
                f"The network has {values}, but the family stores them in one field, "
                f"`{self.field}`. Use equal values, or save the network as another family."
            )
        return dict.fromkeys((self.field, *self.also), values[self.argument])


def activation(name: str) -> str:
    """Return the Keras name of an activation in a published config.

    Raises:
        InputError: If the activation is unknown.
    """
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise InputError(
            f"The activation must be one of {', '.join(_ACTIVATIONS)}, got {shown(name)}."
        )
    return _ACTIVATIONS[name]


def published_activation(name: str) -> str:
    """Return the name of an activation in published configs.

    Raises:
        InputError: If `transformers` has no name for the activation.
    """
    config_names = {keras_name: name for name, keras_name in reversed(_ACTIVATIONS.items())}
    if name not in config_names:
        raise InputError(f"`hidden_act={name!r}` has no name in configs of `transformers`.")
    return config_names[name]


def hidden_act(field: str = "hidden_act", default: str = "silu", **means: str) -> Field:
    """Return the `Field` of the feed-forward activation.

    Args:
        field: Config key.
        default: Default activation of a config without the key.
        **means: Names in configs that stand for other activations.
    """

    def to_argument(name):
        return activation(means.get(name, name))

    return Field("hidden_act", field, default, to_argument, published_activation)


def differs(name: str, value: object, supported: object) -> InputError:
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


def choice(argument: str, field: str, default: Any, values: Mapping) -> Field:
    """Return a `Field` with a fixed set of values.

    Args:
        argument: Name of the network argument.
        field: Config key.
        default: Default value in configs.
        values: Dict from values in configs to values of the argument.
    """

    def to_argument(value):
        if value not in [*values]:
            raise InputError(f"`{field}` must be one of {[*values]}, got {shown(value)}.")
        return values[value]

    def to_config(value):
        names = [name for name, argument_value in values.items() if argument_value == value]
        if not names:
            raise differs(argument, repr(value), " or ".join(map(repr, values.values())))
        return names[0]

    return Field(argument, field, default, to_argument, to_config)


@dataclasses.dataclass(frozen=True)
class AfterPadding:
    """Mapping of learned positions that start after the padding id, as in RoBERTa.

    Args:
        length: Integer. Default number of positions.
        default: Integer. Default padding id. Without it, the key is required.
        counts: Boolean. Whether the length in configs includes the positions before the
            first used one.
    """

    length: int
    default: int | None = None
    counts: bool = False
    arguments: tuple[str, ...] = ("position_offset", "max_length")

    def from_hf(self, config: Mapping) -> dict:
        """Return the arguments from a config; see `Part`.

        Raises:
            InputError: If the config has no padding id.
        """
        pad_id = first_given(config.get("pad_token_id"), self.default)
        if pad_id is None:
            raise InputError("The field `pad_token_id` is missing. Positions start after it.")
        length = first_given(config.get("max_position_embeddings"), self.length)
        if self.counts:
            length -= pad_id + 1
        return {"position_offset": pad_id + 1, "max_length": length}

    def to_hf(self, arguments: Mapping) -> dict:
        """Return the config fields from network arguments; see `Part`.

        Raises:
            InputError: If the positions do not start after the padding id.
        """
        offset = arguments["position_offset"]
        pad_id = arguments["pad_id"]
        if pad_id is None or offset != pad_id + 1:
            raise differs("position_offset", offset, "pad_id + 1" if pad_id is None else pad_id + 1)
        length = arguments["max_length"]
        return {"max_position_embeddings": length + offset if self.counts else length}


def reciprocal(value: float) -> float:
    """Return 1 / value."""
    return 1 / value


def epsilon(
    default: float,
    field: str = "rms_norm_eps",
    same: tuple[str, ...] = (),
    none_value: float = 1e-6,
) -> Field:
    """Return the `Field` of the constant that norms add to the variance.

    Args:
        default: Default of a config without the key.
        field: Config key.
        same: Other arguments that the key sets, such as `qk_norm_epsilon`.
        none_value: Value that `None` means in a network.
    """

    def to_config(value):
        return first_given(value, none_value)

    return Field("norm_epsilon", field, default, to_config=to_config, same=same)


HEADS = Field("num_heads", "num_attention_heads")
TIED = Field("tied_head", "tie_word_embeddings", True)


def _default_if_missing(field, default, null_value):
    """Return the `Field.default` of a key with different meanings if missing and if null.

    A missing key means `default`, if it is set, otherwise the same as null: `null_value(config)`.
    """
    return lambda config: default if default and field not in config else null_value(config)


def kv_heads(default: int | None = None) -> Field:
    """Return the `Field` of the number of key and value heads.

    A missing key means `default`, by default the number of query heads. Null means the latter.
    """
    return Field(
        "num_kv_heads",
        "num_key_value_heads",
        _default_if_missing(
            "num_key_value_heads", default, lambda config: config["num_attention_heads"]
        ),
        none_value=lambda arguments: arguments["num_heads"],
    )


def head_dim(default: int | None = None) -> Field:
    """Return the `Field` of the head size. A missing key means `default`, by default h / n."""
    return Field(
        "head_dim",
        "head_dim",
        _default_if_missing(
            "head_dim", default, lambda x: x["hidden_size"] // x["num_attention_heads"]
        ),
        none_value=lambda arguments: arguments["hidden_size"] // arguments["num_heads"],
    )


def query_scale(field: str, default: float, is_square: bool = False) -> Field:
    """Return the `Field` of the factor of queries. `None` means 1/√d in a network.

    Args:
        field: Config key.
        default: Default of a config without the key.
        is_square: Boolean. Whether the config contains an integer n that stands for 1/√n.
    """

    def default_scale(arguments):
        size = arguments["head_dim"] or arguments["hidden_size"] // arguments["num_heads"]
        return size**-0.5

    def to_integer(scale):
        n = round(scale**-2)
        if not math.isclose(n**-0.5, scale, rel_tol=1e-6):
            raise InputError(
                f"`query_scale={scale}` must be 1/√n for an integer n, which `{field}` stores."
            )
        return n

    if not is_square:
        return Field("query_scale", field, default, none_value=default_scale)
    return Field(
        "query_scale", field, default, lambda n: n**-0.5, to_integer, none_value=default_scale
    )
