"""A script that imports dtransformer first gets no notes of TensorFlow."""

import os
import subprocess
import sys

import pytest


def read_stderr(code, **variables):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
    if not variables:
        environment.pop("TF_CPP_MIN_LOG_LEVEL", None)
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=120
    ).stderr


@pytest.mark.parametrize("module", ["keras", "tensorflow"])
def test_notes_stay_off_if_a_script_imports_keras_itself(module):
    init = "dtransformer.init(dtransformer.TransformerOpParallelConfig())"
    assert read_stderr(f"import dtransformer, {module}; {init}") == ""


def test_notes_are_printed_if_the_environment_requests_them():
    assert "oneDNN" in read_stderr("import dtransformer, keras", TF_CPP_MIN_LOG_LEVEL="0")
