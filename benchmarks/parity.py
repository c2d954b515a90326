"""Compare training on many layouts with training in one process.

Trains small networks from the same seed, compares losses and weights, and prints a table or JSON. See
harness/layouts.py for the names of layouts.

    python benchmarks/parity.py [--layouts 'dp2mp2@*' 'mp8@*+sp'] [--networks tied]
        [--steps 20] [--json]
"""

import argparse
import fnmatch
import json
import sys
import tempfile
import time

import keras
import paths  # noqa: F401

from harness.compare import differences
from harness.layouts import DIVIDED, LAYOUTS
from harness.networks import EPSILON, NETWORKS
from harness.runs import Run, launch_runs
from harness.tolerances import PARITY_LOSS, PARITY_LOSS_16_BITS, PARITY_WEIGHTS
from harness.training import STEPS, train

COMPARED = ("loss", "weights")


def measure(run, folder, expected):
    """Compare a run with the expected results and return an entry of the report."""
    layout = run.layout
    entry = {"layout": layout.name, "ranks": layout.ranks, "devices": layout.devices}
    entry["network"] = run.task
    if errors := run.errors(folder):
        print(errors, file=sys.stderr)
        return {**entry, "passes": False}
    merged = {}
    for results in reversed(run.read(folder)):  # Pipeline ranks have different weights.
        merged.update(results)
    deviations = differences(merged, expected, run.task)
    if layout.policy in PARITY_LOSS_16_BITS:
        deviations["weights"] = None
        passes = deviations["loss"] <= PARITY_LOSS_16_BITS[layout.policy]
    else:
        passes = deviations["loss"] <= PARITY_LOSS and deviations["weights"] <= PARITY_WEIGHTS
    return {**entry, **deviations, "passes": passes}


def train_in_one_process(run, arguments):
    """Train in one process with the dtype policy of the run's layout and return the results."""
    keras.config.set_dtype_policy(run.layout.policy)
    return train(run.task, arguments.steps, arguments.epsilon, run.layout.num_blocks)[1]


def default_networks(layout):
    """Return the names of the default networks for a layout."""
    if layout.recompute or layout.policy != "float32":
        deep_network = "deep_moe" if layout.experts > 1 else "deep_causal"
        return ["deep_long_causal" if layout.context > 1 else deep_network]
    if layout.context > 1:
        long = ["deep_long", "deep_long_causal"]
        return ["deep_long_moe"] if layout.experts > 1 else long
    if layout.experts > 1:
        return ["deep_moe"]
    if layout.stages > 1:
        return ["deep", "deep_tied", "deep_causal"]
    if layout.level:
        flat = layout.partition == "flat"
        return ["adamw", "sgd", "lion"] if flat else ["lamb", "adafactor", "muon"]
    return ["untied", "tied"]


def format_cell(difference):
    return "–" if difference is None else f"{difference:.1e}"


def table(entries, networks):
    """Return the results as a Markdown table with one row for each layout."""
    columns = [f"{network}: {quantity}" for network in networks for quantity in COMPARED]
    rows = [["layout", "ranks × devices", *columns, ""], ["---"] * (len(columns) + 3)]
    for name in dict.fromkeys(entry["layout"] for entry in entries):
        layout_entries = {entry["network"]: entry for entry in entries if entry["layout"] == name}
        first = next(iter(layout_entries.values()))
        row = [name.replace("@{ranks}x{devices}".format(**first), "")]
        row.append("{ranks} × {devices}".format(**first))
        for network in networks:
            entry = layout_entries.get(network, dict.fromkeys(COMPARED))
            row += [
                format_cell(entry[quantity]) if quantity in entry else "error"
                for quantity in COMPARED
            ]
        row.append("pass" if all(x["passes"] for x in layout_entries.values()) else "**fail**")
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--layouts",
        nargs="+",
        default=[layout.name for layout in DIVIDED],
        help="names or patterns: '*+shard?' and '*+whole?' for a sharded optimizer, '*pp*' for "
        "pipelines, '*cp*' for sharded sequences, '*ep*' for experts, '*+recompute' for recompute, "
        "'*+bf16' and '*+fp16' for 16 bits",
    )
    parser.add_argument(
        "--networks",
        nargs="+",
        choices=NETWORKS,
        help="networks to train (default: chosen for each layout)",
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--epsilon", type=float, default=EPSILON, help="epsilon of AdamW")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    chosen = [
        layout
        for name, layout in LAYOUTS.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in arguments.layouts)
    ]
    if not chosen:
        parser.error(f"No layout matches. Choose from {', '.join(LAYOUTS)}.")

    options = ["--steps", str(arguments.steps), "--epsilon", str(arguments.epsilon)]
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            Run(network, layout)
            for layout in chosen
            for network in arguments.networks or default_networks(layout)
        ]
        networks = list(dict.fromkeys(run.task for run in runs))
        for num_ranks in sorted({layout.ranks for layout in chosen}):
            rank_runs = [run for run in runs if run.layout.ranks == num_ranks]
            start = time.perf_counter()
            launch_runs(num_ranks, rank_runs, folder, options)
            seconds = time.perf_counter() - start
            print(f"{num_ranks} ranks: {len(rank_runs)} runs in {seconds:.0f} s", file=sys.stderr)

        def reference_key(run):
            return (run.task, run.layout.num_blocks, run.layout.policy)

        expected = {
            key: train_in_one_process(run, arguments)
            for key, run in {reference_key(run): run for run in runs}.items()
        }
        entries = [measure(run, folder, expected[reference_key(run)]) for run in runs]
    print(json.dumps(entries, indent=2) if arguments.json else table(entries, networks))
    sys.exit(not all(entry["passes"] for entry in entries))


if __name__ == "__main__":
    main()
