"""The docs match the code: files, names, generated tables, examples and walks."""

import ast
import doctest
import importlib.util
import re

import pytest

from tests.doc_pages import ROOT, doc_pages, page_name

PACKAGE = ROOT / "dtransformer"
PAGES = [*doc_pages(), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
FILE = re.compile(r"[\w./-]*/[\w.-]+\.(?:py|sh|yaml|cfg)\b")
STATION = re.compile(r"\d+\. `([\w/]+\.py)` · `([\w.]+)`")
MAX_STATIONS = 10


@pytest.mark.parametrize(
    "page", [page_name(page) for page in PAGES if ">>> " in page.read_text("utf-8")]
)
@pytest.mark.tensorflow
def test_doctests_of_pages_pass(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    path = str(ROOT / "docs" / page)
    results = doctest.testfile(path, module_relative=False, optionflags=flags, encoding="utf-8")
    assert results.attempted and not results.failed


def test_files_named_in_docs_exist():
    wrong = [
        f"{page_name(page)}: {name}"
        for page in PAGES
        for name in FILE.findall(page.read_text("utf-8"))
        if not any((folder / name).exists() for folder in (ROOT, PACKAGE))
    ]
    assert not wrong, "\n".join(["these files do not exist:", *wrong])


def walks():
    """Return the `{title: [(file, function), ...]}` dict of the walks in docs/architecture.md."""
    text = (ROOT / "docs/architecture.md").read_text("utf-8").split("\n## The three walks")[1]
    parts = text.split("\n## ")[0].split("\n### ")[1:]
    return {part.split("\n", 1)[0]: STATION.findall(part) for part in parts}


def test_walks_of_the_architecture_page_name_existing_functions():
    """Each walk from `fit` to the update of weights has few functions and repeats none."""
    assert len(walks()) == 3
    for name, stations in walks().items():
        assert 3 <= len(stations) <= MAX_STATIONS, f"{name}: {len(stations)} stations"
        assert len(set(stations)) == len(stations), f"{name} repeats a function: {stations}"
        for file, function in stations:
            assert definition(file, function), f"{name}: {file} does not define {function}"


def definition(file, function):
    """Return the AST node of a function or method of a file, or `None`."""
    node = ast.parse((PACKAGE / file).read_text("utf-8"))
    for part in function.split("."):
        definitions = [n for n in node.body if isinstance(n, (ast.ClassDef, ast.FunctionDef))]
        node = next((n for n in definitions if n.name == part), None)
        if node is None:
            return None
    return node


def load_script(name):
    """Import a script of docs/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_hardware_tables_match_the_planner():
    script = load_script("hardware_table")
    assert script.PAGE.read_text("utf-8") == script.page(), "run python docs/hardware_table.py"


def test_command_line_page_matches_the_code():
    script = load_script("command_line")
    assert script.PAGE.read_text("utf-8") == script.page(), "run python docs/command_line.py"


@pytest.mark.tensorflow
def test_model_table_matches_the_code():
    script = load_script("model_table")
    assert script.PAGE.read_text("utf-8") == script.page(), "run python -m docs.model_table"


def shown_names():
    """Yield (module, name) for every import from the package in docs and examples."""
    scripts = [path.read_text("utf-8") for path in ROOT.glob("examples/**/*.py")]
    blocks = re.compile(r"^```python\n(.*?)^```$|^>>> (from [^\n]*)$", re.MULTILINE | re.DOTALL)
    pages = [page.read_text("utf-8") for page in PAGES]
    scripts += [code or line for page in pages for code, line in blocks.findall(page)]
    for node in (node for text in scripts for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("dtransformer"):
            yield from ((node.module, name.name) for name in node.names)


def test_reference_lists_every_name_used_in_docs_and_examples():
    """A name that is also a file of the package needs a separate page of the reference."""
    pages = [page.read_text("utf-8") for page in ROOT.glob("docs/api/*.md")]
    listed = {name for page in pages for name in re.findall(r"^::: (\S+)", page, re.MULTILINE)}
    missing = set()
    for module, name in shown_names():
        path = PACKAGE.parent / module.replace(".", "/")
        names_file = (path / f"{name}.py").exists() or (path / name).is_dir()
        api_names = [f"{module}.{name}", f"{module}.search"] if names_file else [module]
        if listed.isdisjoint(api_names):
            missing.add(f"{module}.{name}")
    assert not missing, f"docs/api/ does not list {sorted(missing)}"


@pytest.mark.tensorflow
def test_glossary_lists_the_logical_axes():
    from dtransformer.parallel.mesh.axis_rules import LOGICAL_AXES

    text = (ROOT / "docs/glossary.md").read_text("utf-8")
    rows = re.findall(r"\| `(\w+)` \| (.*?) \| .*? \|", text)
    assert rows == [(name, axis.counts) for name, axis in LOGICAL_AXES.items()]
