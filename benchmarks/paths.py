"""Add the repository to `sys.path`, because benchmarks use harness/, which is not installed."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
