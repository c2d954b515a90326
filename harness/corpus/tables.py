"""Tables of words from `words.txt`: a heading in brackets, then one row per line."""

import functools
import pathlib


@functools.cache
def _tables():
    tables, rows = {}, []
    for line in pathlib.Path(__file__).with_name("words.txt").read_text("utf-8").splitlines():
        if line.startswith("["):
            rows = tables[line.strip("[]")] = []
        elif line and not line.startswith("#"):
            rows.append(line)
    return tables


def rows(name: str, separator: str | None = None) -> list[list[str]]:
    """Return the cells of a table's rows. The default separator is white space."""
    return [[cell.strip() for cell in row.split(separator)] for row in _tables()[name]]


def words(name: str) -> list[str]:
    """Return the words of a table, row after row."""
    return " ".join(_tables()[name]).split()
