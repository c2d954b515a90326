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
import pathlib
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time

import paths  # noqa: F401

from harness.drill_faults import FAULTS, Disk
from harness.layouts import layout_of
from harness.two_hosts import INTERFACE, TwoHosts

STEP = re.compile(r"<stdout>:step (\d+) loss ([\d.e+-]+)")
ENDED = re.compile(r"<stdout>:ended at (\d+) with (\w+)")
LAST_WORDS = re.compile(r"dtransformer: the job ends: [^;]*")
STEPS_BETWEEN = 4  # a start and the next fault
SECONDS_OF_A_STEP = 0.2
ROOT = pathlib.Path(__file__).parents[1]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", default="dp2@2x1", help="see harness/layouts.py")
    parser.add_argument("--faults", default="kill", help=", ".join(FAULTS))
    parser.add_argument("--table", nargs="+", metavar="FILE", help="print a table for docs")
    parser.add_argument("--two-hosts", action="store_true")
    parser.add_argument("--min-ranks", type=int)
    parser.add_argument("--seconds", type=float, default=50.0, help="stall_seconds")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--timeout", type=float, default=240.0, help="of a fault, in seconds")
    return parser.parse_args()


class Run:
    """A job under `dtransformer launch`, whose output is read by a thread.

    Args:
        args: the options.
        folder: where it saves, and ranks tell their numbers.
        steps: number of steps.
        pause: seconds that a step takes besides.
        hosts: the `TwoHosts` that it runs on; None for this one.
    """

    def __init__(self, args, folder, steps, pause, hosts=None):
        self.args, self.folder, self.layout = args, pathlib.Path(folder), layout_of(args.layout)
        (self.folder / "pids").mkdir(parents=True, exist_ok=True)
        worker = [sys.executable, "-m", "harness.drill_rank", str(folder), args.layout]
        worker += [str(steps), str(pause), str(args.dropout)]
        launch = [sys.executable, "-m", "dtransformer.cli", "launch", "--restarts", "99"]
        launch += ["--cool-down", "5", "-np", str(self.layout.ranks)]
        if args.min_ranks:
            launch += ["--min-ranks", str(args.min_ranks)]
        settings = {"PYTHONPATH": str(ROOT), "DTRANSFORMER_STALL_SECONDS": str(args.seconds)}
        self.hosts = hosts
        if hosts is not None:
            file, slots = self.folder / "hosts.txt", self.layout.ranks // 2
            file.write_text("".join(f"{one} slots={slots}\n" for one in hosts.addresses))
            launch += ["--hosts", str(file), "--network-interface", INTERFACE]
            launch = hosts.command(*launch, "--ssh-identity-file", hosts.key)
            settings["DTRANSFORMER_BIND_CORES"] = "0"  # both hosts have the same ones
        command = ["env", *(f"{name}={value}" for name, value in settings.items())]
        self.process = subprocess.Popen(
            [*command, *launch, "--", *worker],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        self.lines, self.seen = queue.Queue(), []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.put((time.time(), line))
        self.lines.put((time.time(), None))

    def wait_for(self, pattern, timeout):
        """Return when a line with a pattern came, and its match."""
        end = time.time() + timeout
        while True:
            try:
                at, line = self.lines.get(timeout=max(end - time.time(), 0.01))
            except queue.Empty:
                raise SystemExit(self._failed(f"no {pattern!r} within {timeout:.0f} s")) from None
            if line is None:
                raise SystemExit(self._failed(f"ended before {pattern!r}"))
            self.seen.append(line)
            if found := re.search(pattern, line):
                return at, found

    def _failed(self, told):
        self.process.terminate()
        return f"{self.args.layout}: {told}:\n{''.join(self.seen)[-6000:]}"

    def steps_until(self, number, timeout):
        """Wait for some steps; return the moment of the first, its number, and the last's."""
        first = None
        while True:
            at, found = self.wait_for(STEP.pattern, timeout)
            last = int(found[1])
            first = first or (at, last)
            if last >= first[1] + number - 1:
                return *first, last

    def pid(self, rank):
        """Return the number of a rank's process."""
        return int((self.folder / "pids" / str(rank)).read_text())


def drill(args):
    """Return the records of the faults, and whether the weights are the undisturbed run's."""
    faults = args.faults.split(",")
    steps = (STEPS_BETWEEN + 2) * (len(faults) + 1) + 4
    with tempfile.TemporaryDirectory() as folder:
        quiet = argparse.Namespace(**{**vars(args), "min_ranks": None})
        whole = Run(quiet, f"{folder}/whole", steps, 0.0)
        _, expected = whole.wait_for(ENDED.pattern, 300)
        whole.process.wait(60)
        records = []
        two = TwoHosts(folder) if args.two_hosts else contextlib.nullcontext()
        with Disk(f"{folder}/run", "disk-full" in faults) as disk, two as hosts:
            run = Run(args, f"{folder}/run", steps, SECONDS_OF_A_STEP, hosts)
            *_, last = run.steps_until(STEPS_BETWEEN, args.timeout)
            for name in faults:
                record, last = one_fault(run, name, last, disk, args)
                records.append(record)
                print(json.dumps(record), file=sys.stderr, flush=True)
            _, ended = run.wait_for(ENDED.pattern, args.timeout)
            run.process.wait(60)
    equal = ended[2] == expected[2] and int(ended[1]) == steps
    losses, expected_losses = losses_in(run.seen), losses_in(whole.seen)
    differences = [abs(losses[step] / loss - 1) for step, loss in expected_losses.items()]
    return {
        "layout": args.layout,
        "hosts": 2 if args.two_hosts else 1,
        "stall_seconds": args.seconds,
        "faults": records,
        "steps": steps,
        "weights_equal": equal,
        "losses_differ_by": max(differences),
        "exit_code": run.process.returncode,
    }


def one_fault(run, name, last, disk, args):
    """Let something fail; return what is seen, and the last step after it."""
    mark, fault = len(run.seen), FAULTS[name](run, disk)
    ended_at, _ = run.wait_for("dtransformer launch: .*: restart ", args.timeout)
    fault.mend()
    steps_before = [last, *steps_in(run.seen[mark:])]
    next_at, first, last = run.steps_until(STEPS_BETWEEN, args.timeout)
    words = [found[0] for line in run.seen[mark:] if (found := LAST_WORDS.search(line))]
    return {
        "layout": args.layout,
        "fault": name,
        "seconds_to_end": round(ended_at - fault.at, 1),
        "seconds_to_next_step": round(next_at - fault.at, 1),
        "steps_lost": max(steps_before) - (first - 1),
        "told": words[0].removeprefix("dtransformer: the job ends: ") if words else None,
    }, last


def losses_in(lines):
    """Return {step: loss} that lines tell; of a step that was repeated the last one."""
    found = [STEP.search(line) for line in lines]
    return {int(one[1]): float(one[2]) for one in found if one}


def steps_in(lines):
    """Return the numbers of the steps that lines tell."""
    return [int(found[1]) for line in lines if (found := STEP.search(line))]


def table(files):
    """Return the records of files as rows: what failed, how long it took, what was lost."""
    rows = [
        "| layout | hosts | faults | ended after (s) | next step after (s) | steps lost | weights |",
        "|---|---|---|---|---|---|---|",
    ]
    number = 0
    for file in files:
        run = json.loads(pathlib.Path(file).read_text())
        faults = run["faults"]
        number += len(faults)
        names = ", ".join(one["fault"] for one in faults)
        weights = "equal" if run["weights_equal"] else f"losses {run['losses_differ_by']:.0e}"
        spans = [_span([one[key] for one in faults])
                 for key in ("seconds_to_end", "seconds_to_next_step", "steps_lost")]  # fmt: skip
        cells = [f"`{run['layout']}`", run["hosts"], names, *spans, weights]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*rows, "", f"{number} faults."])


def _span(numbers):
    return f"{min(numbers):.0f}" if min(numbers) == max(numbers) else (
        f"{min(numbers):.0f}–{max(numbers):.0f}"
    )  # fmt: skip


if __name__ == "__main__":
    arguments = parse_arguments()
    if arguments.table:
        print(table(arguments.table))
    else:
        print(json.dumps(drill(arguments), indent=2))
