"""Inject faults into a job under `dtransformer launch`, compare the results, and print JSON.

    python benchmarks/drills.py --layout dp2@2x1 --faults kill,freeze,preempt
    sudo python benchmarks/drills.py --layout mp2@2x1 --faults cut,one-way --two-hosts
    python benchmarks/drills.py --table FILE ...           # table of the printed results

The job saves every second step. A few steps separate the faults. For each fault the benchmark
measures the seconds until all ranks have ended and until the next step, and the number of lost steps.
At the end the weights must equal the weights of an undisturbed run bit for bit. With fewer ranks in
between, the losses must match. See harness/two_hosts.py for the hosts.
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

STEPS_BETWEEN = 4  # Steps between a start and the next fault.
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
    parser.add_argument("--steps", type=int, default=100, help="total steps of the job")
    parser.add_argument("--hidden", type=int, default=32, help="features")
    parser.add_argument(
        "--timeout", type=float, default=240.0, help="timeout of a fault in seconds"
    )
    parser.add_argument(
        "--undisturbed",
        metavar="FILE",
        help="JSON file that stores the undisturbed run for later drills",
    )
    parser.add_argument(
        "--limit", type=float, default=3600.0, help="seconds after which no fault starts"
    )
    parser.add_argument("--log", help="file for the output of the job")
    return parser.parse_args()


def drill(args):
    """Run the job with all faults and return the records of the faults and the final comparison."""
    names, start_time = args.faults.split(","), time.monotonic()
    report = {
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
        host_context = (
            TwoHosts(folder, f"dt{os.getpid()}") if args.two_hosts else contextlib.nullcontext()
        )
        hosts = stack.enter_context(host_context)
        run = Run(args, f"{folder}/run", args.steps, SECONDS_OF_A_STEP, args.min_ranks, hosts)
        stack.callback(run.end)
        phase = "the start"
        try:
            *_, last = run.steps_until(STEPS_BETWEEN, args.timeout)
            for phase in names:
                if time.monotonic() - start_time > args.limit:
                    break
                record, last = run_fault(run, phase, last, disk, args)
                report["faults"].append(record)
                print(json.dumps(record), file=sys.stderr, flush=True)
            phase = "the end"
            run.hurry()
            _, ended = run.wait_for(ENDED, args.timeout)
            run.process.wait(60)
            phase = "the undisturbed run"
            expected = undisturbed(args, f"{folder}/whole")
        except Failed as error:
            report["failed"] = f"{phase}: {error}"
        else:
            losses = run.losses()
            report |= {
                "weights_equal": [int(ended[1]), ended[2]] == [args.steps, expected["weights"]],
                "losses_differ_by": max(
                    abs(losses[int(step)] / loss - 1) for step, loss in expected["losses"].items()
                ),
                "exit_code": run.process.returncode,
            }
        if args.log:
            with open(args.log, "w") as file:
                file.writelines(run.seen)
    return report


def undisturbed(args, folder):
    """Return settings, checksum of the weights and losses of a run without faults."""
    file = args.undisturbed and pathlib.Path(args.undisturbed)
    settings = {name: getattr(args, name) for name in ("layout", "steps", "dropout", "hidden")}
    if file and file.exists():
        report = json.loads(file.read_text())
        if report["what"] != settings:
            raise Failed(f"{file} has a run with {report['what']}, but this drill has {settings}.")
        return report
    run = Run(args, folder, args.steps, 0.0)
    try:
        _, ended = run.wait_for(ENDED, args.timeout)
        run.process.wait(60)
    finally:
        run.end()
    report = {"what": settings, "weights": ended[2], "losses": run.losses()}
    if file:
        file.write_text(json.dumps(report))
    return report


def run_fault(run, name, last, disk, args):
    """Inject a fault and return its record and the last step after it."""
    mark, fault = len(run.seen), FAULTS[name](run, disk)
    seen_at, _ = run.wait_for(fault.seen, args.timeout)
    fault.repair()
    steps_before = [last, *run.steps_since(mark)]
    next_at, first, last = run.steps_until(STEPS_BETWEEN, args.timeout)
    return {
        "fault": name,
        "ranks": run.num_ranks,
        "seconds_to_end": round(seen_at - fault.at, 1),
        "seconds_to_next_step": round(next_at - fault.at, 1),
        "steps_lost": max(steps_before) - (first - 1),
        "message": run.last_words_since(mark),
    }, last


def end_on_signal(signal_number, frame):
    """End the drill on SIGTERM and report the results so far."""
    raise Failed(ASKED)


if __name__ == "__main__":
    arguments = parse_arguments()
    if arguments.table:
        print(table(arguments.table))
    else:
        signal.signal(signal.SIGTERM, end_on_signal)
        result = drill(arguments)
        print(json.dumps(result, indent=2))
        sys.exit(result["failed"])
