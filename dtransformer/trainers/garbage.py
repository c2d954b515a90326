"""Garbage waits while a network is built and its step compiled."""

import contextlib
import gc


@contextlib.contextmanager
def garbage_waits():
    """Let Python search for no cyclic garbage meanwhile; what was set holds again afterwards.

    A compilation makes millions of objects that stay, and each search looks at all of them, which
    takes some 5 % of the first step of a deep network, and finds next to nothing. For `with`, or
    as a decorator.
    """
    searched = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searched:
            gc.enable()
