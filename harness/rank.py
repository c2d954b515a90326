"""Program that executes runs on this rank and writes their results.

    horovodrun -np 2 python -m harness.rank FOLDER TASK/LAYOUT ...

If a task raises an exception, its traceback is written instead of results and the next run starts.
If a task does not end, all threads' stacks are printed and the rank ends.
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

# TF32 has only 10 of float32's 23 mantissa bits, and parity tests need float32. CUDA's libraries
# read the variable when they start.
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
os.environ.setdefault("TF_XLA_FLAGS", " ".join(FLAGS_OF_XLA))

import keras

import dtransformer
from harness import training
from harness.networks import EPSILON
from harness.quick import compile_quickly, leave_graphs_as_they_are
from harness.runs import SECONDS_OF_A_RUN, Run

RANK = int(os.environ.get("HOROVOD_RANK", "0"))
RUNS_OF_GARBAGE = 8  # Number of runs between garbage collections.


def get_task(name):
    """Return the function of a task by name."""
    if ":" not in name:
        return training.get_task(name)
    module, _, name = name.partition(":")
    return importlib.import_module(module).TASKS[name]


def execute(run, is_quick=False, is_short=False, **options):
    """Start the layout and execute the task.

    Args:
        run: A `Run`.
        is_quick: Boolean, whether to disable graph optimization.
        is_short: Boolean, whether the task may skip parts of its work.
        **options: Arguments for tasks that accept them, such as `folder` and `layout`.

    Returns:
        A tuple of two dicts: the results, and the seconds of each part.
    """
    begin_time = time.monotonic()
    task = get_task(run.task)
    dtransformer.set_seed(0)
    run.layout.start()
    if is_quick:
        leave_graphs_as_they_are()
    started = time.monotonic()
    parameters = inspect.signature(task).parameters
    options |= {"layout": run.layout, "is_short": is_short}
    results = task(**{name: value for name, value in options.items() if name in parameters}) or {}
    first_step = results.pop("first_step", 0.0)  # Only harness/training.py measures it.
    rest_seconds = time.monotonic() - started - first_step
    return results, {"start": started - begin_time, "first_step": first_step, "rest": rest_seconds}


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("runs", nargs="+", type=Run.from_name, metavar="TASK/LAYOUT")
    parser.add_argument("--steps", type=int, default=training.STEPS)
    parser.add_argument("--epsilon", type=float, default=EPSILON)
    parser.add_argument(
        "--seconds", type=int, default=SECONDS_OF_A_RUN, help="maximum seconds per run"
    )
    parser.add_argument("--quick", action="store_true", help="compile quickly")
    parser.add_argument("--short", action="store_true", help="fewer steps and searches")
    arguments = parser.parse_args()
    if arguments.quick:
        compile_quickly()
    if arguments.short:
        arguments.steps = min(arguments.steps, training.SHORT_STEPS)
    options = {name: getattr(arguments, name) for name in ("folder", "steps", "epsilon")}
    # The watchdog uses faulthandler's timer. An alarm also works without a Python thread.
    faulthandler.enable()
    faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)
    for i, run in enumerate(arguments.runs, 1):
        signal.alarm(arguments.seconds)
        begin_seconds = cpu_seconds()
        try:
            results, seconds = execute(run, arguments.quick, arguments.short, **options)
            run.write(arguments.folder, RANK, results)
            if RANK == 0:
                run.append_times(
                    arguments.folder, {**seconds, "cpu": cpu_seconds() - begin_seconds}
                )
        except Exception:  # Usually all ranks raise the same error, so the next run can start.
            text = f"{run.name} failed on rank {RANK}:\n{traceback.format_exc()}"
            print(text, file=sys.stderr, flush=True)
            run.error_file(arguments.folder, RANK).write_text(text)
        collects = i % RUNS_OF_GARBAGE == 0
        if collects:
            gc.unfreeze()
        keras.backend.clear_session(free_memory=collects)  # Layer names restart at zero.
        gc.freeze()  # Exclude the remaining objects from garbage collection.
    signal.alarm(arguments.seconds)
    dtransformer.shutdown()  # This waits for ranks that are still reading.


if __name__ == "__main__":
    main()
