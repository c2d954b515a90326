"""Write the tables of published and planned values to docs/planner.md and docs/planner-tables.md.

python benchmarks/planner_page.py
"""

import argparse
import pathlib

import paths  # noqa: F401

from harness.published_tables.compared import pages, with_written_part

DOCS = pathlib.Path(__file__).parents[1] / "docs"


def main():
    """Write both pages."""
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    for name, part in pages().items():
        page = DOCS / name
        page.write_text(with_written_part(page.read_text("utf-8"), part), "utf-8")


if __name__ == "__main__":
    main()
