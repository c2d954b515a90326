"""Helpers for checks that run on every rank.

A failed check does not raise an error, because the other ranks would then wait forever.
"""

import functools

import numpy as np
import tensorflow as tf

from dtransformer.parallel.runtime import job

compiled = functools.partial(tf.function, autograph=False)

CHECKS = {}


def is_quick(name, size):
    """Return whether a check belongs to the quick suite.

    Values are checked eagerly there, and gradients also check a compiled function. Four ranks run
    the checks that two ranks cannot show: groups and the order of ranks.
    """
    if size == 2:
        return not name.endswith("_in_a_function")
    shows_order = "all_to_all" in name or "all_gather" in name
    return size == 4 and (2 not in CHECKS[name][0] or shows_order)


failures = []


def eager(function):
    return function


def check(*sizes):
    """Register a check for jobs with each of these sizes."""

    def register(function):
        CHECKS[function.__name__] = sizes, function
        return function

    return register


def expect(condition, message):
    if not condition:
        failures.append(message)


def expect_equal(actual, expected, message):
    actual = actual.numpy()
    same = actual.dtype == expected.dtype and actual.shape == expected.shape
    expect(
        same and np.array_equal(actual, expected),
        f"{message}: expected {expected.dtype} {expected.shape} {expected.ravel()[:4]}, "
        f"got {actual.dtype} {actual.shape} {actual.ravel()[:4]}",
    )


def expect_error(function, *words, error_type=ValueError):
    try:
        result = function()
    except error_type as error:
        missing = [word for word in words if word not in str(error)]
        expect(not missing, f"the error does not contain {missing}: {error}")
    except Exception as error:
        expect(False, f"expected a {error_type.__name__}, got {error!r}")
    else:
        expect(False, f"expected an error with {words}, got {result}")


def value_for_rank(values):
    """Return the value for this rank. Ranks beyond the end of the list use the last value."""
    return values[min(job.rank(), len(values) - 1)]
