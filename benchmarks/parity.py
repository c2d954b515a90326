"""Training under many layouts of a job, beside training in one process.

Small encoder-decoders are trained from the same seed; losses and weights are compared.
Prints a table, or JSON. The layouts' names are in harness/layouts.py.

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
    """Return one entry of the results."""
    layout = run.layout
    entry = {"layout": layout.name, "ranks": layout.ranks, "devices": layout.devices}
    entry["network"] = run.task
    if errors := run.errors(folder):
        print(errors, file=sys.stderr)
        return {**entry, "passes": False}
    found = {}
    for results in reversed(run.read(folder)):  # ranks of a pipeline have different weights
        found.update(results)
    found = differences(found, expected, run.task)
    if layout.policy in PARITY_LOSS_16_BITS:
        found["weights"] = None
        passes = found["loss"] <= PARITY_LOSS_16_BITS[layout.policy]
    else:
        passes = found["loss"] <= PARITY_LOSS and found["weights"] <= PARITY_WEIGHTS
    return {**entry, **found, "passes": passes}


def of_one_process(run, arguments):
    """Return what one process gives, in the same number format."""
    keras.config.set_dtype_policy(run.layout.policy)
    return train(run.task, arguments.steps, arguments.epsilon, run.layout.num_blocks)[1]


def networks_of(layout):
    """Return the names of the networks that hold a layout's promises."""
    if layout.recompute or layout.policy != "float32":
        others = "deep_moe" if layout.experts > 1 else "deep_causal"
        return ["deep_long_causal" if layout.context > 1 else others]
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


def cell(difference):
    return "–" if difference is None else f"{difference:.1e}"


def table(entries, networks):
    """Return the results as a table in Markdown: one row a layout."""
    columns = [f"{network}: {what}" for network in networks for what in COMPARED]
    rows = [["layout", "ranks × devices", *columns, ""], ["---"] * (len(columns) + 3)]
    for name in dict.fromkeys(entry["layout"] for entry in entries):
        of_layout = {entry["network"]: entry for entry in entries if entry["layout"] == name}
        first = next(iter(of_layout.values()))
        row = [name.replace("@{ranks}x{devices}".format(**first), "")]
        row.append("{ranks} × {devices}".format(**first))
        for network in networks:
            entry = of_layout.get(network, dict.fromkeys(COMPARED))
            row += [cell(entry[what]) if what in entry else "error" for what in COMPARED]
        row.append("pass" if all(one["passes"] for one in of_layout.values()) else "**fail**")
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--layouts",
        nargs="+",
        default=[layout.name for layout in DIVIDED],
        help="names, or patterns of them; '*+shard?' and '*+whole?' are those of a sharded "
        "optimizer, '*pp*' those of a pipeline, '*cp*' those of sharded sequences, '*ep*' those of "
        "experts, '*+recompute', '*+bf16' and '*+fp16' those of recompute and of 16 bits",
    )
    parser.add_argument(
        "--networks",
        nargs="+",
        choices=NETWORKS,
        help="by default all that hold the layouts' promises",
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--epsilon", type=float, default=EPSILON, help="AdamW's")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    chosen = [
        layout
        for name, layout in LAYOUTS.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in arguments.layouts)
    ]
    if not chosen:
        parser.error(f"no layout has such a name; there are {', '.join(LAYOUTS)}")

    options = ["--steps", str(arguments.steps), "--epsilon", str(arguments.epsilon)]
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            Run(network, layout)
            for layout in chosen
            for network in arguments.networks or networks_of(layout)
        ]
        networks = list(dict.fromkeys(run.task for run in runs))
        for num_ranks in sorted({layout.ranks for layout in chosen}):
            together = [run for run in runs if run.layout.ranks == num_ranks]
            start = time.perf_counter()
            launch_runs(num_ranks, together, folder, options)
            seconds = time.perf_counter() - start
            print(f"{num_ranks} ranks: {len(together)} runs in {seconds:.0f} s", file=sys.stderr)
        alike = lambda run: (run.task, run.layout.num_blocks, run.layout.policy)
        expected = {
            key: of_one_process(run, arguments)
            for key, run in {alike(run): run for run in runs}.items()
        }
        entries = [measure(run, folder, expected[alike(run)]) for run in runs]
    print(json.dumps(entries, indent=2) if arguments.json else table(entries, networks))
    sys.exit(not all(entry["passes"] for entry in entries))


if __name__ == "__main__":
    main()
