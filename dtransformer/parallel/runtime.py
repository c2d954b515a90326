"""Joining the job: ranks, devices, the island's mesh and the data group.

`init` joins the job that `horovodrun` started, or runs alone. Horovod is needed
for several ranks only, DTensor where operations are cut.
"""

import atexit
import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import time
import warnings

import tensorflow as tf

from dtransformer.parallel import groups, layout
from dtransformer.parallel.config import (
    TransformerOpParallelConfig,
    check_schedule,
    get_parallel_config,
    set_parallel_config,
)
from dtransformer.parallel.mesh import free_address, start_mesh, stop_mesh
from dtransformer.parallel.topology import Topology

_DEFAULT_SEED = 0
_SECONDS_FOR_THE_RANK_AT_FAULT = 20  # horovodrun ends this one as soon as that one has ended
# How often ranks on CPUs ask each other what there is to send. Horovod's own 1 ms takes a tenth
# of the time of the cores that compute.
_CYCLE_MILLISECONDS = "5"
_THREADS_FOR_MESSAGES = 3


@dataclasses.dataclass(frozen=True)
class _Job:
    """The job as this rank sees it; `hvd` is None where it runs alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    topology: Topology = Topology()
    hvd: object = None
    island: groups.Group | None = None
    data_group: groups.Group | None = None
    pipeline_group: groups.Group | None = None


_job = _Job()
_initialized = False
_before_leaving = []
_seed = _DEFAULT_SEED


def _started_by_horovodrun():
    return int(os.environ.get("HOROVOD_SIZE", "1")) > 1


def _import_horovod():
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise RuntimeError(
            f"this job has {os.environ['HOROVOD_SIZE']} ranks, which needs Horovod, and it cannot be "
            f"imported ({error}): run 'python tools/build_horovod.py', or start one process with python"
        ) from error
    return hvd


# What the config knows and this version cannot carry out, with what to set instead.
_NOT_YET = {
    "context_parallel": (1,),
    "expert_parallel": (1,),
}

# What each stage of a pipeline would have to do once for every micro-batch.
_NOT_WITH_A_PIPELINE = {
    "optimizer_shard": "every weight would be gathered twice for each micro-batch; level 2 cuts "
    "gradients and optimizer states, and a stage has its own weights only",
    "gradient_accumulation_shard": "gradients would be sent for each micro-batch; leave it False",
}


def check_supported(config):
    """Refuse a config that this version cannot carry out, instead of ignoring it.

    Raises:
        NotImplementedError: names the field.
        ValueError: fields do not work together; says why.
    """
    for name, allowed in _NOT_YET.items():
        value = getattr(config, name)
        if not any(value is a or value == a and type(value) is type(a) for a in allowed):
            raise NotImplementedError(
                f"{name}={value}: this version cannot carry it out yet; set {name}={allowed[0]}"
            )
    if config.pipeline_stage > 1:
        for name, reason in _NOT_WITH_A_PIPELINE.items():
            value = getattr(config, name)
            if value is True or value == 3:
                raise ValueError(
                    f"{name}={value} does not work with pipeline_stage={config.pipeline_stage}: "
                    f"{reason}"
                )
        check_schedule(
            config.pipeline_schedule,
            config.pipeline_stage,
            config.micro_batch_num,
            config.pipeline_chunks,
        )
    elif config.pipeline_chunks > 1:
        raise ValueError(
            f"pipeline_chunks={config.pipeline_chunks} are those of a pipeline's stages: set "
            "pipeline_stage=2 or more"
        )


def check_joined(config):
    """Check that the job was joined with a config.

    Raises:
        RuntimeError: operations are to be cut, and `init` has made no mesh for it.
    """
    joined = {"model_parallel": _job.topology.model, "pipeline_stage": _job.topology.stage}
    for name, number in joined.items():
        if getattr(config, name) != number:
            raise RuntimeError(
                f"the config has {name}={getattr(config, name)}, and the job was joined with "
                f"{number}: call dtransformer.init(config) before the network is made"
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
        _check_seed(seed)
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
    check_supported(config)
    if not _initialized:  # before the first operation
        local_size = hvd.local_size() if hvd else 1
        _take_devices(local_rank, local_size, local_devices, config.pipeline_stage > 1)
        atexit.register(_at_exit)
    addresses = [None]
    if hvd:
        addresses = _compare_configs(hvd, config, seed, local_devices)
    set_parallel_config(config.resolve(size, local_devices))
    if seed is not None:
        set_seed(seed)
    _job = _Job(rank, size, local_rank, topology, hvd)
    _initialized = True
    layout.set_mesh(start_mesh(topology, rank, addresses, device_type()))
    everyone = range(size)
    _job = dataclasses.replace(
        _job,
        island=_own_group(rank, [topology.island(r) for r in everyone]),
        data_group=_own_group(rank, [topology.data_group(r) for r in everyone]),
        pipeline_group=_own_group(rank, [topology.pipeline_group(r) for r in everyone]),
    )
    for pair in dict.fromkeys(pair for r in everyone for pair in topology.stage_pairs(r)):
        groups.agreed_group(pair)
    return topology


def _own_group(rank, all_ranks):
    """Make every group, on all ranks in the same order; return this rank's."""
    made = {ranks: groups.agreed_group(ranks) for ranks in dict.fromkeys(all_ranks)}
    return made[all_ranks[rank]]


