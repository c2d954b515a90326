"""Promise: what is installed for GPUs is what TensorFlow takes, by make and in the image."""

import importlib.metadata
import pathlib
import re
import subprocess

import pytest
from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).parents[1]
IMAGE = (ROOT / "Dockerfile.gpu").read_text("utf-8")
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.M))


def cuda_of_tensorflow():
    """Return what `tensorflow[and-cuda]` asks for besides TensorFlow."""
    every = map(Requirement, importlib.metadata.requires("tensorflow"))
    return [one for one in every if one.marker and "and-cuda" in str(one.marker)]


def commands(*arguments):
    """Return what make would do, as if nothing were there."""
    command = ["make", "--dry-run", "--always-make", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_cudas_libraries_are_pinned_to_what_tensorflow_takes():
    asked = cuda_of_tensorflow()
    assert {one.name for one in asked} == {name for name in PINS if name.startswith("nvidia-")}
    for one in asked:
        assert PINS[one.name] in one.specifier, f"{one}: constraints.txt has {PINS[one.name]}"


@pytest.mark.parametrize("target", ["setup", "train"])
def test_make_adds_cudas_libraries_to_an_environment_that_is_there(target):
    assert "touch .venv/gpu" in commands(target, "GPU=1")
    assert ".venv/gpu" not in commands(target, "GPU=")


def test_the_image_has_the_versions_of_this_clone():
    (python,) = re.findall(r"^FROM python:(3\.\d+\.\d+)-slim-\w+$", IMAGE, re.MULTILINE)
    setup = (ROOT / "setup.cfg").read_text("utf-8")
    assert f"Python :: {python.rpartition('.')[0]}\n" in setup
    assert "make setup GPU=1" in IMAGE and "pip install" not in IMAGE
    (extra,) = re.findall(r"^gpu =\n +(.*)$", setup, re.MULTILINE)
    assert Requirement(extra).extras == {"and-cuda"}
    assert PINS["tensorflow"] in Requirement(extra).specifier


def test_the_image_copies_what_make_reads():
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", IMAGE, re.M) for name in line.split()}
    assert all((ROOT / name).exists() for name in copied)
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (read,) = re.findall(r"^\.venv/ready: (.*)$", makefile, re.MULTILINE)
    assert {*read.split(), "Makefile", "README.md", "dtransformer"} <= copied
