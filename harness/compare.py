"""What a job gives, beside what one process gives."""

import numpy as np


def weights(results, kind):
    """Return the weights of `train`'s results by path; `kind` is "initial" or "final"."""
    prefix = f"{kind}/"
    return {
        name.removeprefix(prefix): value
        for name, value in results.items()
        if name.startswith(prefix)
    }


def without_padding(weight, expected):
    """Return a weight without the padding of its vocabulary."""
    return weight[tuple(slice(size) for size in expected.shape)]


def assert_same(found, expected):
    """Asserts that weights are equal to the last bit, padding of vocabularies aside."""
    assert set(found) == set(expected)
    for path, value in expected.items():
        np.testing.assert_array_equal(without_padding(found[path], value), value, err_msg=path)


def differences(results, expected, network):
    """Compare the results of `train` with those of one process.

    Of weights that Lion trains the nearest 99 % of the elements are compared: rounding noise
    turns the sign of a gradient near 0, as all of an attention's key bias are.

    Returns:
        A dict: `"loss"`, the largest relative difference of a loss; `"weights"`, the
        largest difference of an element after the last step, and `"where"` it is.
    """
    trained, by_weight = weights(results, "final"), {}
    for path, value in weights(expected, "final").items():
        errors = np.abs(without_padding(trained[path], value) - value)
        if network != "lion":
            by_weight[path] = float(errors.max())
        elif not path.endswith("key_bias"):
            by_weight[path] = float(np.quantile(errors, 0.99))
    where = max(by_weight, key=lambda name: np.nan_to_num(by_weight[name], nan=np.inf))
    loss = np.abs(results["losses"] / expected["losses"] - 1).max()
    return {"loss": float(loss), "weights": by_weight[where], "where": where}
