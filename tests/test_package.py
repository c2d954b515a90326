"""Promise: what others install is whole: sdist, wheel, package data, types and a version."""

import importlib
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile

import pytest

from harness import dist, public_names
from tests.doc_pages import EXAMPLE, ROOT, blocks, replaced

# Public names by the rooms that have a list of them.
ROOMS = {
    name.rpartition(".")[2]: name
    for name in (
        "dtransformer",
        *(f"dtransformer.{x}" for x in ("datasets", "layers", "models", "parallel.collectives")),
        *(f"dtransformer.{x}" for x in ("planner", "trainers")),
    )
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return dist.build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """An environment with the wheel, which finds its requirements in this one; its bin folder."""
    folder = tmp_path_factory.mktemp("elsewhere") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--quiet"]
    subprocess.run([*pip, "--no-index", "--no-deps", built[1]], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def run(*command, folder):
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    command = [str(word) for word in command]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


def package_files():
    paths = (ROOT / "dtransformer").rglob("*")
    return {
        path.relative_to(ROOT).as_posix()
        for path in paths
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_has_every_file_of_the_package_and_no_other(built):
    with zipfile.ZipFile(built[1]) as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (text,) = (wheel.read(x).decode() for x in wheel.namelist() if x.endswith("/METADATA"))
    assert found == package_files()
    for line in (f"Version: {dist.package_version()}", "Classifier: Typing :: Typed"):
        assert line in text.splitlines()


def test_the_sdist_has_what_the_clone_has(built):
    with tarfile.open(built[0]) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    assert package_files() < found
    for name in ("CHANGELOG.md", "LICENSE", "Makefile", "constraints.txt", "docs/index.md"):
        assert name in found
    for folder in ("benchmarks", "docs", "examples", "harness", "tests"):
        wanted = {x.relative_to(ROOT).as_posix() for x in (ROOT / folder).rglob("*.py")}
        assert wanted <= found, folder


def test_it_is_used_outside_of_the_clone(installed, tmp_path):
    found = run(
        installed / "python", "-c", "import dtransformer; print(dtransformer)", folder=tmp_path
    )
    assert str(installed.parent) in found
    assert "train" in run(installed / "dtransformer", "--help", folder=tmp_path)
    plan = ["plan", "--model", "bert-base", "--devices", 4, "--device", "h100"]
    printed = run(installed / "dtransformer", *plan, "--global-batch", 8, folder=tmp_path)
    assert "data_parallel" in printed
    (tmp_path / "train.py").write_text(replaced(blocks(ROOT / "README.md", "python")[0], EXAMPLE))
    assert "loss" in run(installed / "python", "train.py", folder=tmp_path)


def test_the_version_is_the_changelogs():
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert dist.package_version() == dist.changelog_version(text)


@pytest.mark.parametrize(
    "headings, version",
    [
        ("## Unreleased\n\n- x\n\n## 0.1.0 – 2026-11-22\n", "0.2.0.dev0"),
        ("## 1.2.3 – 2027-01-02\n\n## 1.2.0 – 2026-11-22\n", "1.2.3"),
    ],
)
def test_versions_follow_the_headings(headings, version):
    assert dist.changelog_version(headings) == version


def test_versions_have_dates():
    with pytest.raises(ValueError, match=r"got '## 1.0.0'"):
        dist.changelog_version("## Unreleased\n\n## 1.0.0\n")


def test_a_development_version_is_not_released():
    if "dev" in dist.package_version():
        assert any("development version" in line for line in dist.obstacles())


def test_the_typed_program_has_every_public_name():
    text = pathlib.Path(public_names.__file__).read_text("utf-8")
    used = set(re.findall(r"^    (\w+\.\w+),$", text, re.MULTILINE))
    wanted = {
        f"{x}.{n}" for x, room in ROOMS.items() for n in importlib.import_module(room).__all__
    }
    assert used == wanted
    assert len(public_names.NAMES) == len(wanted)
