"""Job under `dtransformer launch` for drills, and a parser of its output."""

import pathlib
import queue
import re
import subprocess
import sys
import threading
import time

from harness.layouts import parse_layout
from harness.two_hosts import INTERFACE

STEP = re.compile(r"(?:<stdout>:|\] )step (\d+) loss ([\d.e+-]+)")
ENDED = re.compile(r"(?:<stdout>:|\] )ended at (\d+) with (\w+)")
RESTART = re.compile("dtransformer launch: .*: restart ")
LAST_WORDS = re.compile(r"dtransformer: the job ends: ([^;]*)")
_RANKS = re.compile(r"dtransformer launch: starting (\d+) ranks")
_ROOT = pathlib.Path(__file__).parents[1]


class Failed(Exception):
    """The job did not print an expected line."""


class Run:
    """Job under `dtransformer launch`. A thread reads its output.

    Args:
        args: Options of benchmarks/drills.py.
        folder: Folder for checkpoints and the ranks' process ids.
        steps: Number of steps.
        pause: Seconds to sleep after each step.
        min_ranks: Minimum number of ranks to resume with. `None` requires all.
        hosts: `TwoHosts` to run on, or `None` for this host.
    """

    def __init__(self, args, folder, steps, pause, min_ranks=None, hosts=None):
        self.args, self.folder, self.hosts = args, pathlib.Path(folder), hosts
        layout = parse_layout(args.layout)
        self.num_ranks = layout.ranks  # Number of ranks of the current start.
        self.hosts_file = self.folder / "hosts.txt"
        (self.folder / "orders").mkdir(parents=True, exist_ok=True)
        worker = [sys.executable, "-m", "harness.drill_rank", folder, args.layout, steps]
        worker += ["--pause", pause, "--dropout", args.dropout, "--hidden", args.hidden]
        worker += ["--blocks", layout.stages]
        launch = [sys.executable, "-m", "dtransformer.cli", "launch", "--restarts", 99]
        launch += ["--cool-down", 5, "-np", self.num_ranks, "--hosts", self.hosts_file]
        if min_ranks:
            launch += ["--min-ranks", min_ranks]
        settings = {"PYTHONPATH": _ROOT, "DTRANSFORMER_STALL_SECONDS": args.seconds}
        self.give_slots(self.num_ranks)
        if hosts is not None:
            launch += ["--network-interface", INTERFACE]
            launch = hosts.command(*launch, "--ssh-identity-file", hosts.key)
            settings["DTRANSFORMER_BIND_CORES"] = 0  # Both hosts share the same cores.
        command = ["env", *(f"{name}={value}" for name, value in settings.items())]
        self.process = subprocess.Popen(
            [*map(str, [*command, *launch, "--", *worker])],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=_ROOT,
            start_new_session=True,
        )
        self._lines, self.seen = queue.Queue(), []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self._lines.put((time.time(), line))
        self._lines.put((time.time(), None))

    def give_slots(self, count):
        """Set the number of ranks that the next start may use, split evenly over the hosts."""
        hosts = ["localhost"] if self.hosts is None else self.hosts.addresses
        lines = [f"{host} slots={count // len(hosts)}\n" for host in hosts]
        self.hosts_file.write_text("".join(lines))

    def wait_for(self, pattern, timeout):
        """Wait for a line that matches a pattern.

        Returns:
            A `(time, match)` tuple.

        Raises:
            Failed: If no such line is printed in time, or if the job ends before.
        """
        end = time.time() + timeout
        while True:
            try:
                at, line = self._lines.get(timeout=max(end - time.time(), 0.01))
            except queue.Empty:
                raise Failed(f"No line matched {pattern!r} within {timeout:.0f} s.") from None
            if line is None:
                raise Failed(f"The job ended before a line matched {pattern!r}.")
            self.seen.append(line)
            if match := _RANKS.search(line):
                self.num_ranks = int(match[1])
            if match := re.search(pattern, line):
                return at, match

    def end(self):
        """End the job if it is still running."""
        if self.process.poll() is None:
            for _ in range(2):  # The second signal ends the job immediately.
                self.process.terminate()
                time.sleep(1)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def steps_until(self, step, timeout):
        """Wait for a number of steps.

        Returns:
            A `(time, first_step, last_step)` tuple with the time of the first step.
        """
        first = None
        while True:
            at, match = self.wait_for(STEP, timeout)
            last = int(match[1])
            first = first or (at, last)
            if last >= first[1] + step - 1:
                return *first, last

    def pid(self, rank, name="pids"):
        """Return a rank's process id from the start of training, or of the program if `name="begun"`."""
        return int((self.folder / name / str(rank)).read_text())

    def order(self, rank, text):
        """Give a rank an order for the beginning of its next step."""
        (self.folder / "orders" / str(rank)).write_text(text)

    def hurry(self):
        """Remove the pause between steps."""
        (self.folder / "hurry").touch()

    def losses(self):
        """Return a dict from steps to losses. Of repeated steps the last loss counts."""
        matches = [STEP.search(line) for line in self.seen]
        return {int(match[1]): float(match[2]) for match in matches if match}

    def steps_since(self, mark):
        """Return the steps that were printed from line `mark` on."""
        return [int(match[1]) for line in self.seen[mark:] if (match := STEP.search(line))]

    def last_words_since(self, mark):
        """Return the first reason for the job's end that was printed from line `mark` on, or `None`."""
        reasons = [match[1] for line in self.seen[mark:] if (match := LAST_WORDS.search(line))]
        return reasons[0] if reasons else None
