"""Rows of a family's table of config keys."""

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping, Sequence
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
    same: Sequence[str] = ()
    takes_null: bool = False
    unset: Any = None
    older: str | None = None
    equal_keys: Sequence[str] = ()
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


def activation_key(
    argument: str, key: str, default: str, meanings: Mapping[str, str] | None = None
) -> Key:
    """Return the row of the feed-forward activation.

    Args:
        argument: Name of the network argument.
        key: Config key.
        default: Default activation of a config without the key.
        meanings: Dict from names in configs to the names of other activations that they mean.
    """
    meanings = meanings or {}

    def to_argument(name):
        return activation(meanings.get(name, name))

    return Key(key, argument, default, to_argument, hf_activation)


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


def choice(argument: str, key: str, default: Any, values: Mapping) -> Key:
    """Return a row with a fixed set of values.

    Args:
        argument: Name of the network argument.
        key: Config key.
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


def parallel_residual(argument: str, default: bool, placement: str) -> Key:
    """Return the row of a switch between parallel and sequential sublayers.

    Args:
        argument: Name of the network argument.
        default: Boolean. Value of a missing key.
        placement: Placement of the norms of parallel sublayers.
    """

    def to_argument(value):
        return placement if value else None

    to_config = {placement: True, None: False, "pre": False}.get
    return Key("use_parallel_residual", argument, default, to_argument, to_config)


def reciprocal(argument: str, key: str, default: float) -> Key:
    """Return the row of an argument whose reciprocal is in the config."""

    def invert(value):
        return 1 / value

    return Key(key, argument, default, invert, invert)


def epsilon(argument: str, key: str, default: float, same: Sequence[str] = ()) -> Key:
    """Return the row of the constant that norms add to the variance.

    Args:
        argument: Name of the network argument.
        key: Config key.
        default: Default of a config without the key.
        same: Other arguments that the key sets, such as `qk_norm_epsilon`.
    """

    def default_epsilon(arguments):
        return 1e-5 if arguments["norm"].startswith("layer_norm") else 1e-6

    return Key(key, argument, default, same=same, unset=default_epsilon)


def four_times(argument: str, key: str, size_key: str = "hidden_size") -> Key:
    """Return the row of a size that is four times the hidden size by default.

    Args:
        argument: Name of the network argument.
        key: Config key.
        size_key: Config key of the hidden size.
    """
    return Key(
        key,
        argument,
        lambda config: 4 * config[size_key],
        unset=lambda arguments: 4 * arguments["hidden_size"],
    )


def equal_by_default(argument: str, key: str, other_key: str) -> Key:
    """Return the row of a config key that equals another key by default."""
    return Key(key, argument, lambda config: config[other_key])


def output_scale(argument: str, key: str) -> Key:
    """Return the row of T5's scaling of outputs. By default, networks with tied tables scale them."""
    return Key(key, argument, lambda config: config.get("tie_word_embeddings") is not False)


def head_size(arguments: Mapping) -> int:
    """Return the size of a head of a network without `head_dim`."""
    return arguments["hidden_size"] // arguments["num_heads"]


def kv_heads(argument: str, default: int | None = None) -> Key:
    """Return the row of the number of key and value heads.

    A missing key means `default`, by default the number of query heads. Null means the latter.
    """

    def number(config):
        if default and "num_key_value_heads" not in config:
            return default
        return config["num_attention_heads"]

    return Key(
        "num_key_value_heads",
        argument,
        number,
        unset=lambda arguments: arguments["num_heads"],
    )


def head_dim(argument: str, default: int | None = None) -> Key:
    """Return the row of the head size. A missing key means `default`, by default h / n."""

    def size(config):
        if default and "head_dim" not in config:
            return default
        return config["hidden_size"] // config["num_attention_heads"]

    return Key("head_dim", argument, size, unset=head_size)


def required_head_dim(argument: str, key: str) -> Key:
    """Return the row of the head size of configs that always contain it."""
    return Key(key, argument, unset=head_size)


def query_scale(argument: str, key: str, default: float, is_square: bool = False) -> Key:
    """Return the row of the factor of queries. `None` means 1/√d in a network.

    Args:
        argument: Name of the network argument.
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
        return Key(key, argument, default, unset=default_scale)
    return Key(key, argument, default, lambda n: n**-0.5, to_integer, unset=default_scale)


ROWS = {
    "activation": activation_key,
    "choice": choice,
    "epsilon": epsilon,
    "equal_by_default": equal_by_default,
    "four_times": four_times,
    "head_dim": head_dim,
    "kv_heads": kv_heads,
    "output_scale": output_scale,
    "parallel_residual": parallel_residual,
    "query_scale": query_scale,
    "reciprocal": reciprocal,
    "required_head_dim": required_head_dim,
}


def read_row(argument: str, options: Sequence | Mapping) -> Key:
    """Return the row of an entry of `keys` in `families.yaml`.

    Args:
        argument: Name of the network argument.
        options: A list `[key]` or `[key, default]`, or a dict of the arguments of `Key`, or of
            the function of `ROWS` that `row` selects.
    """
    if isinstance(options, list):
        key, *default = options
        return Key(key, argument, *default)
    options = dict(options)
    row = ROWS[options.pop("row")] if "row" in options else Key
    return row(argument=argument, **options)
