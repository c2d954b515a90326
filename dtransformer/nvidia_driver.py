"""NVIDIA's driver and its GPUs, by its files, nvidia-smi and libcuda: without TensorFlow."""

import contextlib
import ctypes
import functools
import os
import pathlib
import platform
import re
import subprocess

_FILES = pathlib.Path("/proc/driver/nvidia")
_PCI = pathlib.Path("/sys/bus/pci/devices")
_CACHE = "~/.cache/dtransformer/cuda"


def keep_compiled_kernels() -> None:
    """Let the driver keep what it compiles: all of it, in a folder of this host.

    For newer GPUs it compiles TensorFlow's kernels itself, some for minutes. By default it keeps 256
    MiB or 1 GiB of them, in the home, which hosts may share.
    """
    os.environ.setdefault("CUDA_CACHE_MAXSIZE", str(4 << 30))
    folder = pathlib.Path(os.path.expanduser(_CACHE), platform.node())
    if _FILES.exists() and "CUDA_CACHE_PATH" not in os.environ:
        with contextlib.suppress(OSError):  # the driver's own place, then
            folder.mkdir(parents=True, exist_ok=True)
            os.environ["CUDA_CACHE_PATH"] = str(folder)


def are_gpus_hidden() -> bool:
    """Return whether CUDA_VISIBLE_DEVICES hides all GPUs."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")


def _of_each_gpu(field):
    """Return a field of each GPU as nvidia-smi has it; nothing where that is not there, or fails."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:  # it wakes cards that sleep
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [] if done.returncode else done.stdout.split("\n")[:-1]


def driver_version() -> str | None:
    """Return the driver's version; None without one. WSL has nvidia-smi alone."""
    file = _FILES / "version"
    if not file.exists():
        return next(iter(_of_each_gpu("driver_version")), None)
    words = file.read_text("utf-8", "replace").split()
    return next((word for word in words if word[:1].isdecimal()), "of unknown version")


@functools.cache
def _cuda():
    """Return libcuda, started, and what it says of that: 0 where all is well. Or None, and None."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, None
    return library, library.cuInit(0)


def cuda_start() -> int | None:
    """Return CUDA's error code of its start, 0 where it can be used; None without libcuda."""
    return _cuda()[1]


def _asked(function, number, *arguments):
    """Return the number that a function of libcuda writes; as it is given where it cannot be asked."""
    if _cuda()[0] is not None:
        getattr(_cuda()[0], function)(ctypes.byref(number), *arguments)
    return number.value


def cuda_version() -> int:
    """Return the newest CUDA that the driver has, 12050 for 12.5; 0 where it cannot be asked."""
    return _asked("cuDriverGetVersion", ctypes.c_int())


def gpu_names() -> list[str]:
    """Return the models of this host's GPUs, as CUDA counts those that are visible to this process.

    Where CUDA does not start, those of the driver's files; none where CUDA_VISIBLE_DEVICES hides them.
    """
    if are_gpus_hidden():
        return []
    names, name = [], ctypes.create_string_buffer(256)
    for gpu in range(_asked("cuDeviceGetCount", ctypes.c_int())):
        _cuda()[0].cuDeviceGetName(name, len(name), gpu)
        names.append(name.value.decode())
    files = sorted(_FILES.glob("gpus/*/information"))
    told = [re.search(r"Model:\s*(.*)", file.read_text("utf-8", "replace")) for file in files]
    return names or [one[1].strip() for one in told if one] or _of_each_gpu("name")


def gpu_memory_bytes() -> int:
    """Return the bytes of the first visible GPU's memory; 0 where they cannot be asked."""
    return _asked("cuDeviceTotalMem_v2", ctypes.c_size_t(), 0)


def cores_near(gpu: int) -> list[int]:
    """Return the cores of the NUMA node that a visible GPU hangs on; none where that is not known.

    Args:
        gpu: its number, as CUDA counts.
    """
    place = ctypes.create_string_buffer(32)
    if _cuda()[0] is None or _cuda()[0].cuDeviceGetPCIBusId(place, len(place), gpu):
        return []
    try:
        text = (_PCI / place.value.decode().lower() / "local_cpulist").read_text()
    except OSError:
        return []
    ranges = [one.split("-") for one in text.strip().split(",") if one]  # as in 0-31,64-95
    return [core for one in ranges for core in range(int(one[0]), int(one[-1]) + 1)]
