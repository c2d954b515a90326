"""Detect the devices of this host, without TensorFlow and identically on every rank.

Each rank plans independently. All ranks read the same environment variables and have the same
hardware, so their plans agree. On hosts with different hardware, set the device explicitly;
otherwise `dtransformer.init` raises an error.
"""

import os
import re

from dtransformer.errors import InputError, short_repr
from dtransformer.nvidia_driver import gpu_names
from dtransformer.planner.clusters import CPU, DEVICES, FAMILIES, Cluster, Device, Link

# Measured per core with `dtransformer plan --measure` on two cores of a virtual machine with
# AVX-512: float32 products, memory bandwidth, and loopback traffic between ranks of a host. The
# model axis uses DTensor, stages use separate connections, and data uses Horovod with its cycle of
# 5 ms.
_CORE_TFLOPS = 0.075
_CORE_GB_PER_SECOND = 5.0
_LINKS = {"data": Link(0.7, 0, 5000.0), "model": Link(0.4, 0, 2500.0), "stage": Link(1.5, 0, 500.0)}


def num_ranks(variable: str = "HOROVOD_SIZE") -> int:
    """Return the number of ranks that horovodrun started, or 1 without horovodrun.

    Args:
        variable: Environment variable that contains the number.
    """
    text = os.environ.get(variable) or "1"
    return int(text) if text.isdecimal() and int(text) else 1


def ranks_per_host() -> int:
    """Return the number of ranks on this host, or of all ranks if horovodrun does not set it."""
    return num_ranks("HOROVOD_LOCAL_SIZE" if "HOROVOD_LOCAL_SIZE" in os.environ else "HOROVOD_SIZE")


def this_device(ranks: int | None = None) -> Device:
    """Return the device of a rank: a GPU of this host, or its share of the CPU cores.

    Args:
        ranks: Number of ranks on this host. Defaults to this job's ranks.

    Raises:
        InputError: If the host has a GPU that is not in the device table.
    """
    for name in gpu_names():
        return find_gpu(name)
    return this_cpu(ranks)


def this_cpu(ranks: int | None = None) -> Device:
    """Return a rank's share of this host's CPU cores and memory as a device.

    Args:
        ranks: Number of ranks on this host. Defaults to this job's ranks.
    """
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return cpu_device(len(os.sched_getaffinity(0)), pages / 1e9, ranks or ranks_per_host())


def find_gpu(name: str) -> Device:
    """Return the device for a GPU name as the driver reports it.

    Without a memory size in the name, the default size of its family is used.

    Raises:
        InputError: If the table has no such GPU, or if the name is a MIG slice.

    Example:

    >>> find_gpu("NVIDIA A100-SXM4-80GB").name
    'a100-80'
    """
    # The table has no figures for MIG slices.
    words = [] if "MIG" in name else re.split(r"[ -]", name)
    for key in sorted(DEVICES, reverse=True):
        family, size = key.split("-")
        if family.upper() in words and (f"{size}GB" in name or "GB" not in name):
            return DEVICES[key]
    for family, default in FAMILIES.items():
        if family.upper() in words:
            return DEVICES[default]
    raise InputError(
        f"The planner has no figures for the GPU {short_repr(name)}. Measure it with `dtransformer plan "
        "--measure FILE`, or specify a device."
    )


def cpu_device(cores: int, memory_gb: float, ranks: int) -> Device:
    """Return a rank's share of a host's CPU cores and memory as a device.

    Args:
        cores: Number of cores of the host.
        memory_gb: Memory of the host in 10^9 bytes.
        ranks: Number of ranks on the host.
    """
    share = cores / ranks
    tflops = _CORE_TFLOPS * share
    rate = _LINKS["data"].gb_per_second
    return Device(
        name="cpu",
        tflops_16_bit=tflops / 2,  # TensorFlow converts 16-bit operands to float32.
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
    """Return the devices of this job as a cluster.

    Args:
        device: Their `Device`. Defaults to the device of this host.
        local_devices: Integer. Number of devices per rank.
    """
    per_host = ranks_per_host() * local_devices
    devices = num_ranks() * local_devices
    return Cluster(device or this_device(), devices, per_host, local_devices=local_devices)
