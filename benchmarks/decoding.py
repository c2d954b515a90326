"""Compare the decoding speed of two versions of the package and print JSON.

    python benchmarks/decoding.py OLD_FOLDER NEW_FOLDER
    python benchmarks/decoding.py OLD_FOLDER NEW_FOLDER --beams 1,4 --rounds 5

A folder is a checkout of the repository. Each measurement runs in a separate process. The versions
alternate and take turns to start. `wall` and `cpu` are ratios of medians, old to new: above 1, the new
version is faster. `cpu` is the processor time, which other processes disturb less. `nodes` are the
nodes of the compiled function before TensorFlow optimizes it, and `body` the nodes of its loop body.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time


def measure(beams, repeats=5):
    """Return the median times of one call, the sizes of the graph and a checksum of the ids."""
    import numpy as np
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)

    from dtransformer.models import CausalLM
    from dtransformer.parallel.decoding import loops

    graphs = []
    to_local_function = loops._on_one_device

    def record_graph(*args):
        run = to_local_function(*args)
        graphs.extend(
            cell.cell_contents.graph.as_graph_def()
            for cell in run.__closure__
            if hasattr(cell.cell_contents, "graph")
        )
        return run

    loops._on_one_device = record_graph
    network = CausalLM(
        1000,
        hidden_size=128,
        num_heads=4,
        num_kv_heads=2,
        num_layers=4,
        positions="rotary",
        norm="rms_norm",
        gated=True,
        hidden_act="silu",
        use_bias=False,
        pad_id=0,
    )
    prompts = np.random.default_rng(0).integers(1, 1000, [8, 32])
    ids = network.generate(prompts, 96, beam_size=beams)
    functions = graphs[0].library.function
    wall = []
    cpu = []
    for _ in range(repeats):
        wall_start = time.perf_counter()
        cpu_start = time.process_time()
        network.generate(prompts, 96, beam_size=beams)
        wall.append(time.perf_counter() - wall_start)
        cpu.append(time.process_time() - cpu_start)
    return {
        "wall": statistics.median(wall),
        "cpu": statistics.median(cpu),
        "nodes": len(graphs[0].node) + sum(len(function.node_def) for function in functions),
        "body": max(len(function.node_def) for function in functions),
        "checksum": int(np.sum(ids)),
    }


def run(folder, beams):
    """Return the result of `measure` with the package of a folder, in a new process."""
    command = [sys.executable, os.path.abspath(__file__), "--measure", str(beams)]
    environment = {**os.environ, "PYTHONPATH": os.path.abspath(folder)}
    result = subprocess.run(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, check=True, text=True
    )
    return json.loads(result.stdout.splitlines()[-1])


def compare(old, new, beams, rounds):
    """Return the ratios of old to new times, and the sizes of both graphs."""
    results = {old: [], new: []}
    for index in range(rounds):
        for folder in (old, new) if index % 2 else (new, old):
            results[folder].append(run(folder, beams))
    if results[old][0]["checksum"] != results[new][0]["checksum"]:
        raise ValueError(f"The versions generate different ids with {beams} beams.")
    row = {"beams": beams}
    for name in ("wall", "cpu"):
        medians = {
            folder: statistics.median(result[name] for result in results[folder])
            for folder in results
        }
        row[name] = round(medians[old] / medians[new], 3)
        row[f"{name}_s"] = [round(seconds, 4) for seconds in medians.values()]
    for name in ("nodes", "body"):
        row[name] = [results[folder][0][name] for folder in results]
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", help="checkouts of the old and of the new version")
    parser.add_argument("--beams", default="1,4", help="comma-separated numbers of beams")
    parser.add_argument("--rounds", type=int, default=5, help="processes per version")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure)))
        return
    if len(args.folders) != 2:
        parser.error("expected two folders")
    for beams in map(int, args.beams.split(",")):
        print(json.dumps(compare(*args.folders, beams, args.rounds)), flush=True)


if __name__ == "__main__":
    main()
