"""The machine that this process runs on, as a device: without TensorFlow, and the same on every rank.

Ranks of a job read the same environment and machines of the same kind, so that each makes the same
plan by itself; where machines differ, give a device, or `dtransformer.init` refuses the job.
"""

import os
import re

from dtransformer.errors import InputError, shown
from dtransformer.nvidia_driver import gpu_names
from dtransformer.planner.clusters import CPU, DEVICES, FAMILIES, Cluster, Device, Link

# Of one core, as `dtransformer plan --measure` found them on two cores of a virtual machine with
# AVX-512: float32 products, memory, and what ranks of a host send each other over loopback, of which
# the model axis goes through DTensor, stages have connections of their own, and data go through
# Horovod, whose cycle is 5 ms.
_CORE_TFLOPS = 0.075
_CORE_GB_PER_SECOND = 5.0
_LINKS = {"data": Link(0.7, 0, 5000.0), "model": Link(0.4, 0, 2500.0), "stage": Link(1.5, 0, 500.0)}


def num_ranks(variable: str = "HOROVOD_SIZE") -> int:
    """Return the number of ranks that horovodrun has started; 1 without it."""
    text = os.environ.get(variable) or "1"
    return int(text) if text.isdecimal() and int(text) else 1


def ranks_per_host() -> int:
    """Return how many of them are on this host."""
    return num_ranks("HOROVOD_LOCAL_SIZE" if "HOROVOD_LOCAL_SIZE" in os.environ else "HOROVOD_SIZE")


def this_device(ranks: int | None = None) -> Device:
    """Return the device of a rank: a GPU of this host, or its share of the host's cores.

    Args:
        ranks: how many ranks are on this host; those of this job by default.

    Raises:
        InputError: the host has GPUs that no table has.
    """
    for name in gpu_names():
        return device_of_gpu(name)
    return this_cpu(ranks)


def this_cpu(ranks: int | None = None) -> Device:
    """Return a rank's share of this host's cores and memory, as `this_device` without a GPU."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return cpu_device(len(os.sched_getaffinity(0)), pages / 1e9, ranks or ranks_per_host())


def device_of_gpu(name: str) -> Device:
    """Return the device of a GPU's model, as the driver calls it.

    Raises:
        InputError: no table has it.

    Example:

    >>> device_of_gpu("NVIDIA A100-SXM4-80GB").name
    'a100-80'
    """
    words = [] if "MIG" in name else re.split(r"[ -]", name)  # a part of a card is in no table
    for key in sorted(DEVICES, reverse=True):
        family, size = key.split("-")
        if family.upper() in words and (f"{size}GB" in name or "GB" not in name):
            return DEVICES[key]
    for family, usual in FAMILIES.items():
        if family.upper() in words:
            return DEVICES[usual]
    raise InputError(
        f"there are no figures of the GPU {shown(name)}: measure it with dtransformer plan "
        "--measure FILE, or give a device"
    )


def cpu_device(cores: int, memory_gb: float, ranks: int) -> Device:
    """Return a rank's share of a host's cores and memory as a device.

    Args:
        cores: number of cores of the host.
        memory_gb: its memory, 10^9 bytes.
        ranks: number of ranks of the host.
    """
    share = cores / ranks
    tflops = _CORE_TFLOPS * share
    rate = _LINKS["data"].gb_per_second
    return Device(
        name="cpu",
        tflops_16_bit=tflops / 2,  # converted to float32
        tflops_32_bit=tflops,
        memory_gb=memory_gb / ranks,
        memory_gb_per_second=_CORE_GB_PER_SECOND * share,
        inside_gb_per_second=rate,
        between_gb_per_second=rate,
        devices_per_node=ranks,
        constants=CPU,
        source=CPU.source,
        links=_LINKS,
        sharing=max(ranks / cores, 1.0),
        hides_reductions=False,
    )


def this_cluster(device: Device | None = None, local_devices: int = 1) -> Cluster:
    """Return the job's devices as a cluster.

    Args:
        device: their `Device`; that of this host by default.
        local_devices: number of devices of each rank.
    """
    per_host = ranks_per_host() * local_devices
    devices = num_ranks() * local_devices
    return Cluster(device or this_device(), devices, per_host, local_devices=local_devices)
