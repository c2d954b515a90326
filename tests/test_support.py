"""The tables of docs/support.md match dry runs of all tasks and techniques."""

import contextlib
import importlib.util
import pathlib
import re

import pytest

FILE = pathlib.Path(__file__).parents[1] / "docs/support_table.py"
QUICK = [
    ("causal_lm", "Packed rows"),
    ("chat", "Tensor"),
    ("embedding", "Pipeline"),
    ("seq2seq", "Context"),
    ("translation", "LoRA"),
    ("classification", "QLoRA"),
]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """Return the module that generates the page, in a folder with the inputs of its configs."""
    spec = importlib.util.spec_from_file_location("support_table", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("support")
    module.write_inputs(folder)
    with contextlib.chdir(folder):
        yield module


def shown_cell(script, task, technique):
    """Return the cell for a task and a technique on the page, and the text of its footnote."""
    text = script.PAGE.read_text("utf-8")
    header = next(line for line in text.splitlines() if f"| {technique} |" in line)
    table = text[text.index(header) :].split("\n\n")[0]
    row = next(line for line in table.splitlines() if line.startswith(f"| `{task}` |"))
    names, cells = ([x.strip() for x in line.split("|")] for line in (header, row))
    cell = cells[names.index(technique)]
    footnote = re.fullmatch(r"no\[\^(\d+)\]", cell)
    if footnote is None:
        return cell, None
    return "no", re.search(rf"^\[\^{footnote[1]}\]: (.*)$", text, re.MULTILINE)[1]


@pytest.mark.parametrize("task, technique", QUICK)
def test_sample_of_cells_matches_dry_runs(task, technique, script):
    reasons = []
    cell = script.cell(task, technique, reasons)
    expected = ("no", reasons[0]) if reasons else (cell, None)
    assert shown_cell(script, task, technique) == expected


def test_incompatible_pairs_on_the_page_are_rejected(script):
    text = script.PAGE.read_text("utf-8")
    assert f"- **Sequence with Context.** {script.refusal('chat', 'Sequence', 'Context')}\n" in text
    for second in ("Tensor", "ZeRO 3"):
        assert script.refusal("chat", "Pipeline", second) is None


@pytest.mark.long
def test_page_matches_dry_runs_of_all_cells(script):
    assert script.PAGE.read_text("utf-8") == script.page(), "run python docs/support_table.py"
