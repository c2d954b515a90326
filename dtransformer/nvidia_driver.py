"""Query NVIDIA's driver and GPUs through /proc, nvidia-smi and libcuda, without TensorFlow."""

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
    """Enlarge the CUDA driver's kernel cache and move it to a folder for this host.

    On newer GPUs the driver compiles TensorFlow's kernels, which can take minutes. By default it
    caches only 256 MiB or 1 GiB, in a home folder that hosts may share. Existing CUDA_CACHE_*
    variables are kept.
    """
    os.environ.setdefault("CUDA_CACHE_MAXSIZE", str(4 << 30))
    folder = pathlib.Path(os.path.expanduser(_CACHE), platform.node())
    if _FILES.exists() and "CUDA_CACHE_PATH" not in os.environ:
        with contextlib.suppress(OSError):  # The driver then uses its default folder.
            folder.mkdir(parents=True, exist_ok=True)
            os.environ["CUDA_CACHE_PATH"] = str(folder)


def are_gpus_hidden() -> bool:
    """Return whether CUDA_VISIBLE_DEVICES hides all GPUs."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")


def _query_nvidia_smi(field):
    """Return nvidia-smi's value of a field for each GPU, or `[]` if nvidia-smi fails."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:  # Waking sleeping GPUs can take seconds.
        process = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [] if process.returncode else process.stdout.split("\n")[:-1]


def driver_version() -> str | None:
    """Return the driver's version, or `None` without a driver. WSL has only nvidia-smi."""
    file = _FILES / "version"
    if not file.exists():
        return next(iter(_query_nvidia_smi("driver_version")), None)
    words = file.read_text("utf-8", "replace").split()
    return next((word for word in words if word[:1].isdecimal()), "of unknown version")


@functools.cache
def _cuda():
    """Return libcuda and the status of `cuInit`, which is 0 on success, or `(None, None)`."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, None
    return library, library.cuInit(0)


def cuda_start() -> int | None:
    """Return the status of CUDA's initialization, 0 on success, or `None` without libcuda."""
    return _cuda()[1]


def _query_libcuda(function, value, *arguments):
    """Return the integer that a libcuda function writes, or `value` unchanged without libcuda."""
    if _cuda()[0] is not None:
        getattr(_cuda()[0], function)(ctypes.byref(value), *arguments)
    return value.value


def cuda_version() -> int:
    """Return the newest CUDA version of the driver, such as 12050 for 12.5, or 0 if unknown."""
    return _query_libcuda("cuDriverGetVersion", ctypes.c_int())


def gpu_names() -> list[str]:
    """Return the names of this host's GPUs in CUDA's order, limited to visible ones.

    If CUDA does not start, the names come from the driver's files or nvidia-smi, unless
    CUDA_VISIBLE_DEVICES hides all GPUs.
    """
    if are_gpus_hidden():
        return []
    names = []
    name = ctypes.create_string_buffer(256)
    for gpu in range(_query_libcuda("cuDeviceGetCount", ctypes.c_int())):
        _cuda()[0].cuDeviceGetName(name, len(name), gpu)
        names.append(name.value.decode())
    files = sorted(_FILES.glob("gpus/*/information"))
    matches = [re.search(r"Model:\s*(.*)", file.read_text("utf-8", "replace")) for file in files]
    return names or [match[1].strip() for match in matches if match] or _query_nvidia_smi("name")


def gpu_memory_bytes() -> int:
    """Return the memory of the first visible GPU in bytes, or 0 if unknown."""
    return _query_libcuda("cuDeviceTotalMem_v2", ctypes.c_size_t(), 0)


def cores_near(gpu: int) -> list[int]:
    """Return the CPU cores of a visible GPU's NUMA node, or `[]` if unknown.

    Args:
        gpu: Integer. CUDA's index of the GPU.
    """
    bus_id = ctypes.create_string_buffer(32)
    if _cuda()[0] is None or _cuda()[0].cuDeviceGetPCIBusId(bus_id, len(bus_id), gpu):
        return []
    try:
        text = (_PCI / bus_id.value.decode().lower() / "local_cpulist").read_text()
    except OSError:
        return []
    # The file has a format such as "0-31,64-95".
    ranges = [bounds.split("-") for bounds in text.strip().split(",") if bounds]
    return [core for bounds in ranges for core in range(int(bounds[0]), int(bounds[-1]) + 1)]
