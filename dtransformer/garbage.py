"""Garbage waits while much is made that stays: modules, a network, its compiled step."""

import contextlib
import gc


@contextlib.contextmanager
def garbage_waits():
    """Let Python search for no cyclic garbage meanwhile; what was set holds again afterwards.

    Millions of objects are made, and each search looks at all of them and finds next to nothing:
    that takes a fifth of the time in which TensorFlow is imported, and some 5 % of the first step
    of a deep network. For `with`, or as a decorator.
    """
    searched = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searched:
            gc.enable()
