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
    aligned = []
    for i, column in enumerate(zip(*lines)):
        cells = list(map(str, column))
        width = max(map(len, cells))
        align = str.rjust if i in right else str.ljust
        aligned.append([align(cell, width) for cell in cells])
    lines = ["  ".join(row).rstrip() for row in zip(*aligned)]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]
