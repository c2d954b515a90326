"""Probe for `dtransformer doctor --hosts`, which sends this file to a host's Python through ssh.

The probe only needs Python's standard library. It prints one line of JSON with the host's versions,
GPUs, memory and a port. A connection to this port measures round-trip time and bandwidth.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import socket
import subprocess
import sys
import time

_PACKAGES = ("tensorflow", "keras", "horovod", "numpy", "dtransformer")
_SECONDS = 20


def describe():
    """Return a dict of this host's versions, GPUs, memory, cores and clock, for JSON."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    with open("/proc/meminfo", encoding="ascii") as file:
        memory = dict(line.split(":", 1) for line in file)
    return {
        "versions": versions,
        "files": digest(),
        "gpus": gpus(),
        "free_gib": int(memory["MemAvailable"].split()[0]) / 2**20,
        "cores": len(os.sched_getaffinity(0)),
        "time": time.time(),
    }


def gpus():
    """Return the GPUs and driver versions that nvidia-smi prints, such as "8 × H100, 555.42"."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return "none"
    lines = [line.strip() for line in done.stdout.splitlines()]
    return "; ".join(f"{lines.count(line)} × {line}" for line in dict.fromkeys(lines)) or "none"


def digest():
    """Return the SHA-256 of the Python files of `dtransformer`, or `None` if it is not installed."""
    spec = importlib.util.find_spec("dtransformer")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = pathlib.Path(spec.submodule_search_locations[0])
    content = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return content.hexdigest()


def main():
    """Print the description of this host, and answer one connection.

    Each "." is echoed. Other data is only read, until the connection closes.
    """
    with socket.create_server(("", 0)) as listener:
        listener.settimeout(_SECONDS)
        print(json.dumps({**describe(), "port": listener.getsockname()[1]}), flush=True)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            sys.exit(0)
        with connection:
            connection.settimeout(_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while connection.recv(1) == b".":
                connection.sendall(b".")
            while connection.recv(2**20):
                pass


if __name__ == "__main__":
    main()
