"""Joining the job: ranks, devices and the data group.

`init` joins the job that `horovodrun` started, or runs alone. Horovod is needed
for several ranks only.
"""

import atexit
import dataclasses
import hashlib
import json
import os
import warnings

import tensorflow as tf

from dtransformer.parallel.config import (
    TransformerOpParallelConfig,
    TransformerRecomputeConfig,
    get_parallel_config,
    set_parallel_config,
)
from dtransformer.parallel.topology import Topology

_DEFAULT_SEED = 0


@dataclasses.dataclass(frozen=True)
class _Job:
    """The job as this rank sees it; `hvd` is None where it runs alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    topology: Topology = Topology()
    hvd: object = None


_job = _Job()
_initialized = False
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
    "model_parallel": (1,),
    "pipeline_stage": (1,),
    "context_parallel": (1,),
    "expert_parallel": (1,),
    "micro_batch_num": (1,),
    "optimizer_shard": (False, 0),
    "recompute": (False, TransformerRecomputeConfig()),
}


def check_supported(config):
    """Refuse a config that this version cannot carry out, instead of ignoring it.

    Raises:
        NotImplementedError: names the field.
    """
    for name, allowed in _NOT_YET.items():
        value = getattr(config, name)
        if not any(value is a or value == a and type(value) is type(a) for a in allowed):
            raise NotImplementedError(
                f"{name}={value}: this version trains with data parallelism only; "
                f"set {name}={allowed[0]}"
            )


def init(config=None, *, seed=None):
    """Join the job and make `config` the global parallel config.

    Call it once, before any tensor is made. Under `horovodrun` every process
    becomes a rank of the job; under `python` the process runs alone.

    Args:
        config: a `TransformerOpParallelConfig`; the current global one by default.
        seed: int, from which initial weights and dropout masks are derived; 0 by
            default. The same on every rank.

    Returns:
        The `Topology` of the job.

    Raises:
        ValueError: the config's degrees do not multiply to the number of ranks, or
            ranks were started with different configs.
        RuntimeError: there are several ranks and Horovod is not installed.

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
    hvd = None
    if _started_by_horovodrun():
        hvd = _import_horovod()
        hvd.init()
        if not _initialized:  # before the first operation
            _take_devices(hvd.local_rank(), hvd.local_size())
            atexit.register(shutdown)
    rank, size, local_rank = (hvd.rank(), hvd.size(), hvd.local_rank()) if hvd else (0, 1, 0)
    topology = Topology.from_config(config, size)
    check_supported(config)
    if hvd:
        _compare_configs(hvd, config, seed)
    set_parallel_config(config.resolve(size))
    if seed is not None:
        set_seed(seed)
    _job = _Job(rank, size, local_rank, topology, hvd)
    _initialized = True
    return topology


def _compare_configs(hvd, config, seed):
    """Raise the same error on every rank where ranks were started differently."""
    mine = {**dataclasses.asdict(config), "seed": seed}
    everyone = hvd.allgather_object(mine, name="dtransformer.config")
    for field, expected in everyone[0].items():
        others = [rank for rank, theirs in enumerate(everyone) if theirs[field] != expected]
        if others:
            raise ValueError(
                f"ranks disagree on {field}: rank 0 has {expected!r}, rank {others[0]} has "
                f"{everyone[others[0]][field]!r}; start every rank with the same config"
            )


def _take_devices(local_rank, local_size):
    """Take this rank's GPU, or its share of the machine's cores."""
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        if local_rank >= len(gpus):
            raise RuntimeError(
                f"this host has {len(gpus)} GPUs and {local_size} ranks: start at most one rank a GPU"
            )
        tf.config.set_visible_devices(gpus[local_rank], "GPU")
        tf.config.experimental.set_memory_growth(gpus[local_rank], True)
        return
    cores = max(len(os.sched_getaffinity(0)) // local_size, 1)
    try:
        tf.config.threading.set_intra_op_parallelism_threads(cores)
    except RuntimeError:  # TensorFlow has started: slower, but not wrong
        warnings.warn(
            "dtransformer.init() comes after the first tensor, so that the ranks of this host share "
            "its cores badly: call it first",
            stacklevel=3,
        )


def shutdown():
    """Leave the job, once every rank is here. Without a job, do nothing."""
    global _job, _initialized
    if _job.hvd is not None and _job.hvd.is_initialized():
        _job.hvd.shutdown()
    _job, _initialized = _Job(), False


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


def horovod():
    """Return the module `horovod.tensorflow`, or None where the process runs alone."""
    return _job.hvd


def barrier():
    """Wait until every rank is here."""
    if _job.hvd is not None:
        _job.hvd.allreduce(tf.zeros([]), name="dtransformer.barrier")


def data_shard():
    """Return (index, count): which share of every global batch this rank takes."""
    return _job.topology.coordinates(_job.rank)["data"], _job.topology.data


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
