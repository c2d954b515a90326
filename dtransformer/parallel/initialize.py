"""Joining and leaving the job: Horovod, devices, the watchdog, the mesh and the groups of ranks.

`init` joins the job that `horovodrun` started, or runs a job of one rank. Horovod is only needed
for several ranks, and DTensor only if operations are sharded.
"""

import dataclasses
import math
import os
import socket

import tensorflow as tf

import dtransformer.parallel.recompute.recompute  # noqa: F401 (replaces Keras' recompute)
from dtransformer import _compat
from dtransformer.errors import InputError, check_int, short_repr
from dtransformer.parallel.config import validators
from dtransformer.parallel.config.config import (
    TransformerOpParallelConfig,
    check_config,
    get_parallel_config,
    set_parallel_config,
)
from dtransformer.parallel.config.topology import Topology
from dtransformer.parallel.runtime import job
from dtransformer.parallel.runtime.devices import device_type, devices_per_rank, take_devices
from dtransformer.parallel.runtime.launch import (
    compare_ranks,
    fit_to_devices,
    leave_at_exit,
    start_horovod,
    start_mesh,
    stop_horovod,
    stop_mesh,
)
from dtransformer.parallel.runtime.process_groups import ProcessGroups, exchange_json
from dtransformer.parallel.watchdog.activity_tracker import ActivityTracker
from dtransformer.parallel.watchdog.links import Hub, Member, host_name, listen_address, new_token
from dtransformer.parallel.watchdog.stop_barrier import StopBarriers
from dtransformer.parallel.watchdog.thread import Watchdog

STALL_SECONDS = 50.0  # A job ends within a minute of any fault.
# Heartbeats arrive every second, and a rank fails after half of this time without one.
_MIN_STALL_SECONDS = 10.0
_STALL_VARIABLE = "DTRANSFORMER_STALL_SECONDS"
_SECONDS_TO_CONNECT = 20.0


def resolve_stall_seconds(value: float | None) -> float:
    """Return `stall_seconds` from the argument, the environment or the default, in this order.

    Raises:
        InputError: If the value is neither 0 nor a finite number of at least 10.
    """
    value = os.environ.get(_STALL_VARIABLE) or STALL_SECONDS if value is None else value
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if seconds != 0 and not _MIN_STALL_SECONDS <= seconds < math.inf:
        raise InputError(
            f"`stall_seconds`, or {_STALL_VARIABLE}, must be 0 to disable the watchdog or at least "
            f"{_MIN_STALL_SECONDS}, got {short_repr(value)}."
        )
    return seconds


def start_watchdog(
    hvd,
    stall_seconds: float,
    recorder: ActivityTracker,
    gates: StopBarriers,
    running: Watchdog | None,
) -> Watchdog | None:
    """Start the watchdog of this rank and return it, or return `None` if it is disabled.

    All ranks must call this function.

    Args:
        hvd: The initialized module `horovod.tensorflow`, or `None` for a single process.
        stall_seconds: Time limit in seconds of a step. `0` disables the watchdog.
        recorder: `ActivityTracker` of this rank.
        gates: `StopBarriers` of this rank.
        running: `Watchdog` of a previous `init`, or `None`. It is kept if its time limit is the
            same.

    Raises:
        RuntimeError: If rank 0 cannot be reached.
    """
    if running is not None and running.stall_seconds == stall_seconds:
        return running
    if running is not None:
        running.leave()
    if hvd is None or stall_seconds == 0:
        return None
    rank = hvd.rank()
    size = hvd.size()
    contact = {"host": host_name()}
    listener = None
    if rank == 0:
        host = listen_address(is_local=hvd.local_size() == size)
        listener = socket.create_server((host, 0), backlog=min(size, 4096))
        contact |= {"address": listener.getsockname()[:2], "token": new_token()}
    contacts = exchange_json(
        contact, lambda text: hvd.allgather(text, name="dtransformer.watchdog")
    )
    address = contacts[0]["address"]
    token = contacts[0]["token"]
    if rank == 0:
        link = Hub(listener, token, size)
    else:
        try:
            link = Member(address, token, rank, _SECONDS_TO_CONNECT)
        except OSError as error:
            raise RuntimeError(
                f"Rank {rank} on host {contact['host']} cannot reach the watchdog of rank 0 at "
                f"{address[0]}:{address[1]} ({error}). Allow connections between the hosts of the job "
                "at any port, or set `stall_seconds=0` to disable the watchdog."
            ) from None
    hosts = [contact_of_rank["host"] for contact_of_rank in contacts]
    return Watchdog(rank, hosts, link, stall_seconds, recorder, gates)


