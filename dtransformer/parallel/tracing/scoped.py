"""Values that `with` blocks set for the code that is traced inside them."""

import contextlib
import contextvars
from collections.abc import Iterator

_code_changing = []


class Scoped:
    """A value that `with` blocks replace, separately in each thread.

    Define one next to the code that reads it. Layers do not read scoped values, only the functions
    that they call do.

    Args:
        name: Name for debugging.
        default: Value outside of all `with` blocks.
        changes_code: Whether layers compute differently for different values, see
            `context_signature`.

    Example:

    >>> seed = Scoped("seed")
    >>> with seed.set(3):
    ...     seed.get()
    3
    >>> print(seed.get())
    None
    """

    def __init__(self, name: str, default: object = None, changes_code: bool = False):
        self._variable = contextvars.ContextVar(f"dtransformer_{name}", default=default)
        if changes_code:
            _code_changing.append(self)

    def get(self):
        """Return the current value."""
        return self._variable.get()

    @contextlib.contextmanager
    def set(self, value) -> Iterator:
        """Replace the value inside the `with` block; yield the new value."""
        token = self._variable.set(value)
        try:
            yield value
        finally:
            self._variable.reset(token)


def context_signature() -> tuple[str, ...]:
    """Return a text for each scoped value that changes what layers compute.

    Code that was traced under one signature must not be reused under another.
    """
    return tuple(repr(scoped.get()) for scoped in _code_changing)
