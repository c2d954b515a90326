"""Training under many layouts of a job, beside training in one process.

Small encoder-decoders are trained from the same seed; losses and weights are compared.
Prints a table, or JSON. The layouts' names are in tests/distributed/layouts.py.

    python benchmarks/parity.py [--layouts 'dp2mp2@*' 'mp8@*+sp'] [--networks tied]
        [--steps 20] [--json]
"""

import argparse
import fnmatch
import json
import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from tests.distributed import layouts  # noqa: E402
from tests.tolerances import PARITY_LOSS, PARITY_WEIGHTS  # noqa: E402

SECONDS_OF_A_RUN = 240  # on a busy machine
COMPARED = ("loss", "weights")


def measure(network, layout, folder, expected):
    """Return one entry of the results."""
    entry = {"layout": layout.name, "ranks": layout.ranks, "devices": layout.devices}
    results = layouts.read_all(folder, network, layout)
    if results is None:
        return {**entry, "network": network, "passes": False}
    found = layouts.differences(results, expected, network)
    passes = found["loss"] <= PARITY_LOSS and found["weights"] <= PARITY_WEIGHTS
    return {**entry, "network": network, **found, "passes": passes}


def tracebacks(output):
    """Return what ranks have written from the first traceback on."""
    start = output.find("Traceback (most recent call last)")
    return output[output.rfind("\n", 0, start) + 1 :][:20000] if start >= 0 else output[-8000:]


def table(entries, networks):
    """Return the results as a table in Markdown: one row a layout."""
    columns = [f"{network}: {what}" for network in networks for what in COMPARED]
    rows = [["layout", "ranks × devices", *columns, ""], ["---"] * (len(columns) + 3)]
    for name in dict.fromkeys(entry["layout"] for entry in entries):
        of_layout = [entry for entry in entries if entry["layout"] == name]
        row = [name.replace("@{ranks}x{devices}".format(**of_layout[0]), "")]
        row.append("{ranks} × {devices}".format(**of_layout[0]))
        for entry in of_layout:
            row += [f"{entry[what]:.1e}" if what in entry else "error" for what in COMPARED]
        row.append("pass" if all(entry["passes"] for entry in of_layout) else "**fail**")
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--layouts",
        nargs="+",
        default=[n for n, layout in layouts.LAYOUTS.items() if layout.level + layout.stages == 1],
        help="names, or patterns of them; '*+shard?' are those of a sharded optimizer, '*pp*' "
        "those of a pipeline",
    )
    parser.add_argument(
        "--networks",
        nargs="+",
        choices=layouts.NETWORKS,
        help="by default all that hold the layouts' promises",
    )
    parser.add_argument("--steps", type=int, default=layouts.STEPS)
    parser.add_argument("--epsilon", type=float, default=layouts.EPSILON, help="AdamW's")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    chosen = [
        layout
        for name, layout in layouts.LAYOUTS.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in arguments.layouts)
    ]
    if not chosen:
        parser.error(f"no layout has such a name; there are {', '.join(layouts.LAYOUTS)}")

    sharded = all(layout.level for layout in chosen)
    default = ["adamw", "sgd", "lion"] if sharded else ["untied", "tied"]
    if all(layout.stages > 1 for layout in chosen):
        default = ["deep", "deep_tied", "deep_causal"]
    arguments.networks = arguments.networks or default
    options = ["--steps", str(arguments.steps), "--epsilon", str(arguments.epsilon)]
    with tempfile.TemporaryDirectory() as folder:
        # Four ranks wait for ever where one mesh of all of them follows a mesh of each.
        launch = lambda layout: (layout.ranks, layout.level == 3)
        for num_ranks, level_3 in sorted({launch(layout) for layout in chosen}):
            runs = [
                f"{network}/{layout.name}"
                for layout in chosen
                if launch(layout) == (num_ranks, level_3)
                for network in arguments.networks
            ]
            start = time.perf_counter()
            code, output = layouts.launch_runs(
                num_ranks, folder, runs, SECONDS_OF_A_RUN * len(runs), options
            )
            seconds = time.perf_counter() - start
            print(f"{num_ranks} ranks: {len(runs)} runs in {seconds:.0f} s", file=sys.stderr)
            if code:
                print(tracebacks(output), file=sys.stderr)
        expected = {
            (network, blocks): layouts.train(network, arguments.steps, arguments.epsilon, blocks)[1]
            for network in arguments.networks
            for blocks in sorted({layout.num_blocks for layout in chosen})
        }
        entries = [
            measure(network, layout, folder, expected[network, layout.num_blocks])
            for layout in chosen
            for network in arguments.networks
        ]
    print(json.dumps(entries, indent=2) if arguments.json else table(entries, arguments.networks))
    sys.exit(not all(entry["passes"] for entry in entries))


if __name__ == "__main__":
    main()
