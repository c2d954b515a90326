"""`dtransformer doctor --hosts`: check that hosts can train together, and measure the network."""

import contextlib
import json
import os
import pathlib
import selectors
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from dtransformer.cli import host_probe
from dtransformer.cli.checks import check
from dtransformer.cli.launching.hosts import parse_hosts
from dtransformer.cli.launching.processes import is_here, ssh_command

_SECONDS = 60  # time limit for the answer of a host
_MAX_CLOCK = 5.0  # maximum clock difference in seconds, including the start of Python
_MIN_FREE_GIB = 1.0  # GiB
_ROUNDS = 20
_BYTES = 2**26
_SAME = "same as this host"


def examine_hosts(names: str, ssh_options: Sequence[str] = ()) -> list[dict]:
    """Compare hosts with this host, and measure the connections to them.

    Args:
        names: Host names, separated by commas.
        ssh_options: Additional options of ssh.

    Returns:
        A list of checks, see `checks.check`.

    Raises:
        InputError: If a name is not a valid host name.
    """
    hosts = list(parse_hosts(names.replace(",", "\n"), "--hosts"))
    local = host_probe.describe()
    return [result for host in hosts for result in _check_host(host, local, ssh_options)]


def _check_host(host, local, ssh_options):
    here = is_here(host)
    shell = f"cd {shlex.quote(os.getcwd())} && exec {shlex.quote(sys.executable)} -"
    command = ["sh", "-c", shell] if here else [*ssh_command(ssh_options), host, shell]
    with _run_probe(command) as (process, errors):
        began = time.time()
        answer, error = _read_answer(process, errors)
        if answer is None:
            fix = "set up ssh without a password, and the same folder and Python on the host"
            return [check(f"{host}: ssh", False, error or "does not answer", fix)]
        middle = (began + time.time()) / 2
        checks = [check(f"{host}: ssh", True, "this host" if here else "answers")]
        checks += _compare(host, answer, local, middle)
        return [*checks, _measure_network(host, answer["port"])]


def _compare(host, answer, local, middle):
    host_versions = answer["versions"]
    local_versions = local["versions"]
    differ = [name for name in local_versions if host_versions[name] != local_versions[name]]

    def describe(versions):
        return ", ".join(f"{name} {versions[name]}" for name in differ)

    lag = answer["time"] - middle
    free = answer["free_gib"]
    same = answer["files"] == local["files"]
    gpus = f"this host has {local['gpus']}; all hosts need the same GPUs and driver"
    rows = (
        (
            "versions",
            not differ,
            describe(host_versions) or _SAME,
            f"this host has {describe(local_versions)}",
        ),
        (
            "files",
            same,
            _SAME if same else "dtransformer's files differ",
            "install the same files on the host",
        ),
        ("GPUs", answer["gpus"] == local["gpus"], answer["gpus"], gpus),
        (
            "memory",
            free >= _MIN_FREE_GIB,
            f"{free:.1f} GiB free, {answer['cores']} cores",
            "end programs that use memory",
        ),
        (
            "clock",
            abs(lag) <= _MAX_CLOCK,
            f"{lag:+.1f} s, measured through ssh",
            "synchronize it with chrony or ntpd",
        ),
    )
    return [check(f"{host}: {name}", *row) for name, *row in rows]


def _measure_network(host, port):
    """Measure the round-trip time and the bandwidth of the connection to a host's probe."""
    try:
        with socket.create_connection((host, port), 10) as connection:
            connection.settimeout(30)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            address = connection.getsockname()[0]
            times = []
            for _ in range(_ROUNDS):
                start = time.perf_counter()
                connection.sendall(b".")
                connection.recv(1)
                times.append(time.perf_counter() - start)
            start = time.perf_counter()
            connection.sendall(b"!" + bytes(_BYTES))
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)  # Returns as soon as the host has received everything.
            rate = 8 * _BYTES / (time.perf_counter() - start) / 1e9
    except OSError as error:
        fix = "open all ports between the job's hosts, because ranks listen on any free port"
        return check(f"{host}: network", False, f"cannot connect to port {port} ({error})", fix)
    latency = 1e3 * statistics.median(times)
    message = (
        f"{latency:.2f} ms round trip, {rate:.1f} Gbit/s, from {address} ({_interface(address)})"
    )
    return check(f"{host}: network", True, message)


def _interface(address):
    """Return the name of the network interface with an IPv4 address, or "unknown"."""
    result = subprocess.run(["ip", "-o", "-4", "addr"], capture_output=True, text=True, check=False)
    for line in result.stdout.splitlines():
        if f" {address}/" in line:
            return line.split()[1]
    return "unknown"


@contextlib.contextmanager
def _run_probe(command):
    """Run the probe in a host's Python inside the `with` block. Yield (process, standard error)."""
    errors = tempfile.TemporaryFile("w+")  # A shared ssh connection would keep a pipe open.
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    process = subprocess.Popen(command, text=True, stderr=errors, **pipes)
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(pathlib.Path(host_probe.__file__).read_text("utf-8"))
            process.stdin.close()
        yield process, errors
    finally:
        process.kill()
        process.wait()


def _read_answer(process, errors):
    """Return (answer of the probe, None), or (None, end of its standard error) if it failed."""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        text = process.stdout.readline() if selector.select(_SECONDS) else ""
    with contextlib.suppress(ValueError):
        return json.loads(text), None
    process.kill()
    process.wait()
    errors.seek(0)
    return None, " ".join(errors.read().split())[-150:]
