"""What the tests of hostile input have in common."""

import pytest
from hypothesis import HealthCheck, settings

from dtransformer.errors import InputError, one_line

# The same cases in every run, and few enough for a suite; benchmarks/fuzz.py makes thousands.
BOUNDED = settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def read_or_refused(function, *args):
    """Return what a reader returns, or None where it raises an InputError of one line."""
    try:
        return function(*args)
    except InputError as error:
        assert str(error) and str(error) == one_line(error, None)
        return None


def refusal(function, *args):
    """Return the message of the InputError that a reader raises."""
    with pytest.raises(InputError) as caught:
        function(*args)
    return str(caught.value)
