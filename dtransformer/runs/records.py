"""Records of a run: the output of every rank and the environment of every start."""

import contextlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator

import tensorflow as tf

from dtransformer.inputs.files import write_text_atomically
from dtransformer.nvidia_driver import driver_version
from dtransformer.parallel.collectives.objects import all_gather_json
from dtransformer.parallel.runtime import job
from dtransformer.runs.identity import ENVIRONMENT, LOGS

_PACKAGES = (
    *("dtransformer", "tensorflow", "tensorflow-text", "keras", "horovod", "numpy"),
    *("keras-hub", "tokenizers", "safetensors", "nvidia-cudnn-cu12", "nvidia-nccl-cu12"),
)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_STDERR = 2  # File descriptor.


@contextlib.contextmanager
def rank_log(folder: pathlib.Path) -> Iterator[None]:
    """Copy this rank's output in the `with` block to `logs/rank-N.log` of a run folder.

    The file also contains messages of libraries in C++, and the traceback of an error that ends the
    block. A resumed run appends. A progress bar on a terminal is recorded in its last state.

    Args:
        folder: Run folder, which all hosts see.
    """
    path = folder / LOGS / f"rank-{job.rank()}.log"
    path.parent.mkdir(exist_ok=True)
    with open(path, "ab", buffering=0) as file:
        log = _Log(file)
        log.write(f"== {_now()} {platform.node()} {shlex.join(sys.argv)}\n")
        stdout = _CopiedStream(sys.stdout, log)
        try:
            with contextlib.redirect_stdout(stdout), _copied_stderr(path):
                yield
        except BaseException:
            log.write(traceback.format_exc())
            raise
        finally:
            stdout.end_line()


def write_environment(folder: pathlib.Path, config_sha256: str) -> None:
    """Add this start to `env.json` of a run folder; all ranks call.

    The file is a list with an entry per start: time, command, SHA-256 of the config, versions of
    Python, packages and NVIDIA's driver, and the host and devices of every rank.

    Args:
        folder: Run folder.
        config_sha256: SHA-256 of the run's config.
    """
    ranks = all_gather_json({"host": platform.node(), "devices": _devices()}, "run/environment")
    if not job.is_chief():
        return
    entry = {
        "time": _now(),
        "command": shlex.join(sys.argv),
        "config_sha256": config_sha256,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _package_versions(),
        "nvidia_driver": driver_version(),
        "ranks": ranks,
    }
    path = folder / ENVIRONMENT
    starts = json.loads(path.read_text("utf-8")) if path.exists() else []
    write_text_atomically(path, json.dumps([*starts, entry], indent=1) + "\n")


class _Log:
    """Writes text to a file. A full disk must not end the training, so errors are ignored.

    Args:
        file: Binary file without a buffer.
    """

    def __init__(self, file):
        self._file = file

    def write(self, text):
        with contextlib.suppress(OSError):
            self._file.write(text.encode(errors="backslashreplace"))


class _CopiedStream:
    """Text stream that also writes complete lines to a log.

    Args:
        stream: Stream that receives everything.
        log: `_Log`.
    """

    def __init__(self, stream, log):
        self._stream = stream
        self._log = log
        self._line = ""

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def write(self, text):
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._copy(line)
        # Only the last state of a progress bar is recorded.
        self._line = self._line.rpartition("\r")[2]
        return self._stream.write(text)

    def end_line(self):
        """Copy the last line, if it does not end with a line break."""
        if self._line:
            self._copy(self._line)
        self._line = ""

    def _copy(self, line):
        line = _ESCAPES.sub("", line.rstrip("\r").rpartition("\r")[2]).replace("\b", "")
        self._log.write(line + "\n")


@contextlib.contextmanager
def _copied_stderr(path):
    """Append everything that this process writes to standard error to a file.

    A separate process copies it, so that the messages of a crash are also recorded.
    """
    sys.stderr.flush()
    original = os.dup(_STDERR)
    # Interrupts from the terminal must not end the copy before this process.
    command = ["tee", "-i", "-a", path]
    copy = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=original, start_new_session=True)
    os.dup2(copy.stdin.fileno(), _STDERR)
    copy.stdin.close()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(original, _STDERR)
        os.close(original)
        with contextlib.suppress(subprocess.TimeoutExpired):  # A subprocess may still write.
            copy.wait(timeout=5)


def _devices():
    """Return the names of this rank's devices."""
    gpus = tf.config.list_logical_devices("GPU")
    if not gpus:
        return [device.name for device in tf.config.list_logical_devices("CPU")]
    details = tf.config.experimental.get_device_details
    physical = [details(gpu) for gpu in tf.config.get_visible_devices("GPU")]
    models = [gpu.get("device_name", "GPU") for gpu in physical]
    return [
        f"{device.name} {models[i * len(models) // len(gpus)]}" for i, device in enumerate(gpus)
    ]


def _package_versions():
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _now():
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
