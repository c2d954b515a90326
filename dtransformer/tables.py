"""Read YAML tables of the package and format tables as text."""

import os
import pathlib

import yaml


def read_table(path: str | os.PathLike) -> dict:
    """Return the content of a YAML file of this package."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # The C loader is ten times faster.
    return yaml.load(pathlib.Path(path).read_text("utf-8"), Loader=loader)


def columns(lines: list[list], right: tuple[int, ...] = ()) -> list[str]:
    """Return the lines of a text table with a rule below the header.

    Args:
        lines: List of rows of cells, the header first. Cells are converted with `str`.
        right: Indices of right-aligned columns.
    """
    lines = [[str(cell) for cell in line] for line in lines]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]
