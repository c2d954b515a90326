"""The loop of `dtransformer launch`: find hosts, start, wait, start again.

What a start has come to is read from what horovodrun has printed; where ranks are fewer than
before, they find another layout: see `runs.run.layout_plan` and `parallel.config.elastic_config`.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable

from dtransformer.cli.install_horovod import COMMAND, horovodrun
from dtransformer.cli.launching.hosts import HostBook, parse_hosts, take_ranks
from dtransformer.cli.launching.processes import LAUNCH, Hosts, discovered, is_here
from dtransformer.errors import InputError
from dtransformer.inputs.files import read_bytes
from dtransformer.inputs.text import decode
from dtransformer.parallel.runtime.launch import FITS_LAYOUT

# Exit codes of ranks: asked to stop, they have saved; the options are refused, as they would be again.
PREEMPTED, REFUSED = 75, 2

# What a rank's watchdog says, and what horovodrun does.
_VERDICT = re.compile(
    r"dtransformer: the job ends: ((?:ranks? [\d, …]+ on hosts? ([^:]+): )?[^;]+);"
)
_HAS_ENDED = re.compile(r"^Process \d+ exit with status code [1-9-]")
_EXIT_CODE = re.compile(r"^Exit code: (-?\d+)")
_NO_HOST = re.compile(r"could not connect to some hosts via ssh|Connection refused|timed out")
_MAX_CAUSE = 200


class Outcome:
    """What is known of a start that has ended, or will; lines of its output are given one by one."""

    def __init__(self):
        self.exit_code = None  # of the rank that ended first
        self.is_over = False  # whether a rank has failed, so that all will end
        self.hosts = ()  # at fault
        self.cause = self._of_horovodrun = ""
        self._in_traceback = False

    def read(self, line: str) -> bool:
        """Take a line of horovodrun's output, or of a rank's; return whether it is to be shown.

        Where horovodrun itself was when it saw a rank fail tells nobody anything.
        """
        begins = line.startswith("Traceback (most recent call last)")
        self._in_traceback = begins or (self._in_traceback and line.startswith("  "))
        self.is_over |= bool(_VERDICT.search(line) or _HAS_ENDED.search(line))
        if found := _EXIT_CODE.search(line):
            self.exit_code = int(found[1])
        elif found := _VERDICT.search(line):
            self.cause = self.cause or found[1][:_MAX_CAUSE]
            if found[2]:
                self.hosts = self.hosts or tuple(found[2].replace(", …", "").split(", "))
        elif not line.startswith("[") and _NO_HOST.search(line):  # else a rank's
            self._of_horovodrun = self._of_horovodrun or line.strip()[:_MAX_CAUSE]
        return not self._in_traceback

    def __str__(self):
        if self.exit_code == PREEMPTED:
            return "ranks were asked to stop, and have saved"
        code = "" if self.exit_code is None else f"a rank has ended with code {self.exit_code}"
        return self.cause or self._of_horovodrun or code or "horovodrun has failed"


_SECONDS_TO_SAVE = 120.0  # after a signal; what is left of the job is ended then
_MAX_FILE = 2**20  # bytes
_SECONDS_TO_END = 30.0  # after a rank has ended with a failure
_LOOK_AGAIN = 5.0  # seconds, where there are too few hosts
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def hosts_of(options: argparse.Namespace) -> dict[str, int]:
    """Return {host: number of ranks} of the options of `dtransformer launch`, as it is now."""
    if options.hosts_file is not None:
        text = decode(read_bytes(options.hosts_file, _MAX_FILE), options.hosts_file)
        return parse_hosts(text, options.hosts_file)
    if options.discovery_script is not None:
        return parse_hosts(discovered(options.discovery_script), options.discovery_script)
    return {"localhost": options.num_ranks or 1}


def ssh_options(options: argparse.Namespace) -> list[str]:
    """Return what ssh is given besides the host."""
    return _words({"-i": options.ssh_identity_file, "-p": options.ssh_port})


def horovodrun_options(options: argparse.Namespace, hosts: Iterable[str]) -> list[str]:
    """Return the same for horovodrun.

    Args:
        options: those of `dtransformer launch`.
        hosts: those of the ranks. Where this one is alone, only the loopback serves.
    """
    is_alone = all(map(is_here, hosts))
    given = {
        "--ssh-identity-file": options.ssh_identity_file,
        "--ssh-port": options.ssh_port,
        "--network-interface": None if is_alone else options.network_interface,
    }
    return _words(given)


def _words(given):
    found = ((name, str(value)) for name, value in given.items() if value is not None)
    return [word for pair in found for word in pair]


class Supervisor:
    """Launches a command until it has ended well, or has failed too often.

    Args:
        options: those of `dtransformer launch`.
    """

    def __init__(self, options: argparse.Namespace):
        self._options, self._book = options, HostBook(options.cool_down)
        self._hosts = Hosts(ssh_options(options))
        self._horovodrun = horovodrun()
        if self._horovodrun is None:
            raise InputError(f"horovodrun is not installed: run '{COMMAND}'")
        self._all_hosts, self._signal, self._running = {}, None, None
        self._min_ranks = options.min_ranks

    def run(self) -> int:
        """Return the exit code: 0, 2 for refused options, 75 after a signal, else 1."""
        before = {one: signal.signal(one, self._on_signal) for one in _SIGNALS}
        try:
            return self._run()
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def _run(self):
        failures = 0
        while True:
            ranks = self._find_ranks()
            if self._signal is not None:
                return PREEMPTED
            _say(f"starting {sum(ranks.values())} ranks on {_told(ranks)}")
            code, outcome = self._start(ranks)
            self._hosts.end_all(ranks)
            if code == 0:
                return 0
            if self._signal is not None:
                _say(f"asked to stop: {outcome}")
                return PREEMPTED if outcome.exit_code == PREEMPTED else 1
            if outcome.exit_code == REFUSED:
                return REFUSED
            failures += 1
            if failures > self._options.restarts:
                _say(f"{outcome}: failed for the {failures}. time, and ends")
                return 1
            _say(f"{outcome}: restart {failures} of {self._options.restarts}")
            if outcome.exit_code != PREEMPTED:
                self._book.at_fault(outcome.hosts, time.monotonic())

    def _find_ranks(self):
        """Return {host: number of ranks} of hosts that answer; wait until there are enough."""
        until = time.monotonic() + self._options.wait
        while self._signal is None:
            try:
                self._all_hosts = hosts_of(self._options)
            except InputError as error:  # of a script, or of a file that is being written
                if not self._all_hosts:
                    raise
                _say(f"{error}: takes the hosts from before")
            usable = self._book.usable(self._all_hosts, time.monotonic())
            answers = self._hosts.end_all(usable)
            for host in [host for host, answer in answers.items() if answer is None]:
                _say(f"host {host} does not answer, and is left out for a while")
                self._book.failed(host, time.monotonic())
                del usable[host]
            ranks = take_ranks(usable, self._options.num_ranks)
            number = sum(ranks.values())
            if self._min_ranks is None:
                self._min_ranks = sum(take_ranks(self._all_hosts, self._options.num_ranks).values())
            if number >= self._min_ranks:
                return ranks
            if time.monotonic() > until:
                raise InputError(
                    f"the hosts take {number} ranks, and {self._min_ranks} are needed: add hosts, or "
                    "give --min-ranks"
                )
            time.sleep(_LOOK_AGAIN)
        return {}

    def _start(self, ranks):
        """Start horovodrun and wait; return its exit code and the `Outcome`."""
        outcome, self._ranks = Outcome(), ranks
        own = {LAUNCH: self._hosts.launch, FITS_LAYOUT: str(max(ranks.values()))}
        self._running = subprocess.Popen(
            [
                *(self._horovodrun, "--gloo", "-np", str(sum(ranks.values()))),
                *("-H", _told(ranks)),
                *horovodrun_options(self._options, ranks),
                *self._options.rank_command,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **own},
            start_new_session=True,  # signals reach the ranks by us only
        )
        ending = None
        for line in self._running.stdout:
            is_shown = outcome.read(line)
            if outcome.is_over and ending is None:  # horovodrun waits for all who hold its pipes
                ending = threading.Timer(_SECONDS_TO_END, self._kill)
                ending.daemon = True
                ending.start()
            with contextlib.suppress(BrokenPipeError):
                sys.stdout.write(line * is_shown)
                sys.stdout.flush()
        code = self._running.wait()
        if ending is not None:
            ending.cancel()
        self._kill()
        return code, outcome

    def _on_signal(self, number, frame):
        again, self._signal = self._signal is not None, number
        if self._running is None or self._running.poll() is not None:
            return
        if again or number == signal.SIGINT:
            threading.Thread(target=self._kill, daemon=True).start()
            return
        threading.Thread(target=self._let_save, daemon=True).start()

    def _let_save(self):
        """Let the ranks save and leave; end them where they take too long."""
        until = time.monotonic() + _SECONDS_TO_SAVE
        while self._running.poll() is None and time.monotonic() < until:
            self._hosts.ask_to_stop(self._ranks)  # again: ranks that start do not listen yet
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._running.wait(_LOOK_AGAIN)
        self._kill()

    def _kill(self):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._running.pid, signal.SIGKILL)
        self._hosts.end_all(self._ranks)


def launch(arguments: argparse.Namespace) -> int:
    """Launch as the options of `dtransformer launch` say; return the exit code.

    Raises:
        InputError: an option or the hosts are wrong.
    """
    if arguments.rank_command[:1] == ["--"]:
        del arguments.rank_command[0]
    if not arguments.rank_command:
        raise InputError("there is no command: give it after --, as in launch -np 2 -- python x.py")
    if arguments.num_ranks and (arguments.min_ranks or 0) > arguments.num_ranks:
        raise InputError(f"--min-ranks is more than the {arguments.num_ranks} ranks of -np")
    return Supervisor(arguments).run()


def _told(ranks):
    return ",".join(f"{host}:{number}" for host, number in ranks.items())


def _say(text):
    print(f"dtransformer launch: {text}", file=sys.stderr, flush=True)
