"""Joining and leaving the job: Horovod, devices, the watchdog, the mesh, the groups of ranks.

`init` joins the job that `horovodrun` started, or runs alone. Horovod is needed
for several ranks only, DTensor where operations are sharded.
"""

import dataclasses
import math
import os
import socket

import tensorflow as tf

from dtransformer import _compat
from dtransformer.errors import InputError, check_int, shown
from dtransformer.parallel.config import validators
from dtransformer.parallel.config.config import (
    TransformerOpParallelConfig,
    check_config,
    get_parallel_config,
    set_parallel_config,
)
from dtransformer.parallel.config.topology import Topology
from dtransformer.parallel.runtime import job
from dtransformer.parallel.runtime.devices import all_devices, device_type, take_devices
from dtransformer.parallel.runtime.launch import (
    compare_ranks,
    fitting,
    leave_at_exit,
    start_horovod,
    start_mesh,
    stop_horovod,
    stop_mesh,
)
from dtransformer.parallel.runtime.process_groups import ProcessGroups, exchange_json
from dtransformer.parallel.watchdog.activity_tracker import ActivityTracker
from dtransformer.parallel.watchdog.links import Hub, Member, new_token, own_address, own_host
from dtransformer.parallel.watchdog.stop_barrier import StopBarrier
from dtransformer.parallel.watchdog.thread import Watchdog

STALL_SECONDS = 50.0  # a job ends within a minute of any fault
_LEAST = 10.0  # beats come every second, and half of it is silence enough
_FROM_ENVIRONMENT = "DTRANSFORMER_STALL_SECONDS"
_SECONDS_TO_CONNECT = 20.0


def stall_seconds_of(value: float | None) -> float:
    """Return `stall_seconds`, from the argument, the environment, or by default.

    Raises:
        InputError: it is no number that can be one.
    """
    value = os.environ.get(_FROM_ENVIRONMENT) or STALL_SECONDS if value is None else value
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if seconds != 0 and not _LEAST <= seconds < math.inf:
        raise InputError(
            f"stall_seconds, or {_FROM_ENVIRONMENT}, must be 0 for none, or at least {_LEAST}, got "
            f"{shown(value)}"
        )
    return seconds


def start_watchdog(
    hvd,
    stall_seconds: float,
    recorder: ActivityTracker,
    gates: StopBarrier,
    running: Watchdog | None,
) -> Watchdog | None:
    """Return the watchdog of this rank; None where there is none. All ranks have to call.

    Args:
        hvd: the module `horovod.tensorflow`, started; None where the process runs alone.
        stall_seconds: how long a step may take; 0 for no watchdog.
        recorder, gates: as `Watchdog` takes them.
        running: the watchdog of a job that is joined anew.

    Raises:
        RuntimeError: rank 0 cannot be reached.
    """
    if running is not None and running.stall_seconds == stall_seconds:
        return running
    if running is not None:
        running.leave()
    if hvd is None or stall_seconds == 0:
        return None
    rank, size = hvd.rank(), hvd.size()
    own, listener = {"host": own_host()}, None
    if rank == 0:
        host = own_address(is_local=hvd.local_size() == size)
        listener = socket.create_server((host, 0), backlog=min(size, 4096))
        own |= {"address": listener.getsockname()[:2], "token": new_token()}
    everyone = exchange_json(own, lambda text: hvd.allgather(text, name="dtransformer.watchdog"))
    address, token = everyone[0]["address"], everyone[0]["token"]
    if rank == 0:
        link = Hub(listener, token, size)
    else:
        try:
            link = Member(address, token, rank, _SECONDS_TO_CONNECT)
        except OSError as error:
            raise RuntimeError(
                f"rank {rank} on host {own['host']} cannot reach the watchdog of rank 0 at "
                f"{address[0]}:{address[1]} ({error}): let the hosts of the job reach each other at "
                f"any port, or give stall_seconds=0, without a watchdog"
            ) from None
    hosts = [one["host"] for one in everyone]
    return Watchdog(rank, hosts, link, stall_seconds, recorder, gates)


