"""Numbers of layers, losses and metrics that are Keras' own, or a user's, on layouts of a job.

Each kind is trained by Keras' own `fit` in one process, and by the trainer under each layout.
Prints a table: Keras' number, and what a layout gives where that is another; "told" where one
warning names it, "refused" where an error does.

    python benchmarks/keras_values.py [--layouts m2@1x1 mp2@1x2 dp2@2x1 pp2m2-1f1b@2x1]
"""

import argparse
import tempfile

import paths  # noqa: F401

from harness.layouts import ALONE, layout_of
from harness.runs import Run, launch_runs
from harness.stateful import KINDS
from harness.tolerances import PARITY_LOSS

LAYOUTS = ("m2@1x1", "mp2@1x2", "dp2@2x1", "pp2m2-1f1b@2x1")


def shown(results, expected):
    """Return a cell of the table.

    Args:
        results: what each rank gives.
        expected: Keras' number.
    """
    if any("refused" in one for one in results):
        return "refused"
    value = max(one["value"] for one in results)  # a state is on one stage of a pipeline
    if abs(value - expected) <= PARITY_LOSS * max(1.0, abs(expected)):
        return "="
    return f"{value:.5f}" + ", told" * any(one["is_told"] for one in results)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="*", default=LAYOUTS)
    layouts = [ALONE, *map(layout_of, parser.parse_args().layouts)]
    runs = {
        layout: [Run(f"harness.stateful:{number}", layout) for number in range(len(KINDS))]
        for layout in layouts
    }
    print("| kind | Keras |", " | ".join(layout.name for layout in layouts[1:]), "|")
    print("|" + " --- |" * (len(layouts) + 1))
    with tempfile.TemporaryDirectory() as folder:
        for layout, of_layout in runs.items():
            launch_runs(layout.ranks, of_layout, folder)
        for number, kind in enumerate(KINDS):
            (alone,), *others = (runs[layout][number].read(folder) for layout in layouts)
            cells = [shown(results, alone["value"]) for results in others]
            print(f"| {kind} | {alone['value']:.5f} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
