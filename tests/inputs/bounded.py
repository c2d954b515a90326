"""Helpers for tests of malicious input."""

import pytest
from hypothesis import HealthCheck, settings

from dtransformer.errors import InputError, to_one_line

# The cases are equal in every run and few, to save time. benchmarks/fuzz.py runs thousands.
BOUNDED = settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def read_or_reject(function, *args):
    """Return the result of a reader, or `None` if it raises a one-line InputError."""
    try:
        return function(*args)
    except InputError as error:
        assert str(error) and str(error) == to_one_line(error, None)
        return None


def refusal(function, *args):
    """Return the message of the InputError that a reader raises."""
    with pytest.raises(InputError) as caught:
        function(*args)
    return str(caught.value)
