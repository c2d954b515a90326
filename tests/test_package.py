"""The sdist and the wheel are complete, typed and versioned."""

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

# Modules with `__all__`, by their last name.
PUBLIC_MODULES = {
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
    """Install the wheel into a new environment and return its bin folder.

    The requirements come from the current environment.
    """
    folder = tmp_path_factory.mktemp("elsewhere") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--quiet"]
    # With PYTHONPATH pip may find this checkout and install nothing.
    run(*pip, "--no-index", "--no-deps", built[1], folder=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def run(*command, folder):
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    command = [str(word) for word in command]
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert not process.returncode, process.stdout + process.stderr
    return process.stdout


def package_files():
    paths = (ROOT / "dtransformer").rglob("*")
    return {
        path.relative_to(ROOT).as_posix()
        for path in paths
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_wheel_contains_exactly_the_package_files(built):
    with zipfile.ZipFile(built[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (text,) = (wheel.read(x).decode() for x in wheel.namelist() if x.endswith("/METADATA"))
    assert names == package_files()
    for line in (f"Version: {dist.package_version()}", "Classifier: Typing :: Typed"):
        assert line in text.splitlines()


def test_sdist_contains_the_repository(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert package_files() < names
    for name in ("CHANGELOG.md", "LICENSE", "Makefile", "constraints.txt", "docs/index.md"):
        assert name in names
    for folder in ("benchmarks", "docs", "examples", "harness", "tests"):
        expected = {x.relative_to(ROOT).as_posix() for x in (ROOT / folder).rglob("*.py")}
        assert expected <= names, folder


def test_installed_package_works_outside_the_repository(installed, tmp_path):
    printed_path = run(
        installed / "python", "-c", "import dtransformer; print(dtransformer)", folder=tmp_path
    )
    assert str(installed.parent) in printed_path
    assert "train" in run(installed / "dtransformer", "--help", folder=tmp_path)
    plan = ["plan", "--model", "bert-base", "--devices", 4, "--device", "h100"]
    printed = run(installed / "dtransformer", *plan, "--global-batch", 8, folder=tmp_path)
    assert "data_parallel" in printed
    (tmp_path / "train.py").write_text(replaced(blocks(ROOT / "README.md", "python")[0], EXAMPLE))
    assert "loss" in run(installed / "python", "train.py", folder=tmp_path)


def test_version_matches_the_changelog():
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert dist.package_version() == dist.changelog_version(text)


@pytest.mark.parametrize(
    "headings, version",
    [
        ("## Unreleased\n\n- x\n\n## 0.1.0 – 2026-11-22\n", "0.2.0.dev0"),
        ("## 1.2.3 – 2027-01-02\n\n## 1.2.0 – 2026-11-22\n", "1.2.3"),
    ],
)
def test_version_follows_the_headings(headings, version):
    assert dist.changelog_version(headings) == version


def test_released_versions_need_a_date():
    with pytest.raises(ValueError, match=r"got '## 1.0.0'"):
        dist.changelog_version("## Unreleased\n\n## 1.0.0\n")


def test_development_versions_cannot_be_released():
    if "dev" in dist.package_version():
        assert any("development version" in line for line in dist.obstacles())


def test_typed_program_uses_every_public_name():
    text = pathlib.Path(public_names.__file__).read_text("utf-8")
    used = set(re.findall(r"^    (\w+\.\w+),$", text, re.MULTILINE))
    expected = {
        f"{short_name}.{name}"
        for short_name, module in PUBLIC_MODULES.items()
        for name in importlib.import_module(module).__all__
    }
    assert used == expected
    assert len(public_names.NAMES) == len(expected)