def _compare_configs(hvd, config, seed, local_devices):
    """Return the addresses of all ranks.

    Raise the same error on every rank where ranks were started differently.
    """
    mine = {**dataclasses.asdict(config), "seed": seed, "local_devices": local_devices}
    address = free_address(local=hvd.local_size() == hvd.size())
    everyone, addresses = zip(*hvd.allgather_object((mine, address), name="dtransformer.config"))
    for field, expected in everyone[0].items():
        others = [rank for rank, theirs in enumerate(everyone) if theirs[field] != expected]
        if others:
            raise ValueError(
                f"ranks disagree on {field}: rank 0 has {expected!r}, rank {others[0]} has "
                f"{everyone[others[0]][field]!r}; start every rank with the same config"
            )
    return addresses


def device_type():
    """Return "GPU" where this rank drives GPUs, "CPU" elsewhere."""
    return "GPU" if tf.config.list_physical_devices("GPU") else "CPU"


def _take_devices(local_rank, local_size, local_devices, is_pipeline):
    """Take this rank's GPUs, or its share of the machine's cores."""
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        own = gpus[local_rank * local_devices : (local_rank + 1) * local_devices]
        if len(own) < local_devices:
            raise RuntimeError(
                f"this host has {len(gpus)} GPUs and {local_size} ranks of {local_devices}: start "
                "at most one rank a GPU"
            )
        tf.config.set_visible_devices(own, "GPU")
        for gpu in own:
            tf.config.experimental.set_memory_growth(gpu, True)
        return
    if local_size == local_devices == 1:
        return
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // local_size
    if local_size > 1 and share and os.environ.get("DTRANSFORMER_BIND_CORES") != "0":
        _bind_to(cores[local_rank * share : (local_rank + 1) * share])
    try:
        tf.config.threading.set_intra_op_parallelism_threads(max(share // local_devices, 1))
        if is_pipeline:  # messages have to leave while the only core computes
            tf.config.threading.set_inter_op_parallelism_threads(share + _THREADS_FOR_MESSAGES)
    except RuntimeError:  # TensorFlow has started: slower, but not wrong
        warnings.warn(
            "dtransformer.init() comes after the first tensor, so that the devices of this host "
            "share its cores badly: call it first",
            stacklevel=3,
        )


def _bind_to(cores):
    """Keep all threads of this process on its own cores, whose caches hold what they work on."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), cores)


def _leave_mesh():
    """Stop the mesh, if there is one, once every rank is done with it."""
    if layout.get_mesh() is not None:
        barrier()
        stop_mesh()
        layout.set_mesh(None)


def shutdown():
    """Leave the job, once every rank is here. Without a job, do nothing."""
    global _job, _initialized
    for wait in _before_leaving:
        wait()
    _leave_mesh()
    barrier()
    _leave_job()
    _job, _initialized = _Job(), False


def before_leaving(wait):
    """Let `shutdown` call a function first: it waits for what needs the other ranks."""
    if wait not in _before_leaving:
        _before_leaving.append(wait)


def _leave_job():
    groups.forget()
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
    return _job


def horovod():
    """Return the module `horovod.tensorflow`, or None where the process runs alone."""
    return _job.hvd


def island():
    """Return the `Group` of the ranks that compute together with this one, on one mesh."""
    return _job.island or groups.whole_job()


def data_group():
    """Return the `Group` of the ranks that hold the same slices of the weights."""
    return _job.data_group or groups.whole_job()


def pipeline_group():
    """Return the `Group` of the ranks that hold the stages of one copy of the network."""
    return _job.pipeline_group or groups.agreed_group([rank()])


def stage():
    """Return (index, number): this rank's pipeline stage, and how many there are."""
    return _job.topology.stage_of(_job.rank), _job.topology.stage


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
    return layout.get_mesh() is not None or stage()[1] > 1


def seed():
    """Return the seed that initial weights and dropout masks are derived from."""
    return _seed


def set_seed(value):
    """Set the seed that initial weights and dropout masks are derived from.

    Initial weights depend on this seed and on the weight's path only, whatever
    the layout of the job.

    Args:
        value: an int of at least 0, the same on every rank.
    """
    global _seed
    _check_seed(value)
    _seed = value


def _check_seed(value):
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"seed must be an int, got {value!r} ({type(value).__name__})")
    if value < 0:
        raise ValueError(f"seed must be at least 0, got {value}")


def derived_seed(*names):
    """Return a seed in [0, 2³¹) that depends on the job's seed and `names` only."""
    text = json.dumps([_seed, *names])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") >> 1
