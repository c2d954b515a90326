"""Joining the job: ranks, devices, the mesh and the groups of ranks.

`init` joins the job that `horovodrun` started, or runs alone. Horovod is needed
for several ranks only, DTensor where operations are sharded.
"""

import atexit
import dataclasses
import os
import sys
import time

import tensorflow as tf

from dtransformer.parallel import validators
from dtransformer.parallel.config import (
    TransformerOpParallelConfig,
    get_parallel_config,
    set_parallel_config,
)
from dtransformer.parallel.devices import device_type, take_devices
from dtransformer.parallel.dtensor.cluster import free_address, start_mesh, stop_mesh
from dtransformer.parallel.json_exchange import exchange_json
from dtransformer.parallel.pipeline.placement import Placement
from dtransformer.parallel.process_groups import Group, ProcessGroups
from dtransformer.parallel.topology import Topology

_SECONDS_FOR_THE_RANK_AT_FAULT = 20  # horovodrun ends this one as soon as that one has ended
# How often ranks on CPUs ask each other what there is to send. Horovod's own 1 ms takes a tenth
# of the time of the cores that compute.
_CYCLE_MILLISECONDS = "5"


@dataclasses.dataclass(frozen=True)
class _Job:
    """The job as this rank sees it; `hvd` is None where it runs alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    topology: Topology = Topology()
    placement: Placement = Placement((0,))
    hvd: object = None
    groups: ProcessGroups = dataclasses.field(default_factory=ProcessGroups)
    model_parallel_group: Group | None = None
    data_parallel_group: Group | None = None
    pipeline_group: Group | None = None
    mesh: object = None
    seed: int = 0


_job = _Job()
_initialized = False
_before_leaving = []


def _started_by_horovodrun():
    return int(os.environ.get("HOROVOD_SIZE", "1")) > 1


def _import_horovod():
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise RuntimeError(
            f"this job has {os.environ['HOROVOD_SIZE']} ranks, which needs Horovod, and it cannot "
            f"be imported ({error}): run 'dtransformer doctor --install-horovod', or start one "
            "process with python"
        ) from error
    return hvd


def check_joined(config):
    """Check that the job was joined with a config.

    Raises:
        RuntimeError: operations are to be cut, and `init` has made no mesh for it; or the
            network is to be divided into other model chunks.
    """
    joined = {"model_parallel": _job.topology.model, "pipeline_stage": _job.topology.stage}
    for name, number in joined.items():
        if getattr(config, name) != number:
            raise RuntimeError(
                f"the config has {name}={getattr(config, name)}, and the job was joined with "
                f"{number}: call dtransformer.init(config) before the network is made"
            )
    if config.placement != _job.placement:
        raise RuntimeError(
            f"the config puts the model chunks on the stages {config.placement.stage_of_chunk}, and "
            f"the job was joined with {_job.placement.stage_of_chunk}: call "
            "dtransformer.init(config) before the network is made"
        )


def init(config=None, *, seed=None, local_devices=1):
    """Join the job and make `config` the global parallel config.

    Call it once, before any tensor is made: where operations are cut, DTensor starts
    TensorFlow anew. Under `horovodrun` every process becomes a rank of the job; under
    `python` the process runs alone. On CPUs the ranks of a host take cores of their own,
    unless the environment has `DTRANSFORMER_BIND_CORES=0`.

    Args:
        config: a `TransformerOpParallelConfig`; the current global one by default.
        seed: int, from which initial weights and dropout masks are derived; 0 by
            default. The same on every rank.
        local_devices: number of devices that each rank drives: GPUs, or logical CPU
            devices where there is no GPU.

    Returns:
        The `Topology` of the job.

    Raises:
        ValueError: the config's degrees do not multiply to the number of devices, or
            ranks were started with different configs.
        RuntimeError: there are several ranks and Horovod is not installed, or this
            host has fewer GPUs than its ranks ask for.

    Example:

    >>> import dtransformer
    >>> print(dtransformer.init(dtransformer.TransformerOpParallelConfig()))
    one rank
    """
    global _job, _initialized
    config = get_parallel_config() if config is None else config
    if not isinstance(config, TransformerOpParallelConfig):
        raise TypeError(f"expected a TransformerOpParallelConfig, got {config!r}")
    if seed is not None:
        validators.seed("seed", seed)
    if not isinstance(local_devices, int) or local_devices < 1:
        raise ValueError(f"local_devices must be an int of at least 1, got {local_devices!r}")
    _leave_mesh()
    hvd = None
    if _started_by_horovodrun():
        os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
        if device_type() == "CPU":
            os.environ.setdefault("HOROVOD_CYCLE_TIME", _CYCLE_MILLISECONDS)
        hvd = _import_horovod()
        hvd.init()
    rank, size, local_rank = (hvd.rank(), hvd.size(), hvd.local_rank()) if hvd else (0, 1, 0)
    topology = Topology.from_config(config, size, local_devices)
    validators.check_supported(config)
    if not _initialized:  # before the first operation
        local_size = hvd.local_size() if hvd else 1
        take_devices(local_rank, local_size, local_devices, config.pipeline_stage > 1)
        atexit.register(_at_exit)
    addresses = [None]
    if hvd:
        addresses = _compare_configs(hvd, config, seed, local_devices)
    set_parallel_config(config.resolve(size, local_devices))
    groups = ProcessGroups(rank, size, hvd)
    seed = _job.seed if seed is None else seed
    _job = _Job(rank, size, local_rank, topology, config.placement, hvd, groups, seed=seed)
    _initialized = True
    everyone = range(size)
    _job = dataclasses.replace(
        _job,
        mesh=start_mesh(topology, rank, addresses, device_type()),
        model_parallel_group=_own_group([topology.model_parallel_group(r) for r in everyone]),
        data_parallel_group=_own_group([topology.data_parallel_group(r) for r in everyone]),
        pipeline_group=_own_group([topology.pipeline_group(r) for r in everyone]),
    )
    for ranks in dict.fromkeys(topology.pipeline_group(r) for r in everyone):
        for pair in config.placement.stage_pairs:  # which send to each other
            agreed_group(sorted(ranks[stage] for stage in pair))
    return topology


def _own_group(group_of_rank):
    """Make every group, on all ranks in the same order; return this rank's."""
    made = {ranks: agreed_group(ranks) for ranks in dict.fromkeys(group_of_rank)}
    return made[group_of_rank[rank()]]


