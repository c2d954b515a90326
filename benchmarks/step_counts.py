"""Count the operations of a training step by the weights and blocks of a network; print JSON.

    python benchmarks/step_counts.py [--jit false,auto,true] [--operations]

A GPU waits for the host if a step has many small operations. This script counts them on a CPU, on the
GPU code path, for a language model with blocks of the 355M size and few tokens. It compares a network
of four blocks with one of eight. The counts of a block include its gradients, gradient norms and update.
`executed` excludes constants, arguments and reshapes. `kernels` also excludes operations that only
pass a buffer on, and the content of XLA's programs, see benchmarks/gpu_compiled.py.
"""

import argparse
import collections
import json
import os
import subprocess
import sys

import paths  # noqa: F401

from harness.gpu_branch import BRANCH, FLAGS_OF_XLA

_MODES = {"false": False, "auto": "auto", "true": True}
_SIZES = {"hidden_size": 1024, "num_heads": 16, "max_length": 16, "implementation": "reference"}
_BLOCKS = 4, 8


def count(mode, blocks, optimizer_options):
    """Return the executed operations of a step, and the nodes of its largest graph."""
    import keras
    import numpy as np

    import dtransformer
    from dtransformer import _compat
    from dtransformer.models import CausalLM
    from harness.executed_operations import count_operations

    keras.config.set_dtype_policy("mixed_bfloat16")
    network = CausalLM(1000, num_layers=blocks, dropout_rate=0.0, pad_id=None, **_SIZES)
    trainer = dtransformer.Trainer(network)
    trainer.compile(keras.optimizers.AdamW(1e-3, **optimizer_options), jit_compile=_MODES[mode])
    ids = np.random.default_rng(0).integers(1, 1000, (2, 17))

    def step():
        trainer.train_on_batch(ids[:, :-1], ids[:, 1:])

    with _compat.collect_graphs() as graphs:
        step()
    step()
    counts = count_operations(step)
    counts["nodes"] = max((len(graph.node) for graph in graphs), default=0)
    return counts


def work(mode, clip):
    import dtransformer

    dtransformer.init()
    options = {"global_clipnorm": clip} if clip else {}
    small, large = (count(mode, blocks, options) for blocks in _BLOCKS)
    added_blocks = _BLOCKS[1] - _BLOCKS[0]
    per_block = {op: (large[op] - small[op]) / added_blocks for op in large}
    fixed = {op: small[op] - _BLOCKS[0] * per_block[op] for op in large}
    print(json.dumps([per_block, fixed]))


def summary(counts):
    """Return the sums of a dict of operation counts."""
    from harness.executed_operations import WITHOUT_KERNEL, XLA_PROGRAM

    counts = collections.Counter(counts)
    nodes = counts.pop("nodes")
    executed = sum(counts.values())
    programs = counts[XLA_PROGRAM]
    kernels = executed - programs - sum(counts[op] for op in WITHOUT_KERNEL)
    # With clusters, the trainer collects the graphs itself.
    sums = {"graph_nodes": nodes} if nodes else {}
    return sums | {"executed": executed, "programs": programs, "kernels": kernels}


def main():
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
        per_block, fixed = json.loads(completed.stdout.decode().splitlines()[-1])
        result = {"jit_compile": _MODES[mode], "clip": args.clip or None}
        result |= {"per_block": summary(per_block), "fixed": summary(fixed)}
        if args.operations:
            result["operations"] = {op: n for op, n in per_block.items() if n}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
