"""Find and signal the processes of a job on all hosts by a variable in their environment."""

import concurrent.futures
import contextlib
import os
import secrets
import socket
import subprocess
from collections.abc import Iterable, Iterator, Sequence

from dtransformer.errors import InputError

LAUNCH = "DTRANSFORMER_LAUNCH"  # Environment variable of all processes of a start.

# Run `do` with the id of each process of the start, except the searching shell.
_EACH = (
    "for d in /proc/[0-9]*; do p=${{d#/proc/}}; "
    f'if [ "$p" != $$ ] && grep -qsa "{LAUNCH}={{launch}}" "$d/environ"; then {{do}}; fi; done'
)
_KILL = 'kill -KILL "$p" 2>/dev/null'
# Only ranks in `fit` catch the signal. It would end the shells around them.
_STOP = (
    "m=$(sed -n 's/^SigCgt:[[:space:]]*//p' \"$d/status\" 2>/dev/null); "
    '[ -n "$m" ] && [ $(( (0x$m >> 9) & 1 )) = 1 ] && kill -USR1 "$p"'
)
_SECONDS = 15


class Hosts:
    """Runs shell commands on hosts.

    Args:
        ssh_options: Options of ssh.
    """

    def __init__(self, ssh_options: Sequence[str] = ()):
        self._ssh = ssh_command(ssh_options)
        self.launch = secrets.token_hex(8)

    def run(self, hosts: Iterable[str], command: str) -> dict[str, str | None]:
        """Run a shell command on hosts at the same time.

        Returns:
            Dict of the output by host. `None` if a host does not answer.
        """

        def answer(host):
            shell = ["sh"] if is_here(host) else [*self._ssh, host, "sh"]
            # A shared ssh connection stays open and keeps its standard error open.
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
            try:
                done = subprocess.run(
                    shell, input=command, check=False, timeout=_SECONDS, **streams
                )
            except subprocess.TimeoutExpired:
                return None
            except OSError as error:
                raise InputError(f"Cannot start ssh ({error.strerror}). Install it.") from None
            return done.stdout if done.returncode == 0 else None

        hosts = list(hosts)
        with concurrent.futures.ThreadPoolExecutor(len(hosts) or 1) as threads:
            return dict(zip(hosts, threads.map(answer, hosts)))

    def end_all(self, hosts: Iterable[str]) -> dict[str, str | None]:
        """Kill the remaining processes of the start on hosts; return the result of `run`."""
        return self.run(hosts, _EACH.format(launch=self.launch, do=_KILL) + "\nexit 0\n")

    @contextlib.contextmanager
    def ended_with_launcher(self) -> Iterator[None]:
        """Inside the `with` block, end the processes of this host even if the launcher is killed.

        A shell waits for the end of its standard input, which only the launcher holds open.
        """
        script = "cat > /dev/null; " + _EACH.format(launch=self.launch, do=_KILL)
        shell = ["sh", "-c", script]
        with subprocess.Popen(shell, stdin=subprocess.PIPE, start_new_session=True):
            yield

    def ask_to_stop(self, hosts: Iterable[str]) -> None:
        """Send SIGUSR1 to the ranks of the start on hosts."""
        self.run(hosts, _EACH.format(launch=self.launch, do=_STOP) + "\nexit 0\n")


def ssh_command(options: Sequence[str] = ()) -> list[str]:
    """Return the ssh command without the host."""
    always = ("BatchMode=yes", f"ConnectTimeout={_SECONDS // 2}", "StrictHostKeyChecking=no")
    return ["ssh", *(text for option in always for text in ("-o", option)), *options]


def is_here(host: str) -> bool:
    """Return whether `host` names this host: its address can be bound here."""
    if host in ("localhost", socket.gethostname()):
        return True
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.bind((socket.gethostbyname(host), 0))
        return True
    return False


def discovered(script: str | os.PathLike) -> str:
    """Return the output of a host discovery script.

    Raises:
        InputError: If the script fails.
    """
    try:
        done = subprocess.run([script], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"Cannot run the script `{script}` ({error}).") from None
    if done.returncode:
        raise InputError(
            f"The script `{script}` has ended with code {done.returncode}: {done.stderr[-100:]}"
        )
    return done.stdout