def _compare_configs(hvd, config, seed, local_devices):
    """Return the addresses of all ranks.

    Raise the same error on every rank where ranks were started differently.
    """
    mine = {**dataclasses.asdict(config), "seed": seed, "local_devices": local_devices}
    address = free_address(local=hvd.local_size() == hvd.size())
    answers = exchange_json(
        [mine, address], lambda own: hvd.allgather(own, name="dtransformer.config")
    )
    everyone, addresses = zip(*answers)
    for field, expected in everyone[0].items():
        others = [rank for rank, theirs in enumerate(everyone) if theirs[field] != expected]
        if others:
            raise ValueError(
                f"ranks disagree on {field}: rank 0 has {expected!r}, rank {others[0]} has "
                f"{everyone[others[0]][field]!r}; start every rank with the same config"
            )
    return addresses


def _leave_mesh():
    """Stop the mesh, if there is one, once every rank is done with it."""
    global _job
    if mesh() is not None:
        barrier()
        stop_mesh()
        _job = dataclasses.replace(_job, mesh=None)


def shutdown():
    """Leave the job, once every rank is here. Without a job, do nothing."""
    global _job, _initialized
    for wait in _before_leaving:
        wait()
    _leave_mesh()
    barrier()
    _leave_job()
    _job, _initialized = _Job(seed=_job.seed), False


def before_leaving(wait):
    """Let `shutdown` call a function first: it waits for what needs the other ranks."""
    if wait not in _before_leaving:
        _before_leaving.append(wait)


def _leave_job():
    if _job.hvd is not None and _job.hvd.is_initialized():
        _job.hvd.shutdown()


