"""The devices of this rank: its GPUs, or its share of the machine's cores."""

import contextlib
import functools
import os
import warnings

import tensorflow as tf

from dtransformer import nvidia_driver

_THREADS_THAT_SEND = 3
# A bound, not a reservation: enough for the layouts that are tried on one card.
_MEGABYTES_OF_A_LOGICAL_GPU = 8192
_cards_of_gpus = {}  # number of a GPU of this process -> its card, which TensorFlow never changes


def device_type() -> str:
    """Return "GPU" where this rank drives GPUs, "CPU" elsewhere."""
    return "GPU" if tf.config.list_physical_devices("GPU") else "CPU"


def takes_gpu_branch() -> bool:
    """Return whether a step goes the way of GPUs: in XLA's clusters, with logs read now and then.

    So it does on GPUs; and on CPUs where the environment has DTRANSFORMER_GPU_BRANCH=1, by which tests
    hold that way without a GPU. What only a GPU has, `device_type` tells.
    """
    return device_type() == "GPU" or os.environ.get("DTRANSFORMER_GPU_BRANCH") == "1"


def unused_driver() -> str | None:
    """Return the version of an NVIDIA driver whose GPUs TensorFlow does not see; None without.

    What `CUDA_VISIBLE_DEVICES` hides is not missed.
    """
    if nvidia_driver.are_gpus_hidden() or device_type() == "GPU":
        return None
    return nvidia_driver.driver_version()


@functools.cache
def _cores_at_start():
    """Return the cores that this process may run on before it is bound to a share of them."""
    return sorted(os.sched_getaffinity(0))


def take_devices(local_rank: int, local_size: int, local_devices: int, is_pipeline: bool) -> None:
    """Take this rank's GPUs, or its share of the machine's cores.

    Args:
        local_rank: this rank's number on its host.
        local_size: number of ranks of the host.
        local_devices: number of devices of each.
        is_pipeline: whether the rank sends to others while it computes.

    Raises:
        RuntimeError: the host has fewer GPUs than its ranks ask for, or the first tensor was made
            before.
    """
    if tf.config.list_physical_devices("GPU"):
        _take_gpus(local_rank, local_size, local_devices)
        return
    if local_rank == 0 and (driver := unused_driver()):
        warnings.warn(
            f"this host has an NVIDIA driver ({driver}), and TensorFlow sees no GPU: what follows is "
            "computed on CPUs; 'dtransformer doctor' says why",
            stacklevel=3,
        )
    if local_size == local_devices == 1:
        return
    cores = _cores_at_start()
    share = len(cores) // local_size
    if local_size > 1:
        _bind_to(cores[local_rank * share : (local_rank + 1) * share])
    try:
        tf.config.threading.set_intra_op_parallelism_threads(max(share // local_devices, 1))
        if is_pipeline:  # what is sent has to leave while the only core computes
            tf.config.threading.set_inter_op_parallelism_threads(share + _THREADS_THAT_SEND)
    except RuntimeError:  # TensorFlow has started: slower, but not wrong
        warnings.warn(
            "dtransformer.init() comes after the first tensor, so that the devices of this host "
            "share its cores badly: call it first",
            stacklevel=3,
        )


def logical_gpus() -> int:
    """Return how many logical GPUs a card gives, as DTRANSFORMER_LOGICAL_GPUS says; 1 by default.

    For trying layouts on one card: logical GPUs of a card share its memory and its time.
    """
    asked = os.environ.get("DTRANSFORMER_LOGICAL_GPUS", "1")
    if not asked.isdecimal() or not int(asked):
        raise ValueError(f"DTRANSFORMER_LOGICAL_GPUS must be a positive integer, got {asked!r}")
    return int(asked)


def all_devices(local_size: int) -> int:
    """Return the number of devices of each rank where a host's ranks share all of its GPUs."""
    return max(len(tf.config.list_physical_devices("GPU")) * logical_gpus() // local_size, 1)


def cards_of_its_own(local_size: int, local_devices: int) -> str | None:
    """Return the GPUs that this rank alone was given, as CUDA_VISIBLE_DEVICES has them; or None.

    So it is where it sees as many as it drives, and not as many as the host's ranks do.
    """
    number = len(tf.config.list_physical_devices("GPU"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    is_own = local_size > 1 and number == local_devices and logical_gpus() == 1
    return visible if is_own else None


def _take_gpus(local_rank, local_size, local_devices):
    """Make this rank's GPUs the visible ones, with memory that is taken as it is needed."""
    cards, parts = tf.config.list_physical_devices("GPU"), logical_gpus()
    slots = [card for card in cards for _ in range(parts)]
    own = slots[local_rank * local_devices : (local_rank + 1) * local_devices]
    if cards_of_its_own(local_size, local_devices):
        own = cards  # what started this rank has chosen
    if len(own) < local_devices:
        raise RuntimeError(
            f"this host has {len(slots)} GPUs and {local_size} ranks of {local_devices}: start at "
            "most one rank a GPU, or cut cards with DTRANSFORMER_LOGICAL_GPUS to try a layout"
        )
    for number, card in enumerate(own):
        if (before := _cards_of_gpus.setdefault(number, card)) != card:
            raise RuntimeError(
                f"GPU:{number} of this process is the card {before}, and would be {card} with "
                f"local_devices={local_devices}: TensorFlow changes no card of a process; start one "
                "for each number of local devices"
            )
    near = {core for card in own for core in nvidia_driver.cores_near(cards.index(card))}
    _bind_to(sorted(near.intersection(_cores_at_start())))  # and so the memory that they take
    try:
        tf.config.set_visible_devices(list(dict.fromkeys(own)), "GPU")
        for card in dict.fromkeys(own):
            if parts == 1:
                tf.config.experimental.set_memory_growth(card, True)
                continue
            os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
            share = tf.config.LogicalDeviceConfiguration(_MEGABYTES_OF_A_LOGICAL_GPU)
            tf.config.set_logical_device_configuration(card, [share] * own.count(card))
    except RuntimeError as error:
        raise RuntimeError(
            f"call dtransformer.init() before the first tensor is made ({error})"
        ) from None


def _bind_to(cores):
    """Keep all threads of this process on its own cores, whose caches hold what they work on.

    Without cores, or with DTRANSFORMER_BIND_CORES=0, they stay where they are.
    """
    if not cores or os.environ.get("DTRANSFORMER_BIND_CORES") == "0":
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), cores)
