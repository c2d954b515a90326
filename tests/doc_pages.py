"""Code blocks of the pages of the docs, and the first example as small as a test needs it."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLE = {
    "11_000": "60",
    "10_000": "40",
    "10_004": "42",
    "_size=1000": "_size=200",
    "=128": "=16",
    "coder_layers=2": "coder_layers=1",
    "epochs=3": "epochs=1",
}


def doc_pages():
    """Return the pages of docs/ in every folder, except for the generated reference."""
    folder = ROOT / "docs"
    pages = [page for page in folder.rglob("*.md") if folder / "api" not in page.parents]
    return sorted(pages)


def page_name(page):
    """Return the path of a page within docs/, or the name of a page outside of docs/."""
    folder = ROOT / "docs"
    inside = folder in page.parents
    return page.relative_to(folder).as_posix() if inside else page.name


def blocks(page, *languages):
    return [code for kind, code in BLOCK.findall(page.read_text("utf-8")) if kind in languages]


def replaced(code, small):
    for old, new in small.items():
        code = code.replace(old, new)
    return code
