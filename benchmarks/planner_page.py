"""Makes the tables of docs/planner.md anew: every published row beside the planner's.

python benchmarks/planner_page.py
"""

import argparse
import pathlib

import paths  # noqa: F401

from harness.published_tables.compared import with_made_part

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "planner.md"


def main():
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    PAGE.write_text(with_made_part(PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
