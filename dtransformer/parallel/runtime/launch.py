"""Start and shutdown of Horovod and the DTensor mesh.

If there are several ranks, this module starts Horovod and compares the configuration of all ranks.
A mesh covers the devices of one process or of several.
"""

import atexit
import dataclasses
import os
import socket
import sys
import time
import types

from tensorflow.experimental import dtensor

from dtransformer import _compat
from dtransformer.errors import InputError, is_from_other_rank, short_repr, to_one_line
from dtransformer.parallel.config import validators
from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.parallel.config.elastic_config import FITS_LAYOUT, refit
from dtransformer.parallel.config.topology import Topology
from dtransformer.parallel.runtime import job
from dtransformer.parallel.runtime.devices import device_type, exclusive_gpus, logical_gpus
from dtransformer.parallel.runtime.process_groups import exchange_json
from dtransformer.parallel.watchdog.links import host_name
from dtransformer.parallel.watchdog.thread import Watchdog

# DTensor reads the members of its cluster from these variables.
_CLUSTER = ("DTENSOR_JOB_NAME", "DTENSOR_JOBS", "DTENSOR_CLIENT_ID", "DTENSOR_NUM_CLIENTS")

# The pass that combines all-reduces drops the layouts of their results, so functions could not
# return these results.
os.environ.setdefault("DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION", "0")
# DTensor accepts a call of a StableHLO module only with this variable, see `local_calls`.
os.environ.setdefault("DTENSOR_ENABLE_REPLICATED_SPMD_AS_DEFAULT_TF.XLACALLMODULE", "1")
# Without NCCL, DTensor copies through the host on GPUs. NCCL rejects two devices on one GPU.
os.environ.setdefault("DTENSOR_GPU_USE_NCCL_COMMUNICATION", str(int(logical_gpus() == 1)))


def free_address(local: bool) -> str:
    """Return a free address for this rank to listen on, a "host:port" string.

    Args:
        local: Whether all ranks are on this host.
    """
    host = "localhost" if local else host_name()
    with socket.socket() as listener:
        listener.bind(("", 0))
        return f"{host}:{listener.getsockname()[1]}"


def start_mesh(
    topology: Topology, rank: int, addresses: list[str | None], device_type: str
) -> dtensor.Mesh | None:
    """Start DTensor on the ranks of this rank's mesh. Existing tensors become invalid.

    Args:
        topology: `Topology` of the job.
        rank: Integer. This rank.
        addresses: List of the `free_address` of every rank of the job.
        device_type: `"CPU"` or `"GPU"`.

    Returns:
        A mesh with those `validators.MESH_AXES` that have more than one device, outermost first.
        `None` for a single device, without starting DTensor.
    """
    sizes = {"data": topology.mesh_data, "context": topology.context, "model": topology.model}
    axes = [(axis, sizes[axis]) for axis in validators.MESH_AXES if sizes[axis] > 1]
    if not axes:
        return None
    ranks = topology.model_parallel_group(rank)
    if len(ranks) > 1:
        values = ("worker", ",".join(addresses[r] for r in ranks), str(ranks.index(rank)))
        os.environ.update(zip(_CLUSTER, (*values, str(len(ranks)))))
    _compat.read_long_errors()
    _compat.forget_context()
    dtensor.initialize_accelerator_system(
        device_type,
        experimental_reset_context=True,
        num_logical_cpu_devices=topology.local_devices,
        enable_coordination_service=False,
    )
    return dtensor.create_distributed_mesh(axes, device_type=device_type)


def stop_mesh():
    """Stop DTensor. Call this when every rank of the mesh is done with it."""
    # DTensor cannot stop a cluster, but stops the local part if these are unset.
    for name in _CLUSTER:
        os.environ.pop(name, None)
    _compat.forget_context()
    dtensor.shutdown_accelerator_system()
    _compat.forget_dtensor_device()


# Other launchers store the number of started processes in these variables.
_LAUNCHER_VARIABLES = {
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
    "SLURM_STEP_NUM_TASKS": "srun",
}
_HOROVODRUN_VARIABLES = ("HOROVOD_RANK", "HOROVOD_GLOO_RENDEZVOUS_ADDR")
_FAILED_RANK_SECONDS = 20  # horovodrun stops this rank soon after the failed rank ends.


