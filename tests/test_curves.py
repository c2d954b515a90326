"""The example plots losses by step, also for resumed runs."""

import importlib.util
import pathlib

import pytest

FILE = pathlib.Path(__file__).parents[1] / "examples/language_model/curves.py"


@pytest.fixture(scope="module")
def curves():
    spec = importlib.util.spec_from_file_location("curves", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_repeated_steps_of_a_resumed_run_count_once(curves):
    """A run stops after step 5 and resumes from the checkpoint of step 3."""
    steps = [1, 2, 3, 4, 5, 4, 5, 6]
    lines = [{"kind": "step", "step": step, "step_loss": i} for i, step in enumerate(steps)]
    lines.insert(4, {"kind": "epoch", "step": 4, "val_loss": 9.0})
    result = curves.losses_by_step(lines, "step", "step_loss")
    assert result == ([1, 2, 3, 4, 5, 6], [0, 1, 2, 5, 6, 7])


def test_smoothed_points_are_at_the_last_step_of_their_mean(curves):
    steps, losses = [10, 20, 30, 40, 50], [1.0, 3.0, 5.0, 7.0, 2.0]
    assert curves.smooth(steps, losses, 2) == ([20, 40, 50], [2.0, 6.0, 2.0])
