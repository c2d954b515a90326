"""Joining the job: ranks, devices, the mesh and the groups of ranks.

`init` joins the job that `horovodrun` started, or runs alone. Horovod is needed
for several ranks only, DTensor where operations are sharded.
"""

import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator

import tensorflow as tf

from dtransformer.parallel.config.config import (
    TransformerOpParallelConfig,
    get_parallel_config,
    set_parallel_config,
    validators,
)
from dtransformer.parallel.config.topology import Topology
from dtransformer.parallel.runtime.cluster import start_mesh, stop_mesh
from dtransformer.parallel.runtime.devices import device_type, take_devices
from dtransformer.parallel.runtime.launch import (
    compare_ranks,
    fitting,
    leave_at_exit,
    start_horovod,
    stop_horovod,
)
from dtransformer.parallel.runtime.process_groups import Group, ProcessGroups
from dtransformer.parallel.runtime.start_watchdog import stall_seconds_of, start_watchdog
from dtransformer.parallel.schedules.placement import Placement
from dtransformer.parallel.watchdog.activity_tracker import Recorder
from dtransformer.parallel.watchdog.stop_barrier import StopBarriers
from dtransformer.parallel.watchdog.thread import Watchdog


@dataclasses.dataclass(frozen=True)
class _Job:
    """The job as this rank sees it; `hvd` is None where it runs alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    topology: Topology = Topology()
    placement: Placement = Placement((0,))
    hvd: types.ModuleType | None = None
    groups: ProcessGroups = dataclasses.field(default_factory=ProcessGroups)
    seed: int = 0
    is_joined: bool = False
    model_parallel_group: Group | None = None
    data_parallel_group: Group | None = None
    pipeline_group: Group | None = None
    mesh: object = None
    gates: StopBarriers = dataclasses.field(default_factory=StopBarriers)
    watchdog: Watchdog | None = None


_job = _Job()
_recorder = Recorder()
_before_leaving = []


def init(
    config: TransformerOpParallelConfig | None = None,
    *,
    seed: int | None = None,
    local_devices: int = 1,
    stall_seconds: float | None = None,
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
            devices where there is no GPU.
        stall_seconds: how long a step may take until the watchdog ends the job, on every rank
            and with the name of the one at fault; more where steps are slow, and while
            functions are compiled, checkpoints saved or data validated. 0 for no watchdog. By
            default what the environment has as DTRANSFORMER_STALL_SECONDS, or 50.

    Returns:
        The `Topology` of the job.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the config's degrees do not multiply to the number of devices, its fields
            do not work together, or ranks were started with different configs.
        RuntimeError: there are several ranks and Horovod is not installed, or this
            host has fewer GPUs than its ranks ask for.

    Example:

    >>> import dtransformer
    >>> print(dtransformer.init(dtransformer.TransformerOpParallelConfig()))
    one rank
    """
    global _job
    config = get_parallel_config() if config is None else config
    if not isinstance(config, TransformerOpParallelConfig):
        raise TypeError(f"expected a TransformerOpParallelConfig, got {config!r}")
    if seed is not None:
        validators.seed("seed", seed)
    validators.count("local_devices", local_devices)
    stall_seconds = stall_seconds_of(stall_seconds)
    has_devices = _job.is_joined and mesh() is None  # to leave a mesh starts TensorFlow anew
    _leave_layout()
    hvd = start_horovod()
    rank, size, local_rank = (hvd.rank(), hvd.size(), hvd.local_rank()) if hvd else (0, 1, 0)
    config = fitting(config, size * local_devices)
    topology = Topology.from_config(config, size, local_devices)
    validators.check_supported(config, local_devices)
    if not has_devices:  # before the first operation
        local_size = hvd.local_size() if hvd else 1
        take_devices(local_rank, local_size, local_devices, config.pipeline_stage > 1)
    addresses = [None]
    if hvd:
        addresses = compare_ranks(hvd, config, seed, local_devices, stall_seconds)
    watchdog = start_watchdog(hvd, stall_seconds, _recorder, _job.gates, _job.watchdog)
    if hvd:
        leave_at_exit(hvd, watchdog)
    set_parallel_config(config.resolve(size, local_devices))
    groups = ProcessGroups(rank, size, hvd, _job.groups)
    seed = _job.seed if seed is None else seed
    _job = _Job(
        *(rank, size, local_rank, topology, config.placement, hvd, groups, seed),
        is_joined=True,
        gates=_job.gates,
        watchdog=watchdog,
    )
    with waiting("dtransformer.init", range(size)):
        _join_layout(topology, rank, addresses)
    return topology


