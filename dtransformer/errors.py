"""`InputError` for mistakes that users can fix, and helpers for error messages."""

import contextlib
import difflib
import importlib.util
import math
import numbers
import re
import types
import typing
from collections.abc import Iterable, Iterator

# Texts of errors that healthy ranks get from Horovod, its sockets or NCCL after another rank fails.
_OTHER_RANK_FAILED = re.compile(
    "another rank has failed|Horovod has been shut down|gloo/transport/|remote process exited"
)
_TYPE_NAMES = {bool: "a bool", int: "an int", float: "a number", str: "a str", type(None): "None"}
_COMPUTE_TYPES = "float16", "bfloat16", "float32", "float64"
MAX_MESSAGE = 300  # Maximum number of characters of an error on the command line.
_MAX_SHOWN = 60


class InputError(ValueError):
    """Error for invalid input that the user can fix, such as a file, a config or an option.

    The message is one line with the received value, the expected one and the fix. The command
    line shortens it, prints it without a traceback and exits with code 2.
    """

    def __init__(self, message: str = ""):
        super().__init__(to_one_line(message, None))


@contextlib.contextmanager
def raise_as_input_error(
    place: str = "", kinds: type | tuple = (TypeError, ValueError)
) -> Iterator[None]:
    """Context manager that converts errors into `InputError`.

    Args:
        place: Text to prepend to the message.
        kinds: Exception class or classes to convert.
    """
    try:
        yield
    except kinds as error:
        raise InputError(f"{place}: {error}" if place else str(error)) from None


def is_from_other_rank(error: BaseException | str | None) -> bool:
    """Return whether an error only reports that another rank failed or left the job."""
    return _OTHER_RANK_FAILED.search(str(error)) is not None


def to_one_line(text: str, limit: int | None = MAX_MESSAGE) -> str:
    r"""Return a text as a single printable line.

    Args:
        text: Any text. Whitespace is collapsed, and unprintable characters are escaped.
        limit: Maximum number of characters. The middle of a longer text is cut, because the
            beginning states the error and the end the fix. `None` disables the limit.

    Example:

    >>> to_one_line("a\nb \x07" + "c" * 50, limit=20)
    'a b \\x07ccc … cccccc'
    """
    text = " ".join(str(text).split())
    if not text.isprintable():
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    if limit is None or len(text) <= limit:
        return text
    end = limit // 3
    return f"{text[: limit - end - 3]} … {text[-end:]}"


def short_repr(value: object, limit: int = _MAX_SHOWN) -> str:
    """Return the `repr` of a user's value for an error message, cut to `limit` characters.

    Example:

    >>> short_repr("x" * 100, limit=10)
    "'xxxxxxxx…"
    """
    try:
        text = repr(value[: limit + 1] if isinstance(value, (str, bytes, list)) else value)
    except ValueError:  # Python refuses to print integers with thousands of digits.
        text = f"an {type(value).__name__} that is too long to print"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def suggest(name: object, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a hint with the most similar known name, or with all of them if none is similar.

    Example:

    >>> suggest("cosin", ["linear", "cosine"]), suggest("step", ["linear", "cosine"])
    ('did you mean cosine?', 'expected one of linear, cosine.')
    """
    name = name if isinstance(name, str) else ""
    close = difflib.get_close_matches(name, choices, n=1, cutoff=cutoff)
    return f"did you mean {close[0]}?" if close else f"expected one of {', '.join(choices)}."


def format_warning(message: object, *details: object) -> str:
    """Return a warning as one line. Use it as `warnings.formatwarning`."""
    return f"warning: {to_one_line(message, None)}\n"


def check_int(name: str, value: object, minimum: int = 1) -> int:
    """Return `value` if it is an integer of at least `minimum`.

    Raises:
        InputError: If it is smaller or not an integer.
    """
    if type(value) is not int or value < minimum:
        raise InputError(
            f"{name} must be an integer of at least {minimum}, got {short_repr(value)}."
        )
    return value


def check_argument(name: str, value: object, kinds: tuple[type, ...]) -> None:
    """Check the type and the range of one argument. See `checked`.

    Args:
        name: Name of the argument, which selects its range.
        value: Its value.
        kinds: Accepted types, out of bool, int, float, str and `NoneType`.

    Raises:
        TypeError: If the value has another type.
        ValueError: If the value is out of range.
    """
    if not any(_is_instance(value, kind) for kind in kinds):
        expected = " or ".join(_TYPE_NAMES[kind] for kind in kinds)
        raise TypeError(f"`{name}` must be {expected}, got {value!r} ({type(value).__name__}).")
    if name == "num_layers" and value < 0:
        raise ValueError(f"`{name}` must be at least 0, got {value}.")
    if name == "epsilon" and value is not None and not 0 < value < math.inf:
        raise ValueError(f"`{name}` must be a finite number above 0, got {value}.")
    if name.endswith("_compute_type") and value not in _COMPUTE_TYPES:
        raise ValueError(f"`{name}` must be one of {', '.join(_COMPUTE_TYPES)}, got {value!r}.")


def hint_members(hint: typing.Any) -> tuple:
    """Return the members of a union hint, or the hint itself in a tuple."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def hint_types(hint: typing.Any) -> tuple[type, ...]:
    """Return the types of a hint, or `()` if one of them is not bool, int, float, str or `None`.

    Example:

    >>> hint_types(int | None), hint_types(dict | None)
    ((<class 'int'>, <class 'NoneType'>), ())
    """
    kinds = tuple(getattr(member, "__origin__", member) for member in hint_members(hint))
    return kinds if all(kind in _TYPE_NAMES for kind in kinds) else ()


def _is_instance(value, kind):
    if kind is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return isinstance(value, kind)


def check_installed(package: str, what: str) -> None:
    """Check that an optional package is installed.

    Args:
        package: Name of the package.
        what: Plural noun for the feature that needs it. It starts the error text.

    Raises:
        InputError: If the package is missing.
    """
    if importlib.util.find_spec(package) is None:
        raise InputError(f"{what} need {package}: pip install {package}.")
