"""Two simulated hosts on this machine, for tests and drills: network namespaces with ssh servers.

Requires root, `ip` from iproute2 and sshd from openssh-server. horovodrun requires the same
interface name on both hosts. gloo resolves the host's name, so each namespace has a separate
/etc/hosts.
"""

import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time

INTERFACE = "dt0"
_SSHD = "/usr/sbin/sshd"


def why_not():
    """Return the missing requirement for two hosts, or "" if all are met."""
    if os.name != "posix" or os.geteuid() != 0:
        return "two hosts need root, for network namespaces"
    if shutil.which("ip") is None or not os.path.exists(_SSHD):
        return "two hosts need iproute2 and openssh-server"
    process = subprocess.run(["ip", "netns", "add", "dt-try"], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", "dt-try"], capture_output=True, check=False)
    return "network namespaces cannot be made here" if process.returncode else ""


class TwoHosts:
    """Context manager for two simulated hosts.

    Args:
        folder: Folder for keys and the servers' process ids.
        name: Prefix of the namespaces. Several pairs with different prefixes can exist together.

    Attributes:
        addresses: Addresses of the hosts.
        key: Path of the ssh key that both hosts accept.
    """

    addresses = ("10.78.0.1", "10.78.0.2")

    def __init__(self, folder, name="dt"):
        self.folder, self.names = pathlib.Path(folder), (f"{name}-one", f"{name}-two")
        self.key = self.folder / "id"

    def __enter__(self):
        self._end()
        pathlib.Path("/run/sshd").mkdir(exist_ok=True)
        for key in ("id", "host_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / key)
        keys = self.folder / "authorized_keys"
        keys.write_text((self.folder / "id.pub").read_text())
        for name, address in zip(self.names, self.addresses):
            hosts = pathlib.Path("/etc/netns", name, "hosts")
            hosts.parent.mkdir(parents=True)
            hosts.write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        one, two = self.names
        _run("ip", "link", "add", INTERFACE, "netns", one, "type", "veth",
             "peer", "name", INTERFACE, "netns", two)  # fmt: skip
        for name, address in zip(self.names, self.addresses):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            options = {
                "HostKey": self.folder / "host_key",
                "AuthorizedKeysFile": keys,
                "PidFile": self.folder / f"{name}.pid",
                "StrictModes": "no",
                "PermitRootLogin": "yes",
                "UsePAM": "no",
            }
            options_text = [text for k, v in options.items() for text in ("-o", f"{k}={v}")]
            _run("ip", "netns", "exec", name, _SSHD, *options_text)
        return self

    def __exit__(self, *error):
        self._end()

    def _end(self):
        for name in self.names:
            server = self.folder / f"{name}.pid"
            if server.exists():
                os.kill(int(server.read_text()), signal.SIGTERM)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            shutil.rmtree(pathlib.Path("/etc/netns", name), ignore_errors=True)

    def set_link(self, is_up):
        """Connect or disconnect the hosts."""
        _run("ip", "-n", self.names[1], "link", "set", INTERFACE, "up" if is_up else "down")

    def set_loss(self, host, action):
        """Silently drop all packets of a host, or stop dropping them.

        Args:
            host: 0 or 1.
            action: "add" or "del".
        """
        neighbour = (self.addresses[1 - host], "dev", INTERFACE)
        if action == "add":  # No network card has this address.
            neighbour = (*neighbour, "lladdr", "02:00:00:00:00:99", "nud", "permanent")
        verb = "replace" if action == "add" else "del"
        _run("ip", "-n", self.names[host], "neigh", verb, *neighbour)

    def command(self, *command):
        """Return the command that executes `command` on the first host."""
        return ["ip", "netns", "exec", self.names[0], *map(str, command)]

    def horovodrun(self, horovodrun, num_ranks, *command):
        """Return the command that starts ranks with half of them on each host."""
        places = ",".join(f"{address}:{num_ranks // 2}" for address in self.addresses)
        return self.command(
            *(horovodrun, "--gloo", "-np", num_ranks, "-H", places),
            *("--network-interface", INTERFACE, "--ssh-identity-file", self.key, *command),
        )


def wait_for(path, text, seconds):
    """Wait up to `seconds` for a file to contain a text. Return whether it does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if path.exists() and text in path.read_text():
            return True
        time.sleep(0.2)
    return False


def _run(*command):
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
