"""Peak memory of a training step."""

import pytest

from harness.measure import passing_bytes


def peak_of_a_second_step(step):
    """Return the peak of temporary memory in the second call of a step, in bytes.

    Skip the test if TensorFlow's allocator has no statistics.
    """
    step()
    num_bytes = passing_bytes(step)
    if num_bytes is None:
        pytest.skip("TensorFlow's allocator does not count here")
    return num_bytes
