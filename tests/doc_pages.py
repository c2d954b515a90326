"""Pages of the docs and their code blocks."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLE = {"10_000": "60", "=1000": "=200", "=128": "=16", "epochs=3": "epochs=1"}
"""Replacements that keep the README's example fast."""


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
