"""Let ranks and hosts fail while a job trains under `dtransformer launch`, and compare; print JSON.

    python benchmarks/drills.py --layout dp2@2x1 --faults kill,freeze,preempt
    sudo python benchmarks/drills.py --layout mp2@2x1 --faults cut,one-way --two-hosts
    python benchmarks/drills.py --table FILE ...           # of what it has printed

A run saves every second step. Each fault comes some steps after the one before it; then the time
until the ranks have ended and until the next step is taken, and the steps that were lost are
counted. In the end the weights have to be those of an undisturbed run, to the last bit, where the
layout is the same; with fewer ranks in between, the losses. See harness/two_hosts.py for the hosts.
"""

import argparse
import contextlib
import json
import os
import pathlib
import signal
import sys
import tempfile
import time

import paths  # noqa: F401

from harness.drill_faults import FAULTS, Disk
from harness.drill_run import ENDED, Failed, Run
from harness.drill_table import ASKED, table
from harness.two_hosts import TwoHosts

STEPS_BETWEEN = 4  # a start and the next fault
SECONDS_OF_A_STEP = 0.2


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", default="dp2@2x1", help="see harness/layouts.py")
    parser.add_argument("--faults", default="kill", help=", ".join(FAULTS))
    parser.add_argument("--table", nargs="+", metavar="FILE", help="print a table for docs")
    parser.add_argument("--two-hosts", action="store_true")
    parser.add_argument("--min-ranks", type=int)
    parser.add_argument("--seconds", type=float, default=50.0, help="stall_seconds")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=100, help="of the whole job")
    parser.add_argument("--hidden", type=int, default=32, help="features")
    parser.add_argument("--timeout", type=float, default=240.0, help="of a fault, in seconds")
    parser.add_argument("--undisturbed", metavar="FILE", help="keeps that run between drills")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds; no fault after them")
    parser.add_argument("--log", help="a file for what the job prints")
    return parser.parse_args()


def drill(args):
    """Return what is seen: the records of the faults, and how the run has ended."""
    names, begin = args.faults.split(","), time.monotonic()
    seen = {
        "layout": args.layout,
        "hosts": 2 if args.two_hosts else 1,
        "stall_seconds": args.seconds,
        "min_ranks": args.min_ranks,
        "steps": args.steps,
        "faults": [],
        "failed": None,
    }
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        disk = stack.enter_context(Disk(f"{folder}/run", "disk-full" in names))
        two = TwoHosts(folder, f"dt{os.getpid()}") if args.two_hosts else contextlib.nullcontext()
        hosts = stack.enter_context(two)
        run = Run(args, f"{folder}/run", args.steps, SECONDS_OF_A_STEP, args.min_ranks, hosts)
        stack.callback(run.end)
        at = "the start"
        try:
            *_, last = run.steps_until(STEPS_BETWEEN, args.timeout)
            for at in names:
                if time.monotonic() - begin > args.limit:
                    break
                record, last = one_fault(run, at, last, disk, args)
                seen["faults"].append(record)
                print(json.dumps(record), file=sys.stderr, flush=True)
            at = "the end"
            run.hurry()
            _, ended = run.wait_for(ENDED, args.timeout)
            run.process.wait(60)
            at = "the undisturbed run"
            expected = undisturbed(args, f"{folder}/whole")
        except Failed as error:
            seen["failed"] = f"{at}: {error}"
        else:
            losses = run.losses()
            seen |= {
                "weights_equal": [int(ended[1]), ended[2]] == [args.steps, expected["weights"]],
                "losses_differ_by": max(
                    abs(losses[int(step)] / loss - 1) for step, loss in expected["losses"].items()
                ),
                "exit_code": run.process.returncode,
            }
        if args.log:
            with open(args.log, "w") as file:
                file.writelines(run.seen)
    return seen


def undisturbed(args, folder):
    """Return the weights' checksum and the losses of a run to which nothing happens."""
    file = args.undisturbed and pathlib.Path(args.undisturbed)
    what = {name: getattr(args, name) for name in ("layout", "steps", "dropout", "hidden")}
    if file and file.exists():
        found = json.loads(file.read_text())
        if found["what"] != what:
            raise Failed(f"{file} is of {found['what']}, and not of {what}")
        return found
    run = Run(args, folder, args.steps, 0.0)
    try:
        _, ended = run.wait_for(ENDED, args.timeout)
        run.process.wait(60)
    finally:
        run.end()
    found = {"what": what, "weights": ended[2], "losses": run.losses()}
    if file:
        file.write_text(json.dumps(found))
    return found


def one_fault(run, name, last, disk, args):
    """Let something fail; return what is seen, and the last step after it."""
    mark, fault = len(run.seen), FAULTS[name](run, disk)
    seen_at, _ = run.wait_for(fault.seen, args.timeout)
    fault.mend()
    steps_before = [last, *run.steps_since(mark)]
    next_at, first, last = run.steps_until(STEPS_BETWEEN, args.timeout)
    return {
        "fault": name,
        "ranks": run.num_ranks,
        "seconds_to_end": round(seen_at - fault.at, 1),
        "seconds_to_next_step": round(next_at - fault.at, 1),
        "steps_lost": max(steps_before) - (first - 1),
        "told": run.last_words_since(mark),
    }, last


def asked_to_end(number, frame):
    """End with what has been seen."""
    raise Failed(ASKED)


if __name__ == "__main__":
    arguments = parse_arguments()
    if arguments.table:
        print(table(arguments.table))
    else:
        signal.signal(signal.SIGTERM, asked_to_end)
        result = drill(arguments)
        print(json.dumps(result, indent=2))
        sys.exit(result["failed"])