def _join_layout(topology, rank, addresses):
    """Start the mesh, and make the groups of the layout."""
    global _job
    groups, config = _job.groups, get_parallel_config()
    everyone = range(topology.num_ranks)
    _job = dataclasses.replace(
        _job,
        mesh=start_mesh(topology, rank, addresses, device_type()),
        model_parallel_group=groups.own([topology.model_parallel_group(r) for r in everyone]),
        data_parallel_group=groups.own([topology.data_parallel_group(r) for r in everyone]),
        pipeline_group=groups.own([topology.pipeline_group(r) for r in everyone]),
    )
    for ranks in dict.fromkeys(topology.pipeline_group(r) for r in everyone):
        for pair in config.placement.stage_pairs:  # which send to each other
            agreed_group(tuple(sorted(ranks[stage] for stage in pair)))


def _leave_layout():
    """Stop the mesh, where there is one, once every rank is done with it."""
    global _job
    if mesh() is not None:
        barrier()
        stop_mesh()
        _job = dataclasses.replace(_job, mesh=None)


def shutdown() -> None:
    """Leave the job, once every rank is here. Without a job, do nothing."""
    global _job
    with doing("saving"):
        for wait in _before_leaving:
            wait()
    _leave_layout()
    barrier()
    if _job.watchdog is not None:
        _job.watchdog.leave()
        leave_at_exit(_job.hvd)
    stop_horovod(_job.hvd)
    _job = _Job(seed=_job.seed)


def before_leaving(wait: Callable) -> None:
    """Let `shutdown` first call a function that waits for what needs the other ranks."""
    if wait not in _before_leaving:
        _before_leaving.append(wait)


def is_initialized() -> bool:
    """Return whether `init` was called."""
    return _job.is_joined


def rank() -> int:
    """Return this process' number in the job, from 0."""
    return _job.rank


def size() -> int:
    """Return the number of processes of the job."""
    return _job.size


def local_rank() -> int:
    """Return this process' number on its host, from 0."""
    return _job.local_rank


def is_chief() -> bool:
    """Return whether this is rank 0, the one that prints and writes."""
    return _job.rank == 0


def topology() -> Topology:
    """Return the job's `Topology`."""
    return _job.topology


def joined() -> object:
    """Return an object that is another one when the job was joined anew: compiled functions end."""
    return _job.groups


def horovod() -> types.ModuleType | None:
    """Return the module `horovod.tensorflow`, or None where the process runs alone."""
    return _job.hvd


def model_parallel_group() -> Group:
    """Return the `Group` of the ranks that compute together with this one, on one mesh."""
    return _job.model_parallel_group or whole_job()


def data_parallel_group() -> Group:
    """Return the `Group` of the ranks that hold the same shards of the weights."""
    return _job.data_parallel_group or whole_job()


def pipeline_group() -> Group:
    """Return the `Group` of the ranks that hold the stages of one copy of the network."""
    return _job.pipeline_group or agreed_group([rank()])


def stage() -> tuple[int, int]:
    """Return (index, number): this rank's pipeline stage, and how many there are."""
    return _job.topology.stage_of(_job.rank), _job.topology.stage


