"""`dtransformer doctor`: check the installation and print how to fix each problem."""

import argparse
import importlib.metadata
import json
import os
import platform
import sys

from dtransformer.cli.checks import check
from dtransformer.cli.install_horovod import (
    COMMAND,
    built_with,
    compiler,
    horovodrun,
    install_horovod,
)
from dtransformer.nvidia_driver import gpu_names

_PACKAGES = {"tensorflow": "2.21", "keras": "3.15", "tensorflow-text": "2.21", "sacrebleu": "2"}
_OPTIONAL = {
    "matplotlib": "only needed for plots: pip install matplotlib",
    "pyarrow": "only needed for Arrow and Parquet files: pip install pyarrow",
}
_COMPILER = "only needed to build Horovod; Debian: apt-get install g++ make"


def examine():
    """Check the installed packages, the compiler, Horovod and the devices.

    Returns:
        A list of checks, see `checks.check`.
    """
    return [
        *(_package(name, version) for name, version in _PACKAGES.items()),
        *(_optional(name, _version(name), fix) for name, fix in _OPTIONAL.items()),
        check(
            "python", sys.version_info >= (3, 11), platform.python_version(), "use 3.11 or later"
        ),
        _optional("C++ compiler", compiler(), _COMPILER),
        *_horovod(),
        *_devices(),
    ]


def run_doctor(arguments: argparse.Namespace) -> int:
    """Run the checks that the arguments request, or install Horovod. Return the exit code."""
    if arguments.hosts:
        from dtransformer.cli.doctor_hosts import examine_hosts

        key = arguments.ssh_identity_file
        return doctor(checks=examine_hosts(arguments.hosts, ["-i", key] if key else []))
    if arguments.warm:
        from dtransformer.cli.warm import warm

        return doctor(checks=warm())
    if not arguments.install_horovod:
        return doctor(arguments.json)
    install_horovod()
    return 0


def doctor(as_json=False, checks=None):
    """Print checks and return the exit code: 1 if a check has failed, else 0.

    Args:
        as_json: Boolean. Print JSON instead of text.
        checks: List of checks. Defaults to the result of `examine()`.
    """
    checks = examine() if checks is None else checks
    if as_json:
        print(json.dumps(checks, indent=2))
    else:
        width = max(len(item["name"]) for item in checks)
        for item in checks:
            mark = {True: "ok     ", None: "missing", False: "FAILED "}[item["ok"]]
            print(f"{mark}  {item['name']:{width}}  {item['found']}")
            if not item["ok"] and item["fix"]:
                print(f"{'':9}{'':{width}}  -> {item['fix']}")
    return 1 if any(item["ok"] is False for item in checks) else 0


def _version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(name, required):
    version = _version(name)
    ok = version is not None and version.split(".")[: required.count(".") + 1] == required.split(
        "."
    )
    return check(name, ok, version or "not installed", f"pip install '{name}=={required}.*'")


def _optional(name, state, fix):
    return check(name, True if state else None, state or "not installed", fix)


def _horovod():
    version = _version("horovod")
    if version is None:
        return [_optional("horovod", None, f"only needed for several ranks: {COMMAND}")]
    works, state = built_with()
    if not works:
        return [check("horovod", False, f"{version}, cannot be imported: {state}", COMMAND)]
    launcher = horovodrun()
    is_suitable = "nccl" in state.lower() or not gpu_names()
    return [
        check("horovod", is_suitable, f"{version}, built with {state}", COMMAND),
        check("horovodrun", bool(launcher), launcher or "not found", COMMAND),
    ]


def _devices():
    import tensorflow as tf

    from dtransformer.cli.doctor_gpu import examine_gpus

    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    checks = [check("CPU", True, f"{cores} cores, {memory:.0f} GiB of memory"), *examine_gpus()]
    result = float(tf.reduce_sum(tf.function(lambda x: x @ x)(tf.ones((2, 2)))))
    return [*checks, check("compiled function", result == 8, "runs", "reinstall tensorflow")]
