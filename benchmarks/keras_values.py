"""Compare Keras and custom layers, losses and metrics on layouts with plain Keras; print a table.

Keras' `fit` trains each kind in one process, and the trainer trains it on each layout. A cell of the
table has "=" for Keras' value, or the other value, with "warned" if a warning names the difference,
or "refused" for an error.

    python benchmarks/keras_values.py [--layouts m2@1x1 mp2@1x2 dp2@2x1 pp2m2-1f1b@2x1]
"""

import argparse
import tempfile

import paths  # noqa: F401

from harness.layouts import ALONE, parse_layout
from harness.runs import Run, launch_runs
from harness.stateful import KINDS
from harness.tolerances import PARITY_LOSS

LAYOUTS = ("m2@1x1", "mp2@1x2", "dp2@2x1", "pp2m2-1f1b@2x1")


def format_cell(results, expected):
    """Return a cell of the table.

    Args:
        results: List of the results of each rank.
        expected: Value of Keras.
    """
    if any("refused" in result for result in results):
        return "refused"
    value = max(result["value"] for result in results)  # Only one pipeline stage has the state.
    if abs(value - expected) <= PARITY_LOSS * max(1.0, abs(expected)):
        return "="
    return f"{value:.5f}" + ", warned" * any(result["is_told"] for result in results)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="*", default=LAYOUTS)
    layouts = [ALONE, *map(parse_layout, parser.parse_args().layouts)]
    runs = {
        layout: [Run(f"harness.stateful:{i}", layout) for i in range(len(KINDS))]
        for layout in layouts
    }
    print("| kind | Keras |", " | ".join(layout.name for layout in layouts[1:]), "|")
    print("|" + " --- |" * (len(layouts) + 1))
    with tempfile.TemporaryDirectory() as folder:
        for layout, layout_runs in runs.items():
            launch_runs(layout.ranks, layout_runs, folder)
        for i, kind in enumerate(KINDS):
            (one_process,), *layout_results = (runs[layout][i].read(folder) for layout in layouts)
            cells = [format_cell(results, one_process["value"]) for results in layout_results]
            print(f"| {kind} | {one_process['value']:.5f} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
