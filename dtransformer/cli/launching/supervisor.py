"""Restart loop of `dtransformer launch`: find hosts, start ranks, wait, and restart them.

On one host the launcher starts the ranks itself. On several hosts it starts horovodrun and reads the
cause of a failure from its output. If fewer ranks remain than before, they use another layout, see
`runs.run.layout_plan` and `parallel.config.elastic_config`.
"""

import argparse
import contextlib
import math
import os
import re
import shlex
import signal
import sys
import threading
import time

from dtransformer.cli.install_horovod import COMMAND, horovodrun
from dtransformer.cli.launching.hosts import HostBook, parse_hosts, take_ranks
from dtransformer.cli.launching.job import TRACEBACK, Job, horovod_variables
from dtransformer.cli.launching.processes import LAUNCH, Hosts, discovered, is_here
from dtransformer.errors import InputError
from dtransformer.inputs.files import read_bytes
from dtransformer.inputs.text import decode
from dtransformer.parallel.config.elastic_config import FITS_LAYOUT, LAUNCHER

# Exit codes of ranks that saved a checkpoint after a signal, and of ranks with wrong options.
PREEMPTED = 75
REFUSED = 2
INTERRUPTED = 130

# Lines of a rank's watchdog, and of horovodrun.
_VERDICT = re.compile(
    r"dtransformer: the job ends: ((?:ranks? [\d, …]+ on hosts? ([^:]+): )?[^;]+);"
)
_HAS_ENDED = re.compile(r"^Process \d+ exit with status code [1-9-]")
_EXIT_CODE = re.compile(r"^Exit code: (-?\d+)")
# TensorFlow's notes before its log level applies, and lines of horovodrun that the launcher repeats.
_NOISE = re.compile(
    r"(\[\d+\](<stderr>:| ))?(I\d{4} |WARNING: All log messages before absl::)|Process name: "
)
# All ranks often report the same error or warning.
_SHOWN_ONCE = ("dtransformer: ", "warning: ", TRACEBACK)
_MAX_CAUSE = 200


class Outcome:
    """The result of a start, collected from the lines that it prints."""

    def __init__(self):
        self.exit_code = None  # exit code of the rank that ended first
        self.is_over = False  # whether a rank has failed, which ends all ranks
        self.hosts = ()  # hosts that caused the failure
        self.cause = ""
        self.shown_once = set()

    def read(self, line: str) -> bool:
        """Read a line of horovodrun or of a rank. Return whether the user should see it."""
        self.is_over |= bool(_VERDICT.search(line) or _HAS_ENDED.search(line))
        if match := _EXIT_CODE.search(line):
            self.exit_code = int(match[1])
            return False
        if match := _VERDICT.search(line):
            self.cause = self.cause or match[1][:_MAX_CAUSE]
            if match[2]:
                self.hosts = self.hosts or tuple(match[2].replace(", …", "").split(", "))
        return not _NOISE.match(line)

    def rank_ended(self, rank: int, code: int) -> None:
        """Record the exit code of a rank on this host. It is negative if a signal killed the rank."""
        self.exit_code = code
        if code < 0:
            self.cause = f"rank {rank} was killed by {signal.Signals(-code).name}"
        else:
            self.cause = self.cause or f"rank {rank} has ended with code {code}"

    def __str__(self):
        if self.exit_code == PREEMPTED:
            return "ranks were asked to stop, and have saved"
        code = "" if self.exit_code is None else f"a rank has ended with code {self.exit_code}"
        return self.cause or code or "horovodrun has failed"


_SECONDS_TO_SAVE = 120.0  # from a signal until ranks that still run are killed
_MAX_FILE = 2**20  # bytes
_SECONDS_TO_END = 30.0  # from the failure of a rank until horovodrun is killed
_SECONDS_OF_ONE_SIGNAL = 0.5  # Programs such as timeout and uv repeat the terminal's signal.
_LOOK_AGAIN = 5.0  # seconds between searches for hosts
_DEFAULT_RESTARTS = 3
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def read_hosts(options: argparse.Namespace) -> dict[str, int]:
    """Read the current hosts and their slots from the file, the script or the options."""
    if options.hosts_file is not None:
        text = decode(read_bytes(options.hosts_file, _MAX_FILE), options.hosts_file)
        return parse_hosts(text, options.hosts_file)
    if options.discovery_script is not None:
        return parse_hosts(discovered(options.discovery_script), options.discovery_script)
    return {"localhost": options.num_ranks or 1}


