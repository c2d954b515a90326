"""Imports pause Python's garbage collection and enable it again."""

import subprocess
import sys


def test_garbage_collection_is_off_only_during_imports():
    program = """
import gc
import dtransformer
before = gc.get_stats()[2]["collections"]
import dtransformer.start
print(gc.isenabled(), gc.get_stats()[2]["collections"] - before)
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert process.stdout.split() == ["True", "0"], process.stderr
