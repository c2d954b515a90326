"""The tolerances of tests on one process, and what they are relative to.

Those of a job against one process are in harness/tolerances.py, as benchmarks have them, too.
"""

import numpy as np

# Central differences in float64 with step 1e-5, entries of size 1.
NUMERIC_DERIVATIVE = 1e-6

# A layer against the float64 reference, from inputs and weights that every type
# holds exactly. One unit in the last place is 1.2e-7, 7.8e-3 and 9.8e-4 of a number.
LAYERS = {"float32": 5e-6, "mixed_bfloat16": 4e-2, "mixed_float16": 5e-3}

# Whole encoder and decoder layers and stacks of up to three, where errors add up.
BLOCKS = {"float32": 1e-5, "mixed_bfloat16": 8e-2, "mixed_float16": 1e-2}

# The cross entropy by the type of its logits: the loss itself is always float32.
LOSS = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}


def assert_all_close(actual, expected, tolerance):
    """Asserts that named tensors are close to named arrays.

    The greatest error of a tensor is compared with its greatest expected entry,
    and with a tenth of the greatest of all where its own is smaller: a gradient
    that is 0 in exact arithmetic, as an attention's key bias has, is rounding
    noise of the size of the others.

    Args:
        actual: Dict of tensors of any type.
        expected: Dict of float64 arrays with the same names and shapes.
        tolerance: The greatest error allowed, a share.
    """
    import tensorflow as tf  # not for the tolerances alone

    assert set(actual) == set(expected)
    sizes = {name: np.abs(value).max(initial=0.0) for name, value in expected.items()}
    floor = 0.1 * max(sizes.values())
    for name, wanted in expected.items():
        value = tf.cast(tf.convert_to_tensor(actual[name]), "float64").numpy()
        assert value.shape == np.shape(wanted), name
        assert np.isfinite(value).all(), f"{name} is not finite"
        error = np.abs(value - wanted).max(initial=0.0)
        allowed = tolerance * max(sizes[name], floor)
        assert error <= allowed, f"{name} is off by {error:.3g}, allowed are {allowed:.3g}"


# Training on one process against the same steps by hand or by Keras, in float32.
TRAINING = 2e-5
# Losses and norms of the first steps in mixed precision against those in float32: some epsilons
# of the type (8e-3 and 1e-3), as CPUs round its products at different places.
TRAINING_16_BIT = {"mixed_bfloat16": 2e-2, "mixed_float16": 5e-3}
