"""Devices of this rank: its GPUs, or a fraction of the host's cores."""

import contextlib
import functools
import os
import warnings

import tensorflow as tf

from dtransformer import nvidia_driver

_NUM_SEND_THREADS = 3
# An upper bound, not a reservation. It suffices for the layouts that are tested on one GPU.
_LOGICAL_GPU_MEGABYTES = 8192
# Maps a GPU index of this process to its physical device. TensorFlow never changes it.
_devices_by_index = {}


def device_type() -> str:
    """Return "GPU" if this rank uses GPUs, and "CPU" otherwise."""
    return "GPU" if tf.config.list_physical_devices("GPU") else "CPU"


def takes_gpu_branch() -> bool:
    """Return whether a step uses the GPU code path: XLA clusters and infrequent reads of the logs.

    This is the case on GPUs, and on CPUs if DTRANSFORMER_GPU_BRANCH=1. Tests set that variable to
    cover the path without a GPU. Use `device_type` for features that need a real GPU.
    """
    return device_type() == "GPU" or os.environ.get("DTRANSFORMER_GPU_BRANCH") == "1"


def unused_driver() -> str | None:
    """Return the version of the NVIDIA driver if TensorFlow sees no GPU, and `None` otherwise.

    GPUs hidden by `CUDA_VISIBLE_DEVICES` do not count.
    """
    if nvidia_driver.are_gpus_hidden() or device_type() == "GPU":
        return None
    return nvidia_driver.driver_version()


@functools.cache
def _cores_at_start():
    """Return the sorted cores that this process may use. The result of the first call is cached."""
    return sorted(os.sched_getaffinity(0))


def take_devices(local_rank: int, local_size: int, local_devices: int, is_pipeline: bool) -> None:
    """Reserve this rank's GPUs, or its fraction of the host's cores.

    Args:
        local_rank: Integer. Index of this rank on its host.
        local_size: Integer. Number of ranks on the host.
        local_devices: Integer. Number of devices per rank.
        is_pipeline: Whether the rank sends to other ranks while it computes.

    Raises:
        RuntimeError: If the host has fewer GPUs than its ranks need, or if a tensor was created
            before.
    """
    if tf.config.list_physical_devices("GPU"):
        _take_gpus(local_rank, local_size, local_devices)
        return
    if local_rank == 0 and (driver := unused_driver()):
        warnings.warn(
            f"This host has an NVIDIA driver ({driver}), but TensorFlow sees no GPU and computes on "
            "CPUs. Run 'dtransformer doctor' to find the cause.",
            stacklevel=3,
        )
    if local_size == local_devices == 1:
        return
    cores = _cores_at_start()
    num_cores = len(cores) // local_size
    if local_size > 1:
        _bind_to(cores[local_rank * num_cores : (local_rank + 1) * num_cores])
    try:
        tf.config.threading.set_intra_op_parallelism_threads(max(num_cores // local_devices, 1))
        if is_pipeline:  # Sends need separate threads while the computation occupies the core.
            tf.config.threading.set_inter_op_parallelism_threads(num_cores + _NUM_SEND_THREADS)
    except RuntimeError:  # TensorFlow has already started. The default is slower, but correct.
        warnings.warn(
            "`dtransformer.init()` was called after the first tensor was created, so the devices of "
            "this host cannot divide its cores. Call it first.",
            stacklevel=3,
        )


def logical_gpus() -> int:
    """Return the number of logical GPUs per GPU, set by DTRANSFORMER_LOGICAL_GPUS (default: 1).

    Logical GPUs serve to test layouts on one GPU. They share its memory and its compute time.

    Raises:
        ValueError: If the variable is not a positive integer.
    """
    value = os.environ.get("DTRANSFORMER_LOGICAL_GPUS", "1")
    if not value.isdecimal() or not int(value):
        raise ValueError(f"`DTRANSFORMER_LOGICAL_GPUS` must be a positive integer, got {value!r}.")
    return int(value)


def devices_per_rank(local_size: int) -> int:
    """Return the number of devices per rank if the ranks of a host share all of its GPUs."""
    return max(len(tf.config.list_physical_devices("GPU")) * logical_gpus() // local_size, 1)


def exclusive_gpus(local_size: int, local_devices: int) -> str | None:
    """Return `CUDA_VISIBLE_DEVICES` if the launcher gave this rank exclusive GPUs, else `None`.

    That is the case if the host has several ranks, this rank sees exactly `local_devices` GPUs, and
    GPUs are not divided into logical ones.
    """
    num_visible = len(tf.config.list_physical_devices("GPU"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    is_exclusive = local_size > 1 and num_visible == local_devices and logical_gpus() == 1
    return visible if is_exclusive else None


def _take_gpus(local_rank, local_size, local_devices):
    """Make this rank's GPUs visible and let their memory grow on demand."""
    all_gpus = tf.config.list_physical_devices("GPU")
    num_logical_gpus = logical_gpus()
    slots = [gpu for gpu in all_gpus for _ in range(num_logical_gpus)]
    gpus = slots[local_rank * local_devices : (local_rank + 1) * local_devices]
    if exclusive_gpus(local_size, local_devices):
        gpus = all_gpus  # The launcher has already selected the GPUs.
    if len(gpus) < local_devices:
        raise RuntimeError(
            f"This host has {len(slots)} GPUs, but {local_size} ranks with {local_devices} each. "
            "Start at most one rank per GPU, or set `DTRANSFORMER_LOGICAL_GPUS` to test a layout "
            "with logical GPUs."
        )
    for index, gpu in enumerate(gpus):
        if (known_gpu := _devices_by_index.setdefault(index, gpu)) != gpu:
            raise RuntimeError(
                f"GPU:{index} of this process is {known_gpu} and cannot become {gpu} with "
                f"`local_devices={local_devices}`, because TensorFlow never changes the GPUs of a "
                "process. Start a new process for each number of local devices."
            )
    cores = {core for gpu in gpus for core in nvidia_driver.cores_near(all_gpus.index(gpu))}
    # Host memory is allocated near these cores.
    _bind_to(sorted(cores.intersection(_cores_at_start())))
    try:
        tf.config.set_visible_devices(list(dict.fromkeys(gpus)), "GPU")
        for gpu in dict.fromkeys(gpus):
            if num_logical_gpus == 1:
                tf.config.experimental.set_memory_growth(gpu, True)
                continue
            os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
            limits = tf.config.LogicalDeviceConfiguration(_LOGICAL_GPU_MEGABYTES)
            tf.config.set_logical_device_configuration(gpu, [limits] * gpus.count(gpu))
    except RuntimeError as error:
        raise RuntimeError(
            f"Call `dtransformer.init()` before the first tensor is created ({error})."
        ) from None


def _bind_to(cores):
    """Bind all threads of this process to the given cores, to make use of their caches.

    Does nothing without cores, or if DTRANSFORMER_BIND_CORES=0.
    """
    if not cores or os.environ.get("DTRANSFORMER_BIND_CORES") == "0":
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # The thread has just ended.
            os.sched_setaffinity(int(thread), cores)
