"""Helper for tests of invalid input."""

import pytest

from dtransformer.errors import InputError


def get_error_message(function, *args, **kwargs):
    """Return the one-line message of the InputError that a call raises."""
    with pytest.raises(InputError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message