def start_horovod() -> types.ModuleType | None:
    """Start Horovod and return `horovod.tensorflow`, or return `None` in a job of one rank.

    Raises:
        InputError: If the environment sets a number of ranks without the other variables of
            `horovodrun`, or if another launcher started several processes.
        RuntimeError: If there are several ranks, but Horovod cannot be imported or lacks NCCL on
            GPUs.
    """
    num_ranks = os.environ.get("HOROVOD_SIZE", "1")
    if num_ranks in ("", "0", "1"):
        _check_single_process()
        return None
    if not num_ranks.isdecimal() or not all(os.environ.get(name) for name in _HOROVODRUN_VARIABLES):
        raise InputError(
            f"The environment has HOROVOD_SIZE={short_repr(num_ranks)}, but not all variables that a "
            f"launcher sets ({', '.join(_HOROVODRUN_VARIABLES)}). Start with `dtransformer launch`, or "
            "unset `HOROVOD_SIZE`."
        )
    os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    # Do not fuse buckets that are ready at the same time. With more than two ranks, the order of
    # additions in a ring depends on a tensor's offset in the message.
    os.environ.setdefault("HOROVOD_DISABLE_GROUP_FUSION", "1")
    # Operations then complete on the GPU stream, and the host continues.
    if device_type() == "GPU":
        os.environ.setdefault("HOROVOD_ENABLE_ASYNC_COMPLETION", "1")
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise RuntimeError(
            f"This job has {os.environ['HOROVOD_SIZE']} ranks and needs Horovod, which cannot be "
            f"imported ({error}). Run 'dtransformer doctor --install-horovod', or start a single "
            "process with python."
        ) from error
    if device_type() == "GPU" and not hvd.nccl_built() and logical_gpus() == 1:
        raise RuntimeError(
            "This Horovod was built without NCCL and would send everything through host memory. "
            "Install a Horovod with NCCL, use all GPUs of a host from one process "
            "(`init(local_devices=...)`), or set `DTRANSFORMER_LOGICAL_GPUS` to test layouts on one "
            "GPU."
        )
    with job.activity.polling_threads():
        hvd.init()
    leave_at_exit(hvd)
    return hvd


def leave_at_exit(hvd, watchdog: Watchdog | None = None) -> None:
    """Make this process leave the job when it exits."""
    atexit.unregister(_leave_at_exit)
    atexit.register(_leave_at_exit, hvd, watchdog)


def _check_single_process():
    """Raise an InputError for processes of other launchers, which would train independently."""
    for name, launcher in _LAUNCHER_VARIABLES.items():
        num_processes = os.environ.get(name, "1")
        if num_processes not in ("", "0", "1"):
            raise InputError(
                f"{launcher} has started several processes ({name}={short_repr(num_processes)}), "
                "but ranks communicate with Horovod. Start with `dtransformer launch`, or unset "
                f"{name} to train each process independently."
            )


def fit_to_devices(
    config: TransformerOpParallelConfig, num_devices: int
) -> TransformerOpParallelConfig:
    """Return the config, adapted to the number of devices if `dtransformer launch` requests it."""
    return refit(config, num_devices) if os.environ.get(FITS_LAYOUT) else config


def stop_horovod(hvd) -> None:
    """Shut down Horovod if it is initialized."""
    if hvd is not None and hvd.is_initialized():
        hvd.shutdown()


def _leave_at_exit(hvd, watchdog):
    """Leave the job without waiting for ranks that may have failed.

    A rank that fails because another rank left waits for a while. horovodrun ends the job at the
    first exit and thus reports the rank at fault.
    """
    error = getattr(sys, "last_value", None)
    if is_from_other_rank(error):
        time.sleep(_FAILED_RANK_SECONDS)
    if watchdog is not None:
        watchdog.leave(error and to_one_line(f"{type(error).__name__}: {error}", 160))
    stop_horovod(hvd)


def compare_ranks(
    hvd,
    config: TransformerOpParallelConfig,
    seed: int | None,
    local_devices: int,
    stall_seconds: float,
) -> list[str]:
    """Compare the arguments of `init` across ranks, and return an address of each rank.

    Args:
        hvd: The initialized module `horovod.tensorflow`.
        config: `TransformerOpParallelConfig` passed to `init`.
        seed: Seed passed to `init`.
        local_devices: Number of devices passed to `init`.
        stall_seconds: Time limit passed to `init`.

    Returns:
        A list of "host:port" strings.

    Raises:
        ValueError: If ranks were started with different arguments or share a GPU. Every rank
            raises the same error.
    """
    arguments = {
        **dataclasses.asdict(config),
        "seed": seed,
        "local_devices": local_devices,
        "stall_seconds": stall_seconds,
    }
    address = free_address(local=hvd.local_size() == hvd.size())
    cards = [host_name(), exclusive_gpus(hvd.local_size(), local_devices)]
    answers = exchange_json(
        [arguments, address, cards], lambda text: hvd.allgather(text, name="dtransformer.config")
    )
    all_arguments, addresses, cards = zip(*answers)
    for rank, (host, visible) in enumerate(cards):
        if visible is not None and (first := cards.index([host, visible])) < rank:
            raise ValueError(
                f"Ranks {first} and {rank} see the same GPUs of {host} and no others "
                f"(CUDA_VISIBLE_DEVICES={visible}). Start at most one rank per GPU."
            )
    for field, expected in all_arguments[0].items():
        different = [rank for rank, values in enumerate(all_arguments) if values[field] != expected]
        if different:
            raise ValueError(
                f"Ranks disagree on `{field}`: rank 0 has {expected!r}, rank {different[0]} has "
                f"{all_arguments[different[0]][field]!r}. Start every rank with the same config."
            )
    return list(addresses)
