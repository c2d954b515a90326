"""Garbage waits while a step is compiled."""

import contextlib
import gc


@contextlib.contextmanager
def garbage_waits():
    """Let Python search for no garbage in a `with` block; what was set holds again afterwards.

    A compilation makes millions of objects that stay, and each search looks at all of them: it
    takes a tenth of the time, and finds next to nothing.
    """
    searched = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searched:
            gc.enable()
