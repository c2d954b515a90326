"""Make and the container image install the CUDA libraries that TensorFlow requires."""

import importlib.metadata
import pathlib
import re
import subprocess

import pytest
from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).parents[1]
IMAGE = (ROOT / "Dockerfile.gpu").read_text("utf-8")
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.M))


def cuda_requirements():
    """Return the additional requirements of `tensorflow[and-cuda]`."""
    requirements = map(Requirement, importlib.metadata.requires("tensorflow"))
    return [
        requirement
        for requirement in requirements
        if requirement.marker and "and-cuda" in str(requirement.marker)
    ]


def make_commands(*arguments):
    """Return the commands that make would run from scratch."""
    command = ["make", "--dry-run", "--always-make", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_pinned_cuda_libraries_satisfy_tensorflow():
    requirements = cuda_requirements()
    assert {requirement.name for requirement in requirements} == {
        name for name in PINS if name.startswith("nvidia-")
    }
    for requirement in requirements:
        assert PINS[requirement.name] in requirement.specifier, (
            f"{requirement}: constraints.txt has {PINS[requirement.name]}"
        )


@pytest.mark.parametrize("target", ["setup", "train"])
def test_make_adds_cuda_libraries_to_an_existing_environment(target):
    assert "touch .venv/gpu" in make_commands(target, "GPU=1")
    assert ".venv/gpu" not in make_commands(target, "GPU=")


def test_image_uses_the_versions_of_the_repository():
    (python,) = re.findall(r"^FROM python:(3\.\d+\.\d+)-slim-\w+$", IMAGE, re.MULTILINE)
    setup = (ROOT / "setup.cfg").read_text("utf-8")
    assert f"Python :: {python.rpartition('.')[0]}\n" in setup
    assert "make setup GPU=1" in IMAGE and "pip install" not in IMAGE
    (extra,) = re.findall(r"^gpu =\n +(.*)$", setup, re.MULTILINE)
    assert Requirement(extra).extras == {"and-cuda"}
    assert PINS["tensorflow"] in Requirement(extra).specifier


def test_image_copies_all_inputs_of_make():
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", IMAGE, re.M) for name in line.split()}
    assert all((ROOT / name).exists() for name in copied)
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (inputs,) = re.findall(r"^\.venv/ready: (.*)$", makefile, re.MULTILINE)
    assert {*inputs.split(), "Makefile", "README.md", "dtransformer"} <= copied
