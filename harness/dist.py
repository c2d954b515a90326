"""Build the sdist and the wheel without network access, and check a release.

    python -m harness.dist --out dist              # build both
    python -m harness.dist --out dist --release    # stop if the clone is not ready for a release

The wheel is built from the unpacked sdist in a temporary folder. So it contains exactly the files
of the sdist and none from an earlier build. The clone is not changed.
"""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
# Folders of the clone without source code.
MADE = (".git", ".venv", ".venv-jax", "build", "data", "dist", "runs", "site")
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
HEADING = re.compile(r"^## (Unreleased|\S+)(?: – (\d{4}-\d\d-\d\d))?$", re.MULTILINE)


def changelog_version(text: str) -> str:
    """Return the version that follows from a changelog's headings.

    If there are changes under "Unreleased", this is the development version of the next minor
    version. Otherwise it is the newest version.

    Raises:
        ValueError: If the changelog has no version, or if the newest one has no date.
    """
    headings = HEADING.findall(text)
    newest, date = next((x for x in headings if x[0] != "Unreleased"), ("", ""))
    if not date:
        raise ValueError(f"CHANGELOG.md: expected '## X.Y.Z – YYYY-MM-DD', got '## {newest}'.")
    if headings[0][0] != "Unreleased":
        return newest
    major, minor, _ = newest.split(".")
    return f"{major}.{int(minor) + 1}.0.dev0"


def package_version() -> str:
    """Return the version in `dtransformer/version.py`."""
    text = (ROOT / "dtransformer/version.py").read_text("utf-8")
    return re.search(r'__version__ = "(.*)"', text).group(1)


def build(out: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Build both archives into a folder and return their paths as `(sdist, wheel)`."""
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        clone = pathlib.Path(folder) / "clone"
        shutil.copytree(ROOT, clone, ignore=_ignored)
        sdist = out / _build(clone, "build_sdist", out)
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        unpacked = pathlib.Path(folder) / sdist.name.removesuffix(".tar.gz")
        return sdist, out / _build(unpacked, "build_wheel", out)


def _ignored(folder, names):
    skipped = MADE if pathlib.Path(folder) == ROOT else ()
    return [x for x in names if x in skipped or x == "__pycache__" or x.endswith(".egg-info")]


def _build(source, kind, out):
    command = [sys.executable, "-c", BUILD, kind, str(out)]
    process = subprocess.run(command, cwd=source, capture_output=True, text=True)
    if process.returncode:
        sys.exit(f"{kind} failed:\n{process.stdout}{process.stderr}")
    return process.stdout.splitlines()[-1]


def obstacles() -> list[str]:
    """Return the reasons against releasing the clone, one line each."""
    version = package_version()
    expected = changelog_version((ROOT / "CHANGELOG.md").read_text("utf-8"))
    problems = []
    if version != expected:
        problems.append(
            f"dtransformer/version.py has {version}, but CHANGELOG.md requires {expected}."
        )
    if "dev" in version:
        problems.append(
            f"{version} is a development version. Replace '## Unreleased' in CHANGELOG.md by a "
            "version and a date, and set the same version in dtransformer/version.py."
        )
    for command, expected_output, problem in (
        (["status", "--porcelain"], "", "The clone has uncommitted changes."),
        (["tag", "--list", f"v{version}"], "", f"The tag v{version} already exists."),
    ):
        process = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
        if process.returncode or process.stdout.strip() != expected_output:
            problems.append(problem)
    return problems


def main() -> None:
    """Build the archives. With `--release`, exit if the clone is not ready for a release."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "dist")
    parser.add_argument("--release", action="store_true", help="exit unless the clone is ready")
    arguments = parser.parse_args()
    if arguments.release and (problems := obstacles()):
        sys.exit("\n".join(["The clone is not ready for a release:", *problems]))
    for path in (paths := build(arguments.out)):
        print(f"{path.name}: {path.stat().st_size / 1024:,.0f} KiB")
    if arguments.release:
        version = package_version()
        print("Remaining steps:")
        print(f"  git tag -a v{version} -m 'dtransformer {version}' && git push origin v{version}")
        print(f"  twine upload {' '.join(str(path) for path in paths)}")


if __name__ == "__main__":
    main()
