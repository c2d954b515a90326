"""What imports leave of Python's search for garbage."""

import subprocess
import sys


def test_nothing_is_searched_while_tensorflow_is_imported_and_all_is_afterwards():
    program = """
import gc
import dtransformer
before = gc.get_stats()[2]["collections"]
import dtransformer.start
print(gc.isenabled(), gc.get_stats()[2]["collections"] - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "0"], done.stderr
