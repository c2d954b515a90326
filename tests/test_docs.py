"""What the docs say of the code: the files they name, and the way of a batch through them."""

import ast
import doctest
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "dtransformer"
PAGES = [*sorted(ROOT.glob("docs/*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
FILE = re.compile(r"[\w./-]*/[\w.-]+\.(?:py|sh|yaml|cfg)\b")
STATION = re.compile(r"\d+\. `([\w/]+\.py)` · `([\w.]+)`")
MAX_STATIONS = 10


@pytest.mark.parametrize("page", [page.name for page in PAGES if ">>> " in page.read_text("utf-8")])
@pytest.mark.tensorflow
def test_examples(page, tmp_path, monkeypatch):
    """They do what the page says, one after the other."""
    monkeypatch.chdir(tmp_path)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    path = str(ROOT / "docs" / page)
    found = doctest.testfile(path, module_relative=False, optionflags=flags, encoding="utf-8")
    assert found.attempted and not found.failed


def test_files_that_docs_name_exist():
    wrong = [
        f"{page.name}: {name}"
        for page in PAGES
        for name in FILE.findall(page.read_text("utf-8"))
        if not any((folder / name).exists() for folder in (ROOT, PACKAGE))
    ]
    assert not wrong, "\n".join(["there is no such file:", *wrong])


def walks():
    """Return the stations of each walk in docs/architecture.md: (file, function)."""
    text = (ROOT / "docs/architecture.md").read_text("utf-8").split("\n## The three walks")[1]
    parts = text.split("\n## ")[0].split("\n### ")[1:]
    return {part.split("\n", 1)[0]: STATION.findall(part) for part in parts}


def test_three_walks():
    """From `fit` to the weights' update a batch goes through few functions, and each once."""
    assert len(walks()) == 3
    for name, stations in walks().items():
        assert 3 <= len(stations) <= MAX_STATIONS, f"{name}: {len(stations)} stations"
        assert len(set(stations)) == len(stations), f"{name} comes back: {stations}"
        for file, function in stations:
            assert definition(file, function), f"{name}: there is no {function} in {file}"


def definition(file, function):
    """Return the node that defines a function or method of a file, or None."""
    node = ast.parse((PACKAGE / file).read_text("utf-8"))
    for part in function.split("."):
        inside = [n for n in node.body if isinstance(n, (ast.ClassDef, ast.FunctionDef))]
        node = next((n for n in inside if n.name == part), None)
        if node is None:
            return None
    return node


@pytest.mark.tensorflow
def test_glossary_has_the_logical_axes():
    from dtransformer.parallel.axis_rules import LOGICAL_AXES

    text = (ROOT / "docs/glossary.md").read_text("utf-8")
    rows = re.findall(r"\| `(\w+)` \| (.*?) \| .*? \|", text)
    assert rows == [(name, axis.counts) for name, axis in LOGICAL_AXES.items()]