def placement() -> Placement:
    """Return the `Placement` of the network's model chunks on the pipeline's stages."""
    return _job.placement


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside of the `with` block this process is a job of its own, whose layers have full weights."""
    global _job
    joined, _job = _job, _Job(seed=_job.seed, is_joined=_job.is_joined)
    try:
        yield
    finally:
        _job = joined


def barrier() -> None:
    """Wait until every rank is here."""
    if _job.hvd is not None:
        with waiting("the barrier", range(_job.size)):
            _job.hvd.allreduce(tf.zeros([]), name="dtransformer.barrier")


def waiting(collective: str, ranks: Iterable[int]) -> contextlib.AbstractContextManager:
    """Say that a `with` block waits for ranks in a collective; see `Recorder.waiting`."""
    if not tf.executing_eagerly():  # nothing is sent while a function is traced
        _recorder.traces_collective()
        return contextlib.nullcontext()
    return _recorder.waiting(collective, [rank for rank in ranks if rank != _job.rank])


def doing(kind: str, step: int | None = None) -> contextlib.AbstractContextManager:
    """Say what this rank does in a `with` block, for the watchdog; see `Recorder.doing`."""
    return _recorder.doing(kind, step)


def compiles() -> None:
    """Say that the step which is under way is compiled."""
    _recorder.compiles()


def computed_for(seconds: float) -> None:
    """Say how long this rank took between two steps; see `Recorder.computed_for`."""
    _recorder.computed_for(seconds)


def watchdog() -> Watchdog | None:
    """Return the watchdog of this rank; None without."""
    return _job.watchdog


def gates() -> StopBarriers:
    """Return the gates at which ranks stop together; see `dtransformer.parallel.runtime.stopping`."""
    return _job.gates


def data_shard() -> tuple[int, int]:
    """Return (index, count): which share of every global batch this rank, and its mesh, takes."""
    return _job.topology.data_shard(_job.rank)


def rows_multiple_of() -> int:
    """Return what has to divide the number of rows of every batch of a rank."""
    config = get_parallel_config()
    return config.micro_batch_num if config.placement.num_chunks > 1 else 1


def compiles_shapes() -> bool:
    """Return whether each shape of a batch is traced or compiled anew, so that few are better."""
    return mesh() is not None or placement().num_chunks > 1


def seed() -> int:
    """Return the seed that initial weights and dropout masks are derived from."""
    return _job.seed


def set_seed(value: int) -> None:
    """Set the seed that dropout masks, and with their paths initial weights, are derived from.

    Args:
        value: an int of at least 0, the same on every rank.
    """
    global _job
    validators.seed("seed", value)
    _job = dataclasses.replace(_job, seed=value)


def mesh():
    """Return the DTensor mesh of this rank; None where it is one device."""
    return _job.mesh


def whole_job() -> Group:
    """Return the `Group` of all ranks, in order; before `init` that is this process alone."""
    return _job.groups.whole_job()


def new_group(ranks: Iterable[int]) -> Group:
    """Return the `Group` of some ranks of the job.

    Every rank of the job calls it, also the ranks that are not in the group, with the
    same ranks and in the same order of calls. A second call with the same ranks returns
    the same group.

    Args:
        ranks: iterable of ints, without repetition. Their order is the group's.

    Raises:
        ValueError: on every rank: `ranks` is empty, names a rank twice or one that the
            job does not have, or ranks of the job called with different `ranks`.
        RuntimeError: Horovod was started without HOROVOD_DYNAMIC_PROCESS_SETS=1.
    """
    with tf.init_scope(), waiting("new_group", range(_job.size)):
        return _job.groups.new(ranks)


def agreed_group(ranks: Iterable[int]) -> Group:
    """As `new_group`, where every rank is known to ask for the same: they do not compare."""
    return _job.groups.agreed(ranks)


def known_group(ranks: Iterable[int]) -> Group | None:
    """Return the group of `ranks` if a group of them was made, in any order; else None."""
    return _job.groups.known(ranks)
