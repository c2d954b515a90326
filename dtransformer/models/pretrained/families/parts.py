"""Parts of published configs: which fields say which arguments of a network, both ways, as data."""

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any

from dtransformer.errors import InputError, shown
from dtransformer.models.base import first_given

_REQUIRED = object()
# Names of activations in published configs -> ours.
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
    """Some fields of a config, and the arguments that they say.

    Attributes:
        arguments: names of the arguments.
    """

    arguments: tuple[str, ...]

    def read(self, config: Mapping) -> dict:
        """Return the arguments of a config."""

    def written(self, arguments: Mapping) -> dict:
        """Return the fields of a network's arguments: the opposite of `read`."""


@dataclasses.dataclass(frozen=True)
class Field:
    """A field that says one argument.

    Args:
        argument: our name.
        field: theirs.
        usual: what a config means that does not say it, or a function of the config that returns it;
            an error by default.
        ours, theirs: functions of a value there, and here, that return the other one.
        same: names of arguments that have the same value.
        takes_null: whether null is a value of its own, and not the usual one.
        own: a function of a network's arguments that returns what None means there; null by default.
        also: names of fields that say the same, where they are there.
        needs_also: whether they have to be there.
    """

    argument: str
    field: str
    usual: Any = _REQUIRED
    ours: Callable = lambda value: value
    theirs: Callable = lambda value: value
    same: tuple[str, ...] = ()
    takes_null: bool = False
    own: Callable[[Mapping], Any] = lambda arguments: None
    also: tuple[str, ...] = ()
    needs_also: bool = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of the argument and of those of the same value."""
        return (self.argument, *self.same)

    def read(self, config: Mapping) -> dict:
        """See `Part`; a field that lacks, or is null, is the usual one.

        Raises:
            InputError: fields that have to be the same differ.
        """
        value = config[self.field] if self.usual is _REQUIRED else config.get(self.field)
        is_said = value is not None or (self.takes_null and self.field in config)
        if not is_said and self.usual is not _REQUIRED:
            value = self.usual(config) if callable(self.usual) else self.usual
        for field in self.also:
            other = config[field] if self.needs_also else first_given(config.get(field), value)
            if other != value:
                raise InputError(
                    f"{self.field}={shown(value)} and {field}={shown(other)} differ: they are one here"
                )
        return dict.fromkeys(self.arguments, self.ours(value))

    def written(self, arguments: Mapping) -> dict:
        """See `Part`.

        Raises:
            InputError: arguments that have to be the same differ.
        """
        given = {name: arguments[name] for name in self.arguments}
        values = {
            name: self.theirs(self.own(arguments) if value is None else value)
            for name, value in given.items()
        }
        if len({*map(repr, values.values())}) > 1:
            raise InputError(
                f"the network has {values}, for which the family has one field, {self.field}: it "
                "cannot be saved as one of that family"
            )
        return dict.fromkeys((self.field, *self.also), values[self.argument])


def activation(name: str) -> str:
    """Return our name of a published config's activation.

    Raises:
        InputError: it has none.
    """
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise InputError(f"the activation {shown(name)} is none of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def published_activation(name: str) -> str:
    """Return what published configs call an activation.

    Raises:
        InputError: it has no name there.
    """
    theirs = {ours: name for name, ours in reversed(_ACTIVATIONS.items())}
    if name not in theirs:
        raise InputError(f"hidden_act={name!r} has no name in published configs")
    return theirs[name]


def hidden_act(field: str = "hidden_act", usual: str = "silu", **means: str) -> Field:
    """Return the field of the feed-forward layers' activation.

    Args:
        field: its name.
        usual: what a config means that does not say it.
        **means: names that mean others.
    """
    ours = lambda name: activation(means.get(name, name))
    return Field("hidden_act", field, usual, ours, published_activation)


def differs(name: str, own: object, theirs: object) -> InputError:
    """Return the error for a network that no config of its family says.

    Args:
        name: the argument's.
        own: what the network has; a set or list of them.
        theirs: what the family has.
    """
    own = ", ".join(map(str, own)) if isinstance(own, set | list) else own
    return InputError(
        f"the network has {name}={own}, the published family {theirs}: it cannot be saved as one of "
        f"that family, as one that is made with {name}={theirs} can"
    )


def choice(argument: str, field: str, usual: Any, values: Mapping) -> Field:
    """Return a field of a few values, which a dict of theirs and ours has."""

    def ours(value):
        if value not in [*values]:
            raise InputError(f"{field} is {shown(value)}, expected one of {[*values]}")
        return values[value]

    def theirs(value):
        found = [name for name, own in values.items() if own == value]
        if not found:
            raise differs(argument, repr(value), " or ".join(map(repr, values.values())))
        return found[0]

    return Field(argument, field, usual, ours, theirs)


@dataclasses.dataclass(frozen=True)
class AfterPadding:
    """Positions that are counted from the padding's id on.

    Args:
        length: the number of positions that a config means that has none.
        usual: the id that a config means that has none; an error by default.
        counts: whether the length in configs has the positions before, too.
    """

    length: int
    usual: int | None = None
    counts: bool = False
    arguments: tuple[str, ...] = ("position_offset", "max_length")

    def read(self, config: Mapping) -> dict:
        """See `Part`.

        Raises:
            InputError: there is no padding.
        """
        pad_id = first_given(config.get("pad_token_id"), self.usual)
        if pad_id is None:
            raise InputError("lacks the field pad_token_id, from which positions are counted on")
        length = first_given(config.get("max_position_embeddings"), self.length)
        return {"position_offset": pad_id + 1, "max_length": length - (pad_id + 1) * self.counts}

    def written(self, arguments: Mapping) -> dict:
        """See `Part`.

        Raises:
            InputError: positions are counted from elsewhere.
        """
        offset, pad_id = arguments["position_offset"], arguments["pad_id"]
        if pad_id is None or offset != pad_id + 1:
            raise differs("position_offset", offset, "pad_id + 1" if pad_id is None else pad_id + 1)
        return {"max_position_embeddings": arguments["max_length"] + offset * self.counts}


def reciprocal(value: float) -> float:
    """Return 1 / value."""
    return 1 / value


def epsilon(
    usual: float, field: str = "rms_norm_eps", same: tuple[str, ...] = (), own: float = 1e-6
) -> Field:
    """Return the field of what norms add to the variance.

    Args:
        usual: what a config means that does not say it.
        field: its name.
        same: other arguments that it says, such as `qk_norm_epsilon`.
        own: what None means in a network.
    """
    given = lambda value: own if value is None else value
    return Field("norm_epsilon", field, usual, theirs=given, same=same)


HEADS = Field("num_heads", "num_attention_heads")
TIED = Field("tied_head", "tie_word_embeddings", True)


def _if_lacking(field, usual, follows):
    """Return `Field.usual` of one that means a number where it lacks, and follows where it is null."""
    return lambda config: usual if usual and field not in config else follows(config)


def kv_heads(usual: int | None = None) -> Field:
    """Return the field of grouped heads; what it is where it lacks, or as many as heads."""
    return Field(
        "num_kv_heads",
        "num_key_value_heads",
        _if_lacking("num_key_value_heads", usual, lambda config: config["num_attention_heads"]),
        own=lambda arguments: arguments["num_heads"],
    )


def head_dim(usual: int | None = None) -> Field:
    """Return the field of heads' sizes; what it is where it lacks, or h / n."""
    return Field(
        "head_dim",
        "head_dim",
        _if_lacking("head_dim", usual, lambda x: x["hidden_size"] // x["num_attention_heads"]),
        own=lambda arguments: arguments["hidden_size"] // arguments["num_heads"],
    )


def query_scale(field: str, usual: float, is_square: bool = False) -> Field:
    """Return the field of the factor of queries, which None is 1/√d of in a network.

    Args:
        field: their name.
        usual: what a config means that does not say it.
        is_square: whether the field has a whole number n, and the factor is 1/√n.
    """

    def usual_scale(arguments):
        size = arguments["head_dim"] or arguments["hidden_size"] // arguments["num_heads"]
        return size**-0.5

    def number(scale):
        found = round(scale**-2)
        if not math.isclose(found**-0.5, scale, rel_tol=1e-6):
            raise InputError(f"query_scale={scale} is 1/√n of no whole number n, as {field} has it")
        return found

    if not is_square:
        return Field("query_scale", field, usual, own=usual_scale)
    return Field("query_scale", field, usual, lambda n: n**-0.5, number, own=usual_scale)
