"""Largest loss differences of each technique in the multi-rank runs that the tests kept.

    DTRANSFORMER_RUNS=FOLDER make test-long
    python benchmarks/parity_summary.py FOLDER [--json]

Reads the runs of the networks in harness/networks.py with at least 20 steps. Compares the losses of
rank 0 and of one process that trained the same network. A run counts for each of its techniques.
"""

import argparse
import json
import pathlib

import numpy as np
import paths  # noqa: F401

from harness.layouts import ALONE, parse_layout
from harness.networks import NETWORKS
from harness.runs import USED, Run
from harness.training import STEPS

SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "interleaved",
    "zb_h1": "ZB-H1",
    "zb_v": "ZB-V",
}


def techniques(layout):
    """Return the names of the techniques of a `Layout`."""
    level = f"`optimizer_shard={layout.level}`"
    uses = {
        "GPU code path, run on CPUs": layout.as_on_gpus,
        "data parallelism": layout.data > 1,
        "tensor parallelism": layout.model > 1,
        "sequence parallelism": layout.sequence,
        "embedding tables sharded by rows": layout.rows,
        "context parallelism": layout.context > 1,
        "expert parallelism": layout.experts > 1,
        level: layout.level > 0 and layout.partition == "flat",
        f'{level}, partition `"whole"`': layout.level > 0 and layout.partition == "whole",
        f"pipeline, {SCHEDULES[layout.schedule]}": layout.stages > 1,
        "recompute": layout.recompute,
    }
    return [name for name, is_used in uses.items() if is_used]


def read_losses(folder):
    """Return a dict that maps the network and the `Layout` of each run to the losses of rank 0."""
    losses = {}
    for path in folder.glob("*-rank0.npz"):
        task, layout = path.stem.removesuffix("-rank0").split("-", 1)
        network = task.removesuffix(USED)
        if network in NETWORKS:
            run = Run(task, parse_layout(layout))
            losses[network, run.layout] = np.asarray(run.read(folder)[0]["losses"], np.float64)
    return losses


def summarize(losses):
    """Return a dict that maps each technique to the relative loss differences of its runs."""
    summary = {}
    for (network, layout), values in losses.items():
        expected = losses.get((network, ALONE))
        if layout == ALONE or expected is None or len(values) < STEPS:
            continue
        difference = float(np.max(np.abs(values - expected) / np.abs(expected)))
        for technique in ["all", *techniques(layout)]:
            summary.setdefault(technique, []).append(difference)
    return summary


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="folder of `DTRANSFORMER_RUNS`")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    summary = summarize(read_losses(arguments.folder))
    if arguments.json:
        print(json.dumps(summary, indent=2))
        return
    print("| technique | runs | relative difference of a loss |\n|---|---:|---:|")
    for technique in sorted(summary):
        differences = summary[technique]
        print(f"| {technique} | {len(differences)} | {max(differences):.1e} |")


if __name__ == "__main__":
    main()
