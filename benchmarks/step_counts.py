"""Count the operations of a training step by the blocks of a network; print JSON.

    python benchmarks/step_counts.py [--jit false,auto,true] [--clip 1.0] [--operations]

A GPU waits for the host if a step has many small operations. This script counts them on a CPU, on the
GPU code path, for a language model with blocks of the 355M size and few tokens. It compares a network
of four blocks with one of eight. The counts of a block include its gradients, gradient norms and
update. `executed` excludes constants, arguments and reshapes. `kernels` also excludes operations that
only pass a buffer on, and the content of XLA's programs, see benchmarks/gpu_compiled.py.
`graph_nodes` are all nodes of the step's optimized graph, without the functions that it calls.
"""

import argparse
import json
import os
import subprocess
import sys

import paths  # noqa: F401

from harness.gpu_branch import BRANCH, FLAGS_OF_XLA

_MODES = {"false": False, "auto": "auto", "true": True}
_SIZES = {"hidden_size": 1024, "num_heads": 16, "max_length": 16, "implementation": "reference"}
_BLOCKS = 4, 8


def count(mode, clip, blocks):
    """Return the executed operations of a step, and the nodes of its largest graph."""
    import keras
    import numpy as np

    import dtransformer
    from dtransformer import _compat
    from dtransformer.models import CausalLM
    from harness.executed_operations import count_operations

    network = CausalLM(1000, num_layers=blocks, dropout_rate=0.0, pad_id=None, **_SIZES)
    trainer = dtransformer.Trainer(network)
    optimizer = keras.optimizers.AdamW(1e-3, global_clipnorm=clip or None)
    trainer.compile(optimizer, jit_compile=_MODES[mode])
    ids = np.random.default_rng(0).integers(1, 1000, (2, 17))

    def step():
        trainer.train_on_batch(ids[:, :-1], ids[:, 1:])

    with _compat.collect_graphs() as graphs:
        step()
    step()
    counts = count_operations(step)
    # The list is empty with clusters, because the trainer collects the graphs itself.
    counts["nodes"] = max((len(graph.node) for graph in graphs), default=0)
    return counts


def work(mode, clip):
    """Print the counts of a block and of the rest of a step."""
    import functools

    import keras

    import dtransformer
    from harness.executed_operations import counts_by_block

    keras.config.set_dtype_policy("mixed_bfloat16")
    dtransformer.init()
    print(json.dumps(counts_by_block(functools.partial(count, mode, clip), _BLOCKS)))


def main():
    from harness.executed_operations import sums

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jit", default=",".join(_MODES), help="modes, separated by commas")
    parser.add_argument("--clip", type=float, default=0.0, help="global_clipnorm of the optimizer")
    parser.add_argument("--operations", action="store_true", help="print the types of operations")
    parser.add_argument("--worker", choices=_MODES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.worker, args.clip)
    for mode in args.jit.split(","):
        # TensorFlow reads the flags once, so each mode has a process.
        environment = {**os.environ, BRANCH: "1", "TF_XLA_FLAGS": " ".join(FLAGS_OF_XLA)}
        command = [sys.executable, __file__, "--worker", mode, "--clip", str(args.clip)]
        completed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        parts = json.loads(completed.stdout.decode().splitlines()[-1])
        result = {"jit_compile": _MODES[mode], "clip": args.clip or None}
        for name, counts in zip(("per_block", "fixed"), parts):
            nodes = counts.pop("nodes")
            result[name] = sums(counts) | ({"graph_nodes": nodes} if nodes else {})
            if args.operations:
                result[f"{name}_operations"] = {op: n for op, n in counts.items() if n}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
