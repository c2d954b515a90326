"""Arguments of layers and models are what their type hints say, and in the ranges of their names."""

import functools
import inspect
import math
import numbers
import typing
from collections.abc import Callable

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
