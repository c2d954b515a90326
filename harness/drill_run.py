"""A job that is let to fail, under `dtransformer launch`, and what it prints."""

import pathlib
import queue
import re
import subprocess
import sys
import threading
import time

from harness.layouts import layout_of
from harness.two_hosts import INTERFACE

STEP = re.compile(r"(?:<stdout>:|\] )step (\d+) loss ([\d.e+-]+)")
ENDED = re.compile(r"(?:<stdout>:|\] )ended at (\d+) with (\w+)")
RESTART = re.compile("dtransformer launch: .*: restart ")
LAST_WORDS = re.compile(r"dtransformer: the job ends: ([^;]*)")
_RANKS = re.compile(r"dtransformer launch: starting (\d+) ranks")
_ROOT = pathlib.Path(__file__).parents[1]


class Failed(Exception):
    """The job does not do what is waited for."""


class Run:
    """A job under `dtransformer launch`, whose output is read by a thread.

    Args:
        args: the options of benchmarks/drills.py.
        folder: where it saves, and ranks tell their numbers.
        steps: number of steps.
        pause: seconds that a step takes besides.
        min_ranks: with how few ranks it goes on; None for all only.
        hosts: the `TwoHosts` that it runs on; None for this one.
    """

    def __init__(self, args, folder, steps, pause, min_ranks=None, hosts=None):
        self.args, self.folder, self.hosts = args, pathlib.Path(folder), hosts
        layout = layout_of(args.layout)
        self.num_ranks = layout.ranks  # of the start that runs
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
            settings["DTRANSFORMER_BIND_CORES"] = 0  # both hosts have the same ones
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

    def give_slots(self, number):
        """Say how many ranks there can be at the next start: as many on each host."""
        hosts = ["localhost"] if self.hosts is None else self.hosts.addresses
        lines = [f"{host} slots={number // len(hosts)}\n" for host in hosts]
        self.hosts_file.write_text("".join(lines))

    def wait_for(self, pattern, timeout):
        """Return when a line with a pattern came, and its match.

        Raises:
            Failed: there is none in time.
        """
        end = time.time() + timeout
        while True:
            try:
                at, line = self._lines.get(timeout=max(end - time.time(), 0.01))
            except queue.Empty:
                raise Failed(f"no {pattern!r} within {timeout:.0f} s") from None
            if line is None:
                raise Failed(f"ended before {pattern!r}")
            self.seen.append(line)
            if found := _RANKS.search(line):
                self.num_ranks = int(found[1])
            if found := re.search(pattern, line):
                return at, found

    def end(self):
        """End the job, where it has not ended."""
        if self.process.poll() is None:
            for _ in range(2):  # with the second signal it ends at once
                self.process.terminate()
                time.sleep(1)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def steps_until(self, number, timeout):
        """Wait for some steps; return the moment of the first, its number, and the last's."""
        first = None
        while True:
            at, found = self.wait_for(STEP, timeout)
            last = int(found[1])
            first = first or (at, last)
            if last >= first[1] + number - 1:
                return *first, last

    def pid(self, rank, name="pids"):
        """Return the number of a rank's process, once it trains, or by name "begun" before."""
        return int((self.folder / name / str(rank)).read_text())

    def order(self, rank, text):
        """Let a rank do something at the beginning of its next step."""
        (self.folder / "orders" / str(rank)).write_text(text)

    def hurry(self):
        """Let steps follow each other without a pause."""
        (self.folder / "hurry").touch()

    def losses(self):
        """Return {step: loss}; of a step that was repeated the last one."""
        found = [STEP.search(line) for line in self.seen]
        return {int(one[1]): float(one[2]) for one in found if one}

    def steps_since(self, mark):
        """Return the numbers of the steps that lines tell, from one of them on."""
        return [int(found[1]) for line in self.seen[mark:] if (found := STEP.search(line))]

    def last_words_since(self, mark):
        """Return what the first rank says that ends with a word, from a line on; or None."""
        words = [found[1] for line in self.seen[mark:] if (found := LAST_WORDS.search(line))]
        return words[0] if words else None
