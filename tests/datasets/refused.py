"""What the tests of wrong input have in common."""

import pytest

from dtransformer.errors import InputError


def refused(function, *args, **kwargs):
    """The message of the InputError that a call raises, which is one line."""
    with pytest.raises(InputError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message
