"""Tolerances of single-process tests, and a relative comparison of tensors.

harness/tolerances.py has the tolerances of a job against one process, which benchmarks also use.
"""

import numpy as np

# Error of central differences in float64 with step 1e-5 and entries of about 1.
NUMERIC_DERIVATIVE = 1e-6

# Error of a layer against the float64 reference. Inputs and weights are exact in every dtype.
# The machine epsilons are 1.2e-7, 7.8e-3 and 9.8e-4.
LAYERS = {"float32": 5e-6, "mixed_bfloat16": 4e-2, "mixed_float16": 5e-3}

# Errors accumulate in encoder and decoder layers and in stacks of up to three.
BLOCKS = {"float32": 1e-5, "mixed_bfloat16": 8e-2, "mixed_float16": 1e-2}

# Error of the float32 cross entropy by the dtype of the logits.
LOSS = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}


def assert_all_close(actual, expected, tolerance):
    """Assert that named tensors are close to named arrays.

    The maximum error of each tensor is relative to its maximum expected entry, or to a tenth of
    the maximum over all tensors if that is larger. A gradient that is 0 in exact arithmetic, such
    as the gradient of an attention's key bias, has rounding noise of the size of the others.

    Args:
        actual: Dict of tensors of any dtype.
        expected: Dict of float64 arrays with the same names and shapes.
        tolerance: Maximum relative error.
    """
    import tensorflow as tf  # tests without TensorFlow import the constants

    assert set(actual) == set(expected)
    sizes = {name: np.abs(value).max(initial=0.0) for name, value in expected.items()}
    floor = 0.1 * max(sizes.values())
    for name, reference in expected.items():
        value = tf.cast(tf.convert_to_tensor(actual[name]), "float64").numpy()
        assert value.shape == np.shape(reference), name
        assert np.isfinite(value).all(), f"{name} is not finite"
        error = np.abs(value - reference).max(initial=0.0)
        allowed = tolerance * max(sizes[name], floor)
        assert error <= allowed, f"{name}: the error is {error:.3g}, expected at most {allowed:.3g}"


# Error of float32 training in one process against manual steps or Keras.
TRAINING = 2e-5
# Error of losses and norms of the first steps in mixed precision against float32. It is a few
# machine epsilons (8e-3 and 1e-3), because CPUs round products in different places.
TRAINING_16_BIT = {"mixed_bfloat16": 2e-2, "mixed_float16": 5e-3}
