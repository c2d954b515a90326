"""Runs tasks on this rank and writes what they give: the program that is launched.

    horovodrun -np 2 python -m harness.rank FOLDER TASK/LAYOUT ...

A task that raises is the end of its run, not of the others; the traceback is written instead
of results. One that does not end prints where all threads are, and the rank ends.
"""

import argparse
import faulthandler
import gc
import importlib
import inspect
import os
import resource
import signal
import sys
import time
import traceback

from harness.gpu_branch import FLAGS_OF_XLA

# TF32 has 10 bits of a product's 23: parity is of float32. CUDA's libraries read it when they start.
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
os.environ.setdefault("TF_XLA_FLAGS", " ".join(FLAGS_OF_XLA))

import keras

import dtransformer
from harness import training
from harness.networks import EPSILON
from harness.quick import compile_quickly, leave_graphs_as_they_are
from harness.runs import SECONDS_OF_A_RUN, Run

RANK = int(os.environ.get("HOROVOD_RANK", "0"))
RUNS_OF_GARBAGE = 8  # that is collected together


def task_of(name):
    """Return the function of a task's name."""
    if ":" not in name:
        return training.task_of(name)
    module, _, name = name.partition(":")
    return importlib.import_module(module).TASKS[name]


def do(run, is_quick=False, is_short=False, **options):
    """Start the layout and do the task; return its results, and the seconds of its parts: two dicts.

    Args:
        run: a `Run`.
        is_quick: whether TensorFlow optimizes no graphs.
        is_short: whether the task may leave out some of what it does.
        **options: arguments for a task that takes them: `folder`, `layout` and others.
    """
    begin = time.monotonic()
    task = task_of(run.task)
    dtransformer.set_seed(0)
    run.layout.start()
    if is_quick:
        leave_graphs_as_they_are()
    started = time.monotonic()
    taken = inspect.signature(task).parameters
    options |= {"layout": run.layout, "is_short": is_short}
    results = task(**{name: value for name, value in options.items() if name in taken}) or {}
    first_step = results.pop("first_step", 0.0)  # training.py knows it
    rest = time.monotonic() - started - first_step
    return results, {"start": started - begin, "first_step": first_step, "rest": rest}


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("runs", nargs="+", type=Run.of, metavar="TASK/LAYOUT")
    parser.add_argument("--steps", type=int, default=training.STEPS)
    parser.add_argument("--epsilon", type=float, default=EPSILON)
    parser.add_argument("--seconds", type=int, default=SECONDS_OF_A_RUN, help="of a run at most")
    parser.add_argument("--quick", action="store_true", help="compile quickly")
    parser.add_argument("--short", action="store_true", help="fewer steps, and searches")
    arguments = parser.parse_args()
    if arguments.quick:
        compile_quickly()
    if arguments.short:
        arguments.steps = min(arguments.steps, training.SHORT_STEPS)
    options = {name: getattr(arguments, name) for name in ("folder", "steps", "epsilon")}
    # The watchdog has faulthandler's own timer; this one needs no thread of Python, either.
    faulthandler.enable()
    faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)
    for number, run in enumerate(arguments.runs, 1):
        signal.alarm(arguments.seconds)
        begin = cpu_seconds()
        try:
            results, seconds = do(run, arguments.quick, arguments.short, **options)
            run.write(arguments.folder, RANK, results)
            if RANK == 0:
                run.append_times(arguments.folder, {**seconds, "cpu": cpu_seconds() - begin})
        except Exception:  # the same on all ranks, as a rule: the next run can begin
            text = f"{run.name} failed on rank {RANK}:\n{traceback.format_exc()}"
            print(text, file=sys.stderr, flush=True)
            run.error_file(arguments.folder, RANK).write_text(text)
        collects = number % RUNS_OF_GARBAGE == 0
        if collects:
            gc.unfreeze()
        keras.backend.clear_session(free_memory=collects)  # names begin anew
        gc.freeze()  # what is left is not searched for garbage meanwhile
    signal.alarm(arguments.seconds)
    dtransformer.shutdown()  # waits for ranks that are still reading


if __name__ == "__main__":
    main()
