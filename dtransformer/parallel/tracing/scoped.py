"""Values that apply to the code inside a `with` block."""

import contextlib
import contextvars
from collections.abc import Iterator

_code_changing = []


class Scoped:
    """Value that `with` blocks replace, separately in each thread.

    Define a scoped value next to the code that reads it. Layers do not read scoped values. They
    call functions that do.

    Args:
        name: String. Name for debugging.
        default: Value outside of all `with` blocks. Defaults to `None`.
        changes_code: Boolean, whether layers are traced differently for different values, see
            `context_signature`. Defaults to `False`.

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
        """Replace the value inside the `with` block and yield the new value."""
        token = self._variable.set(value)
        try:
            yield value
        finally:
            self._variable.reset(token)


def context_signature() -> tuple[str, ...]:
    """Return the `repr` of each scoped value with `changes_code=True`.

    Code that was traced under one signature must not be reused under another.
    """
    return tuple(repr(scoped.get()) for scoped in _code_changing)