def _at_exit():
    """Leave without waiting for ranks that may have failed.

    A rank that fails because another one has left waits a moment, so that
    horovodrun, which ends the job with the first exit, names the rank at fault.
    """
    if "Horovod has been shut down" in str(getattr(sys, "last_value", "")):
        time.sleep(_SECONDS_FOR_THE_RANK_AT_FAULT)
    _leave_job()


def is_initialized():
    """Return whether `init` was called."""
    return _initialized


def rank():
    """Return this process' number in the job, from 0."""
    return _job.rank


def size():
    """Return the number of processes of the job."""
    return _job.size


def local_rank():
    """Return this process' number on its host, from 0."""
    return _job.local_rank


def is_chief():
    """Return whether this is rank 0, the one that prints and writes."""
    return _job.rank == 0


def topology():
    """Return the job's `Topology`."""
    return _job.topology


def joined():
    """Return an object that is another one whenever the job was joined anew.

    Compiled functions do not outlive that: a mesh starts TensorFlow anew.
    """
    return _job.groups


def horovod():
    """Return the module `horovod.tensorflow`, or None where the process runs alone."""
    return _job.hvd


def model_parallel_group():
    """Return the `Group` of the ranks that compute together with this one, on one mesh."""
    return _job.model_parallel_group or whole_job()


def data_parallel_group():
    """Return the `Group` of the ranks that hold the same slices of the weights."""
    return _job.data_parallel_group or whole_job()


def pipeline_group():
    """Return the `Group` of the ranks that hold the stages of one copy of the network."""
    return _job.pipeline_group or agreed_group([rank()])


def stage():
    """Return (index, number): this rank's pipeline stage, and how many there are."""
    return _job.topology.stage_of(_job.rank), _job.topology.stage


def placement():
    """Return the `Placement` of the network's model chunks on the pipeline's stages."""
    return _job.placement


def barrier():
    """Wait until every rank is here."""
    if _job.hvd is not None:
        _job.hvd.allreduce(tf.zeros([]), name="dtransformer.barrier")


def data_shard():
    """Return (index, count): which share of every global batch this rank takes.

    The ranks of an island take the same.
    """
    return _job.topology.data_shard(_job.rank)


def rows_multiple_of():
    """Return what has to divide the number of a rank's rows of every batch."""
    config = get_parallel_config()
    return config.micro_batch_num if config.pipeline_stage > 1 else 1


def compiles_shapes():
    """Return whether every shape of a batch is traced or compiled anew: better there are few."""
    return mesh() is not None or stage()[1] > 1


def seed():
    """Return the seed that initial weights and dropout masks are derived from."""
    return _job.seed


def set_seed(value):
    """Set the seed that initial weights and dropout masks are derived from.

    Initial weights depend on this seed and on the weight's path only, whatever
    the layout of the job.

    Args:
        value: an int of at least 0, the same on every rank.
    """
    global _job
    validators.seed("seed", value)
    _job = dataclasses.replace(_job, seed=value)


def mesh():
    """Return the DTensor mesh of this rank; None where it is one device."""
    return _job.mesh


def whole_job():
    """Return the `Group` of all ranks, in order; before `init` that is this process alone."""
    return _job.groups.whole_job()


def new_group(ranks):
    """Return the group of some ranks of the job.

    Every rank of the job calls it, also the ranks that are not in the group, with the
    same ranks and in the same order of calls. A second call with the same ranks returns
    the same group.

    Args:
        ranks: iterable of ints, without repetition. Their order is the group's.

    Returns:
        A `Group`.

    Raises:
        ValueError: on every rank: `ranks` is empty, names a rank twice or one that the
            job does not have, or ranks of the job called with different `ranks`.
        RuntimeError: Horovod was started without HOROVOD_DYNAMIC_PROCESS_SETS=1.

    Example:

    >>> new_group([0])
    Group(ranks=(0,), index=0)
    """
    return _job.groups.new(ranks)


def agreed_group(ranks):
    """As `new_group`, where every rank is known to ask for the same: they do not compare."""
    return _job.groups.agreed(ranks)


def known_group(ranks):
    """Return the group of `ranks` if a group of them was made, in any order; else None."""
    return _job.groups.known(ranks)