def ssh_options(options: argparse.Namespace) -> list[str]:
    """Return the options of ssh."""
    return _to_arguments({"-i": options.ssh_identity_file, "-p": options.ssh_port})


def _horovodrun_options(options):
    values = {
        "--ssh-identity-file": options.ssh_identity_file,
        "--ssh-port": options.ssh_port,
        "--network-interface": options.network_interface,
    }
    return _to_arguments(values)


def _to_arguments(values):
    return [str(word) for pair in values.items() if pair[1] is not None for word in pair]


class Supervisor:
    """Launcher that restarts a command until it succeeds or has failed too often.

    Args:
        options: Options of `dtransformer launch`.
    """

    def __init__(self, options: argparse.Namespace):
        self._options = options
        self._book = HostBook(options.cool_down)
        self._hosts = Hosts(ssh_options(options))
        self._horovodrun = horovodrun()
        if self._horovodrun is None:
            raise InputError(f"horovodrun is not installed. Run '{COMMAND}'.")
        self._all_hosts = {}
        self._signal = None
        self._job = None
        self._signal_time = -math.inf
        self._lock = threading.Lock()
        self._min_ranks = options.min_ranks
        self._restarts = options.restarts
        has_hosts = options.hosts_file is not None or options.discovery_script is not None
        if self._restarts is None:
            self._restarts = _DEFAULT_RESTARTS if has_hosts else 0
        self._is_elastic = has_hosts or options.min_ranks is not None

    def run(self) -> int:
        """Run the job.

        Returns:
            The exit code: 0 for success, 2 for wrong options, 75 if ranks have saved after a signal,
            130 after Ctrl-C, otherwise 1.
        """
        before = {
            signal_number: signal.signal(signal_number, self._on_signal)
            for signal_number in _SIGNALS
        }
        try:
            with self._hosts.ended_with_launcher():
                return self._run()
        finally:
            for signal_number, handler in before.items():
                signal.signal(signal_number, handler)

    def _run(self):
        failures = 0
        outcome = None
        while True:
            ranks = self._find_ranks()
            if self._signal is None:
                _log(f"starting {sum(ranks.values())} ranks on {_format_hosts(ranks)}")
                outcome = self._start(ranks)
                self._hosts.end_all(ranks)
                if outcome.exit_code == 0:
                    return 0
            if self._signal == signal.SIGINT:
                _log("interrupted")
                return INTERRUPTED
            if self._signal is not None:
                _log(f"asked to stop: {outcome or 'no ranks were started'}")
                return 1 if outcome and outcome.exit_code != PREEMPTED else PREEMPTED
            if outcome.exit_code == REFUSED:
                return REFUSED
            failures += 1
            if failures > self._restarts:
                _log(
                    f"{outcome}: failed {failures} times, giving up" if self._restarts else outcome
                )
                return 1
            _log(f"{outcome}: restart {failures} of {self._restarts}")
            if outcome.exit_code != PREEMPTED:
                self._book.at_fault(outcome.hosts, time.monotonic())

    def _find_ranks(self):
        """Return a dict from hosts that answer to numbers of ranks. Wait until they suffice."""
        until = time.monotonic() + self._options.wait
        while self._signal is None:
            try:
                self._all_hosts = read_hosts(self._options)
            except InputError as error:  # The file may be incomplete while it is being written.
                if not self._all_hosts:
                    raise
                _log(f"{str(error).rstrip('.')}: using the previous hosts")
            usable = self._book.usable(self._all_hosts, time.monotonic())
            answers = self._hosts.end_all(usable)
            for host in [host for host, answer in answers.items() if answer is None]:
                _log(f"host {host} does not answer and is excluded for a while")
                self._book.failed(host, time.monotonic())
                del usable[host]
            ranks = take_ranks(usable, self._options.num_ranks)
            num_ranks = sum(ranks.values())
            if self._min_ranks is None:
                self._min_ranks = sum(take_ranks(self._all_hosts, self._options.num_ranks).values())
            if num_ranks >= self._min_ranks:
                return ranks
            if time.monotonic() > until:
                raise InputError(
                    f"The hosts have slots for {num_ranks} ranks, but {self._min_ranks} are needed. Add "
                    "hosts, or set --min-ranks."
                )
            time.sleep(_LOOK_AGAIN)
        return {}

    def _start(self, ranks):
        """Start the ranks, wait until they have ended, and return the `Outcome`."""
        outcome = Outcome()
        num_ranks = sum(ranks.values())
        self._ranks = ranks
        command = self._options.rank_command
        is_local = all(map(is_here, ranks))
        launcher = sys.argv[1 : len(sys.argv) - len(command)]
        shared = {
            **os.environ,
            LAUNCH: self._hosts.launch,
            LAUNCHER: f"dtransformer {shlex.join(launcher)} ",
        }
        if self._is_elastic:
            shared[FITS_LAYOUT] = str(max(ranks.values()))
        environments = [shared]
        if is_local:
            environments = [{**shared, **variables} for variables in horovod_variables(num_ranks)]
        else:
            command = [
                *(self._horovodrun, "--gloo", "-np", str(num_ranks), "-H", _format_hosts(ranks)),
                *_horovodrun_options(self._options),
                *command,
            ]

        def show(rank, text, is_error):
            with self._lock:
                is_of_horovodrun = text.startswith(TRACEBACK) and not is_local
                if is_of_horovodrun or text in outcome.shown_once:
                    return
                if text.startswith(_SHOWN_ONCE):
                    outcome.shown_once.add(text)
                for line in text.splitlines():
                    line = f"[{rank}] {line}" if is_local else line
                    if outcome.read(line):
                        with contextlib.suppress(BrokenPipeError):
                            print(line, file=sys.stderr if is_error else sys.stdout, flush=True)
                # horovodrun would wait for all processes with open pipes.
                if outcome.is_over and not is_local:
                    job.kill_in(_SECONDS_TO_END)

        job = self._job = Job(command, environments)
        if self._signal is not None:
            job.end(signal.SIGKILL)
        rank, code = job.wait(show)
        self._job = None
        if is_local or not code:
            outcome.rank_ended(rank, code)
        return outcome

    def _on_signal(self, signal_number, frame):
        is_repeated = self._signal is not None
        before = self._signal_time
        self._signal = signal_number
        self._signal_time = time.monotonic()
        if self._job is None or self._signal_time < before + _SECONDS_OF_ONE_SIGNAL:
            return
        if is_repeated:
            self._job.end(signal.SIGKILL)
        elif signal_number == signal.SIGINT:
            self._job.end(signal.SIGINT)
        else:
            self._job.kill_in(_SECONDS_TO_SAVE)
            threading.Thread(target=self._let_save, daemon=True).start()

    def _let_save(self):
        """Ask the ranks to save and exit. Repeat it, because starting ranks do not listen yet."""
        while self._job is not None:
            self._hosts.ask_to_stop(self._ranks)
            time.sleep(_LOOK_AGAIN)


def launch(arguments: argparse.Namespace) -> int:
    """Run `dtransformer launch` and return the exit code, see `Supervisor.run`.

    Raises:
        InputError: If an option or the list of hosts is wrong.
    """
    if arguments.rank_command[:1] == ["--"]:
        del arguments.rank_command[0]
    if not arguments.rank_command:
        raise InputError("No command was given. Add it after --: launch -np 2 -- python x.py")
    if arguments.num_ranks and (arguments.min_ranks or 0) > arguments.num_ranks:
        raise InputError(f"--min-ranks exceeds the {arguments.num_ranks} ranks of -np. Reduce it.")
    return Supervisor(arguments).run()


def _format_hosts(ranks):
    return ",".join(f"{host}:{num_ranks}" for host, num_ranks in ranks.items())


def _log(text):
    print(f"dtransformer launch: {text}", file=sys.stderr, flush=True)