def init(
    config: TransformerOpParallelConfig | None = None,
    *,
    seed: int | None = None,
    local_devices: int | str = 1,
    stall_seconds: float | None = None,
    deterministic: bool = False,
) -> Topology:
    """Join the job and make `config` the global parallel config.

    Call it once, before any tensor is made: where operations are sharded, DTensor starts
    TensorFlow anew. Under `horovodrun` every process becomes a rank of the job; under
    `python` the process runs alone. On CPUs the ranks of a host take cores of their own,
    unless the environment has `DTRANSFORMER_BIND_CORES=0`.

    Args:
        config: a `TransformerOpParallelConfig`; the current global one by default.
        seed: int, from which initial weights and dropout masks are derived; 0 by
            default. The same on every rank.
        local_devices: number of devices that each rank drives: GPUs, or logical CPU
            devices where there is no GPU. "all" shares all GPUs of a host among its ranks.
        stall_seconds: how long a step may take until the watchdog ends the job, on every rank
            and with the name of the one at fault; more where steps are slow, and while
            functions are compiled, checkpoints saved or data validated. 0 for no watchdog. By
            default what the environment has as DTRANSFORMER_STALL_SECONDS, or 50.
        deterministic: whether operations of this process give the same bits each time, for as
            long as it lasts: on GPUs slower ones; one that has no such form is an error.

    Returns:
        The `Topology` of the job.

    Raises:
        TypeError: the config is none.
        ValueError: an argument is not allowed, the config's degrees do not multiply to the number
            of devices, its fields do not work together, or ranks have different configs.
        RuntimeError: there are several ranks and Horovod is not installed, this host has fewer
            GPUs than its ranks ask for, or ranks of a mesh were in different ones before.

    Example:

    >>> import dtransformer
    >>> print(dtransformer.init(dtransformer.TransformerOpParallelConfig()))
    one rank
    """
    config = get_parallel_config() if config is None else config
    check_config(config)
    if seed is not None:
        check_int("seed", seed, least=0)
    if local_devices != "all":
        check_int("local_devices", local_devices)
    stall_seconds = stall_seconds_of(stall_seconds)
    before = job.current()
    hvd = start_horovod()
    rank, size, local_rank = (hvd.rank(), hvd.size(), hvd.local_rank()) if hvd else (0, 1, 0)
    local_size = hvd.local_size() if hvd else 1
    local_devices = all_devices(local_size) if local_devices == "all" else local_devices
    config = fitting(config, size * local_devices)
    topology = Topology.from_config(config, size, local_devices)
    validators.check_supported(config, local_devices)
    _check_meshes(topology)
    _leave_layout()
    if deterministic:
        tf.config.experimental.enable_op_determinism()
    has_devices = before.is_joined and before.mesh is None  # to leave a mesh starts TensorFlow anew
    if has_devices and before.topology.local_devices != local_devices:
        _compat.end_context()
        has_devices = False
    if not has_devices:  # before the first operation
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
    own = (rank, size, local_rank, topology, config.placement, hvd, groups, seed)
    kept = {"gates": before.gates, "meshes": before.meshes, "watchdog": watchdog}
    job.become(job.Job(*own, is_joined=True, **kept))
    with job.waiting("dtransformer.init", range(size)):
        _join_layout(topology, rank, addresses)
    return topology


def _join_layout(topology, rank, addresses):
    """Start the mesh, and make the groups of the layout."""
    groups, config = job.current().groups, get_parallel_config()
    everyone = range(topology.num_ranks)
    mesh = start_mesh(topology, rank, addresses, device_type())
    ranks = {len(topology.model_parallel_group(rank))} if mesh is not None else set()
    joined = dataclasses.replace(
        job.current(),
        mesh=mesh,
        meshes=job.current().meshes | ranks,
        model_parallel_group=groups.own([topology.model_parallel_group(r) for r in everyone]),
        data_parallel_group=groups.own([topology.data_parallel_group(r) for r in everyone]),
        pipeline_group=groups.own([topology.pipeline_group(r) for r in everyone]),
    )
    job.become(joined)
    for ranks in dict.fromkeys(topology.pipeline_group(r) for r in everyone):
        for pair in config.placement.stage_pairs:  # which send to each other
            job.agreed_group(tuple(sorted(ranks[stage] for stage in pair)))


def _check_meshes(topology):
    """Refuse a mesh whose ranks were in different ones before.

    DTensor numbers collectives by how many a process has compiled: its ranks would wait for ever.
    """
    ranks, before = len(topology.model_parallel_group(0)), job.current().meshes
    if ranks > 1 and any(number % ranks for number in before):
        raise RuntimeError(
            f"this layout has meshes of {ranks} ranks, which were in meshes of {min(before)} before and "
            f"have compiled other collectives there: start the ranks anew for it"
        )


def _leave_layout():
    """Stop the mesh, where there is one, once every rank is done with it."""
    if job.mesh() is not None:
        job.barrier()
        stop_mesh()
        job.become(dataclasses.replace(job.current(), mesh=None))


def shutdown() -> None:
    """Leave the job, once every rank is here. Without a job, do nothing."""
    with job.doing("saving"):
        for wait in job.waits_before_leaving:
            wait()
    _leave_layout()
    job.barrier()
    if job.watchdog() is not None:
        job.watchdog().leave()
        leave_at_exit(job.current().hvd)
    stop_horovod(job.current().hvd)
    job.become(job.Job(seed=job.seed(), meshes=job.current().meshes))
