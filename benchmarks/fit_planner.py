"""Fit the planner's constants of the A100 and H100 and print them with their errors as JSON.

    python benchmarks/fit_planner.py

The data are table 1 of Narayanan et al., 2021, and the measured layouts of the models in
`harness.published_tables.published.FITTED_MODELS`. The other models are held out. The benchmark also
fits on every other pair of models and prints the mean error on the held-out models. It minimizes the
absolute errors of the logarithm with weighted Gauss-Newton steps and uses no random numbers. The
H100's `product_share` makes the mean error of the logarithm 0 on four published steps.
"""

import argparse
import dataclasses
import itertools
import json

import numpy as np
import paths  # noqa: F401

from dtransformer.planner.clusters import get_device
from harness.published_tables import h100, published
from harness.published_tables.systems import DEEPSPEED, MEGATRON, OVERLAPPING, predicted_seconds

FITTED = (
    "product_share",
    "half_rows",
    "half_features",
    "pass_overhead_us",
    "between_share",
    "hop_us",
)
START = dict(zip(FITTED, (0.8, 200, 100, 10, 0.5, 10)))
TABLE_1_WEIGHT = 4  # Weight of each of the ten rows. Other tables have dozens of layouts.
PRIOR = 0.02  # Weight of (log constant − log start)², for constants that the data do not determine.


def fitting_data(models):
    """Return a list of (steps, system, weight) for table 1 and the layouts of some models."""
    rows = [row.step for row in published.table_1()]
    data = [([s], OVERLAPPING if s.overlaps else MEGATRON, TABLE_1_WEIGHT) for s in rows]
    return data + [(published.make_layouts(model), DEEPSPEED, 1) for model in models]


def log_errors(constants, data):
    device = get_device("a100-80")
    new_constants = dataclasses.replace(device.constants, **constants)
    device = dataclasses.replace(device, constants=new_constants)
    errors = []
    for steps, system, _ in data:
        seconds = predicted_seconds(steps, system, device)
        errors.append(np.log(seconds / [step.seconds for step in steps]))
    return np.concatenate(errors)


def fit(models, iterations=40):
    """Fit the constants on table 1 and on the layouts of some models, and return them."""
    data = fitting_data(models)
    weights = np.concatenate([np.full(len(steps), weight) for steps, _, weight in data])
    start = np.log(list(START.values()))

    def named(x):
        return dict(zip(FITTED, map(float, np.exp(x))))

    def cost(x):
        return np.sum(weights * np.abs(log_errors(named(x), data))) + PRIOR * np.sum(
            (x - start) ** 2
        )

    x, best, damping, eye = start.copy(), cost(start), 1e-2, np.eye(len(start))
    for _ in range(iterations):
        errors = log_errors(named(x), data)
        slopes = [(log_errors(named(x + 1e-4 * row), data) - errors) / 1e-4 for row in eye]
        jacobian = np.stack(slopes, axis=1)
        robust = weights / np.maximum(np.abs(errors), 0.02)
        matrix = jacobian.T @ (robust[:, None] * jacobian) + 2 * PRIOR * eye
        slope = jacobian.T @ (robust * errors) + 2 * PRIOR * (x - start)
        while damping < 1e6:
            step = np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), slope)
            trial = x - np.clip(step, -0.5, 0.5)
            if cost(trial) < best:
                x, best, damping = trial, cost(trial), damping / 3
                break
            damping *= 3
        else:
            break
    return named(x)


def held_out_error(constants, models):
    """Return the mean relative error on the layouts of all other models."""
    held_out_models = [m for m in published.LAYOUT_MODELS if m not in models]
    data = [(published.make_layouts(model), DEEPSPEED, 1) for model in held_out_models]
    return float(np.mean(np.abs(np.expm1(log_errors(constants, data)))))


def main():
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    constants = fit(published.FITTED_MODELS)
    halves = {}
    for models in itertools.combinations(published.LAYOUT_MODELS, 2):
        halves[" and ".join(models)] = round(held_out_error(fit(models), models), 4)
    report = {
        "constants": {name: float(f"{value:.3g}") for name, value in constants.items()},
        "fitted_on": ["table 1", *published.FITTED_MODELS],
        "held_out_mean_error": round(held_out_error(constants, published.FITTED_MODELS), 4),
        "held_out_mean_error_of_other_halves": halves,
    }
    report["h100"] = {
        "product_share": round(h100.fit_product_share(h100.make_steps()), 3),
        "errors_of_left_out_steps": [round(error, 4) for error in h100.left_out_errors()],
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
