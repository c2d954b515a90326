"""Puts the repository on the path of imports: benchmarks use harness/, which is not installed."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
