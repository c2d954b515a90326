"""Compare losses of layouts on one GPU with a CPU: meshes of logical GPUs, and ranks with Gloo."""

import pathlib
import tempfile
import threading
import time

import numpy as np

from benchmarks.gpu_parts.numbers import ON_CPUS, run_tasks
from harness.layouts import ALONE
from harness.runs import Run, launch_runs

_MESH = """
    causal/mp2@1x2+rows+sp llama/mp4@1x4+sp untied/dp2mp2@1x4+rows+sp
    adamw/dp4@1x4+shard3 sgd/dp2mp2@1x4+shard1 long_causal/cp2mp2@1x4+ring
    long/cp2@1x2+all_gather moe/dp2ep2@1x2 moe/dp2mp2ep2m2@1x4+rows+sp+recompute
    causal/mp2@1x2+bf16 bert/mp2@1x2
""".split()
_RANKS = """
    causal/dp2@2x1 adamw/dp2@2x1+shard1 adamw/dp2@2x1+shard2 adamw/dp2@2x1+shard3
    deep_causal/pp2m4-1f1b@2x1 deep_causal/pp2m4-zb_h1@2x1 moe/dp2ep2@2x1 causal/mp2@2x1
    tied/dp2mp2@2x2 deep_tied/mp2pp2m2-1f1b@2x2
""".split()


def mesh(smoke, seconds, **_):
    """Yield differences between the losses of meshes in one process and of a CPU."""
    yield from parity(_MESH[:2] if smoke else _MESH, seconds)


def ranks(smoke, seconds, **_):
    """Yield differences between the losses of layouts of two ranks and of a CPU."""
    yield from parity(_RANKS[:1] if smoke else _RANKS, seconds)


def parity(names, seconds=300):
    """Yield differences between the losses of runs and of a CPU. All runs need equally many ranks."""
    runs = [Run.from_name(name) for name in names]
    references = list(dict.fromkeys(run.task for run in runs))
    with tempfile.TemporaryDirectory() as folder:
        cpu, gpu = (pathlib.Path(folder) / place for place in ("cpu", "gpu"))
        gpu.mkdir()
        threads = [
            threading.Thread(target=run_tasks, args=(references, cpu, ON_CPUS, seconds)),
            threading.Thread(target=launch_runs, args=(runs[0].layout.ranks, runs, gpu)),
        ]
        for thread in threads:
            thread.start()
        while runs:
            is_last = not any(thread.is_alive() for thread in threads)
            time.sleep(0.5)
            for run in [run for run in runs if is_last or _has_ended(run, gpu, cpu)]:
                runs.remove(run)
                yield {"layout": run.name, **_compare_losses(run, gpu, cpu)}


def _has_ended(run, gpu, cpu):
    return run.has_ended(gpu) and Run(run.task, ALONE).has_ended(cpu)


def _compare_losses(run, gpu, cpu):
    expected = Run(run.task, ALONE)
    if errors := run.errors(gpu) or expected.errors(cpu):
        return {"error": errors[-600:]}
    losses = expected.read(cpu)[0]["losses"]
    actual = run.read(gpu)[-1]["losses"]  # The last pipeline stage has the losses.
    return {"losses_apart": float(np.abs(actual / losses - 1).max()), "last": float(actual[-1])}