def init(
    config: TransformerOpParallelConfig | None = None,
    *,
    seed: int | None = None,
    local_devices: int | str = 1,
    stall_seconds: float | None = None,
    deterministic: bool = False,
) -> Topology:
    """Join the job and set the global parallel config.

    Call this once, before any tensor is created. If operations are sharded, DTensor restarts
    TensorFlow. Under `horovodrun` every process becomes a rank of the job, and under `python` the
    process is a job of one rank. On CPUs, each rank of a host gets separate cores, unless
    `DTRANSFORMER_BIND_CORES=0` is set in the environment.

    Args:
        config: `TransformerOpParallelConfig`. `None` uses the global config. Defaults to `None`.
        seed: Integer. Seed of initial weights and dropout masks, identical on all ranks. `None`
            keeps the current seed, which is initially 0. Defaults to `None`.
        local_devices: Integer or `"all"`. Number of devices per rank: GPUs, or logical CPU devices
            if there is no GPU. `"all"` divides all GPUs of a host among its ranks. Defaults to `1`.
        stall_seconds: Float. Time limit of a step in seconds. The watchdog then ends the job
            on every rank and names the rank at fault. Slow steps, compilation, checkpoints and
            validation have longer limits. `0` disables the watchdog. `None` uses the environment
            variable DTRANSFORMER_STALL_SECONDS, or 50 if it is not set. Defaults to `None`.
        deterministic: Boolean. Whether operations of this process return the same bits every time,
            until it ends. On GPUs they are slower, and operations without a deterministic form
            raise an error. Defaults to `False`.

    Returns:
        The `Topology` of the job.

    Raises:
        TypeError: If `config` is not a `TransformerOpParallelConfig`.
        ValueError: If an argument is invalid, the product of the degrees is not the number of
            devices, fields of the config conflict, or ranks have different configs.
        RuntimeError: If there are several ranks but Horovod is not installed, the host has fewer
            GPUs than its ranks need, or ranks of a mesh were in different meshes before.

    Example:

    >>> import dtransformer
    >>> print(dtransformer.init(dtransformer.TransformerOpParallelConfig()))
    one rank
    """
    config = get_parallel_config() if config is None else config
    check_config(config)
    if seed is not None:
        check_int("seed", seed, minimum=0)
    if local_devices != "all":
        check_int("local_devices", local_devices)
    stall_seconds = resolve_stall_seconds(stall_seconds)
    before = job.current()
    hvd = start_horovod()
    rank, size, local_rank = (hvd.rank(), hvd.size(), hvd.local_rank()) if hvd else (0, 1, 0)
    local_size = hvd.local_size() if hvd else 1
    local_devices = devices_per_rank(local_size) if local_devices == "all" else local_devices
    config = fit_to_devices(config, size * local_devices)
    topology = Topology.from_config(config, size, local_devices)
    validators.check_supported(config, local_devices)
    _check_meshes(topology)
    _leave_layout()
    if deterministic:
        tf.config.experimental.enable_op_determinism()
    has_devices = before.is_joined and before.mesh is None  # Leaving a mesh restarts TensorFlow.
    if has_devices and before.topology.local_devices != local_devices:
        _compat.end_context()
        has_devices = False
    if not has_devices:  # Devices must be set before the first operation.
        take_devices(local_rank, local_size, local_devices, config.pipeline_stage > 1)
    addresses = [None]
    if hvd:
        addresses = compare_ranks(hvd, config, seed, local_devices, stall_seconds)
    watchdog = start_watchdog(hvd, stall_seconds, job.activity, before.gates, before.watchdog)
    if hvd:
        leave_at_exit(hvd, watchdog)
    set_parallel_config(config.resolve(size, local_devices))
    groups = ProcessGroups(rank, size, hvd, before.groups)
    seed = before.seed if seed is None else seed
    arguments = (rank, size, local_rank, topology, config.placement, hvd, groups, seed)
    preserved = {"gates": before.gates, "meshes": before.meshes, "watchdog": watchdog}
    job.become(job.Job(*arguments, is_joined=True, **preserved))
    with job.record_wait("dtransformer.init", range(size)):
        _join_layout(topology, rank, addresses)
    return topology


def _join_layout(topology, rank, addresses):
    """Start the mesh and create the groups of the layout."""
    config = get_parallel_config()
    all_ranks = range(topology.num_ranks)
    mesh = start_mesh(topology, rank, addresses, device_type())
    meshes = job.current().meshes
    if mesh is not None:
        meshes |= {len(topology.model_parallel_group(rank))}
    job.become(dataclasses.replace(job.current(), mesh=mesh, meshes=meshes))
    for group in (
        topology.model_parallel_group,
        topology.data_parallel_group,
        topology.pipeline_group,
    ):
        for ranks in dict.fromkeys(map(group, all_ranks)):
            job.agreed_group(ranks)
    for ranks in dict.fromkeys(topology.pipeline_group(r) for r in all_ranks):
        for pair in config.placement.stage_pairs:  # These stages send to each other.
            job.agreed_group(tuple(sorted(ranks[stage] for stage in pair)))


def _check_meshes(topology):
    """Raise an error if the ranks of a mesh were in different meshes before.

    DTensor numbers collectives by the count that a process has compiled, so such ranks would
    deadlock.
    """
    ranks = len(topology.model_parallel_group(0))
    before = job.current().meshes
    if ranks > 1 and any(size % ranks for size in before):
        raise RuntimeError(
            f"This layout has meshes of {ranks} ranks, but the ranks were in meshes of {min(before)} "
            "before and compiled other collectives there. Start new processes for this layout."
        )


def _leave_layout():
    """Stop the mesh, if any, when every rank has finished with it."""
    if job.mesh() is not None:
        job.barrier()
        stop_mesh()
        job.become(dataclasses.replace(job.current(), mesh=None))


def shutdown() -> None:
    """Leave the job when every rank has called this. Does nothing without a job."""
    with job.record_activity("saving"):
        for wait in job.waits_before_leaving:
            wait()
    _leave_layout()
    job.barrier()
    if job.watchdog() is not None:
        job.watchdog().leave()
        leave_at_exit(job.current().hvd)
    stop_horovod(job.current().hvd)
    job.become(job.Job(seed=job.seed(), meshes=job.current().meshes))
