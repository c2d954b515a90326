"""Comparison of a job's results with a single process."""

import numpy as np


def weights(results, kind):
    """Return the weights in the results of `train` as a dict by path.

    Args:
        results: Dict of arrays from `train`.
        kind: "initial" or "final".
    """
    prefix = f"{kind}/"
    return {
        name.removeprefix(prefix): value
        for name, value in results.items()
        if name.startswith(prefix)
    }


def without_padding(weight, expected):
    """Return a weight without vocabulary padding, in the shape of `expected`."""
    return weight[tuple(slice(size) for size in expected.shape)]


def assert_same(actual, expected):
    """Assert that weights are bitwise equal, except for vocabulary padding."""
    assert set(actual) == set(expected)
    for path, value in expected.items():
        np.testing.assert_array_equal(without_padding(actual[path], value), value, err_msg=path)


def differences(results, expected, network):
    """Compare the results of `train` with those from a single process.

    With Lion, only the closest 99% of a weight's elements are compared, because rounding noise
    flips the sign of gradients near 0. Key biases are skipped, because all their gradients are near
    0.

    Returns:
        A dict with `"loss"`, the largest relative difference of a loss, `"weights"`, the largest
        difference of an element after the last step, and `"where"`, the path of that weight.
    """
    trained, errors_by_weight = weights(results, "final"), {}
    for path, value in weights(expected, "final").items():
        errors = np.abs(without_padding(trained[path], value) - value)
        if network != "lion":
            errors_by_weight[path] = float(errors.max())
        elif not path.endswith("key_bias"):
            errors_by_weight[path] = float(np.quantile(errors, 0.99))
    worst = max(
        errors_by_weight, key=lambda name: np.nan_to_num(errors_by_weight[name], nan=np.inf)
    )
    loss = np.abs(results["losses"] / expected["losses"] - 1).max()
    return {"loss": float(loss), "weights": errors_by_weight[worst], "where": worst}
