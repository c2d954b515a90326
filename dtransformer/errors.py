"""The error for what a user can mend: files, configs, command lines."""

import contextlib
import difflib
import importlib.util
import re
from collections.abc import Iterable, Iterator

# What errors of a step, of Horovod, its sockets and NCCL say on the ranks that are well.
_ANOTHERS = re.compile(
    "another rank has failed|Horovod has been shut down|gloo/transport/|remote process exited"
)
MAX_MESSAGE = 300  # characters of what the command line prints
_MAX_SHOWN = 60


class InputError(ValueError):
    """Something given to the library is wrong and the user can mend it.

    The message is one line: what came, what was expected, how to mend it. The
    command line prints its beginning and its end without a traceback and exits with code 2.
    """

    def __init__(self, message: str = ""):
        super().__init__(one_line(message, None))


@contextlib.contextmanager
def refusing(place: str = "", kinds: type | tuple = (TypeError, ValueError)) -> Iterator[None]:
    """Inside the `with` block a wrong value or type is an `InputError`.

    Args:
        place: what its message begins with.
        kinds: the errors that are.
    """
    try:
        yield
    except kinds as error:
        raise InputError(f"{place}: {error}" if place else str(error)) from None


def is_of_another_rank(error: BaseException | str | None) -> bool:
    """Return whether an error says no more than that another rank has failed, or left the job."""
    return _ANOTHERS.search(str(error)) is not None


def one_line(text: str, limit: int | None = MAX_MESSAGE) -> str:
    r"""Return a text as one line that a terminal can show.

    Args:
        text: any text: what does not print, such as a control character, is escaped.
        limit: number of characters; of a longer text the middle is left out, as the beginning says
            what is wrong and the end how to mend it. None for no limit.

    Example:

    >>> one_line("a\nb \x07" + "c" * 50, limit=20)
    'a b \\x07ccc … cccccc'
    """
    text = " ".join(str(text).split())
    if not text.isprintable():
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    if limit is None or len(text) <= limit:
        return text
    end = limit // 3
    return f"{text[: limit - end - 3]} … {text[-end:]}"


def shown(value: object, limit: int = _MAX_SHOWN) -> str:
    """Return what an error says of a value that came from outside: its `repr`, cut off.

    Example:

    >>> shown("x" * 100, limit=10)
    "'xxxxxxxx…"
    """
    try:
        text = repr(value[: limit + 1] if isinstance(value, (str, bytes, list)) else value)
    except ValueError:  # an integer of thousands of digits
        text = f"an {type(value).__name__} that is too long to print"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def nearest(name: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a hint at the known name that is like one that is not known, else at all of them.

    Example:

    >>> nearest("cosin", ["linear", "cosine"]), nearest("step", ["linear", "cosine"])
    ('did you mean cosine?', 'there are linear, cosine')
    """
    name = name if isinstance(name, str) else ""
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"


def format_warning(message: object, *details: object) -> str:
    """Return a warning as one line. Use it as `warnings.formatwarning`."""
    return f"warning: {one_line(message, None)}\n"


def check_int(name: str, value: object, least: int = 1) -> int:
    """Return a value that has to be an integer of at least some number."""
    if type(value) is not int or value < least:
        raise InputError(f"{name} must be an integer of at least {least}, got {shown(value)}")
    return value


def check_installed(package: str, what: str) -> None:
    """Refuse what needs an optional package where that is not installed.

    Args:
        package: its name.
        what: what needs it, for the message.
    """
    if importlib.util.find_spec(package) is None:
        raise InputError(f"{what} need {package}: pip install {package}")
