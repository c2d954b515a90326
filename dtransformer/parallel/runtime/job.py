"""State of the job, set by `dtransformer.init`: this rank, the mesh and the groups of ranks."""

import contextlib
import contextvars
import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator

import tensorflow as tf

from dtransformer.errors import check_int
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.config.topology import Topology
from dtransformer.parallel.runtime.process_groups import Group, ProcessGroups
from dtransformer.parallel.schedules.placement import Placement
from dtransformer.parallel.watchdog.activity_tracker import ActivityTracker
from dtransformer.parallel.watchdog.stop_barrier import StopBarriers
from dtransformer.parallel.watchdog.thread import Watchdog


@dataclasses.dataclass(frozen=True)
class Job:
    """State of the job on this rank. `hvd` is `None` for a single process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    topology: Topology = Topology()
    placement: Placement = Placement((0,))
    hvd: types.ModuleType | None = None
    groups: ProcessGroups = dataclasses.field(default_factory=ProcessGroups)
    seed: int = 0
    is_joined: bool = False
    mesh: object = None
    # Numbers of ranks in the meshes that this process has used.
    meshes: frozenset[int] = frozenset()
    gates: StopBarriers = dataclasses.field(default_factory=StopBarriers)
    watchdog: Watchdog | None = None


_job = Job()
_alone = contextvars.ContextVar("dtransformer_alone", default=None)
activity = ActivityTracker()
waits_before_leaving = []


def current() -> Job:
    """Return the current `Job` of the calling thread."""
    return _alone.get() or _job


def become(job: Job) -> None:
    """Replace the `Job` of this process. Only `dtransformer.init` and `shutdown` call this."""
    global _job
    _job = job


def before_leaving(wait: Callable) -> None:
    """Register a function that `shutdown` calls first.

    It finishes work that needs the other ranks.
    """
    if wait not in waits_before_leaving:
        waits_before_leaving.append(wait)


def is_initialized() -> bool:
    """Return whether `init` was called."""
    return current().is_joined


def rank() -> int:
    """Return the rank of this process, from 0."""
    return current().rank


def size() -> int:
    """Return the number of processes of the job."""
    return current().size


def local_rank() -> int:
    """Return the index of this process on its host, from 0."""
    return current().local_rank


def is_chief() -> bool:
    """Return whether this is rank 0, which prints and writes files."""
    return current().rank == 0


has_open_line = False  # Whether the last line on the terminal is a progress bar.


def print_once(text: str, file: object = None) -> None:
    """Print a text on rank 0. It replaces an unfinished progress bar, which is drawn again below.

    Args:
        text: Lines to print.
        file: Passed to `print`.
    """
    global has_open_line
    if is_chief():
        print("\r\x1b[2K\r" * has_open_line + text, file=file, flush=True)
        has_open_line = False


def topology() -> Topology:
    """Return the `Topology` of the job."""
    return current().topology


def horovod() -> types.ModuleType | None:
    """Return the module `horovod.tensorflow`, or `None` for a single process."""
    return current().hvd


def model_parallel_group() -> Group:
    """Return the `Group` of the ranks in this rank's mesh."""
    return agreed_group(topology().model_parallel_group(rank()))


def data_parallel_group() -> Group:
    """Return the `Group` of the ranks that have the same weight shards as this rank."""
    return agreed_group(topology().data_parallel_group(rank()))


def pipeline_group() -> Group:
    """Return the `Group` of the ranks that have the stages of this rank's replica."""
    return agreed_group(topology().pipeline_group(rank()))


def stage() -> tuple[int, int]:
    """Return an `(index, count)` tuple of this rank's pipeline stage and the number of stages."""
    return current().topology.get_stage(current().rank), current().topology.stage


def placement() -> Placement:
    """Return the `Placement` of the model chunks on pipeline stages."""
    return current().placement


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Context manager that makes this thread a job of one rank. Its layers have full weights."""
    token = _alone.set(Job(seed=seed(), is_joined=is_initialized()))
    try:
        yield
    finally:
        _alone.reset(token)


def barrier() -> None:
    """Wait until every rank calls this function."""
    if current().hvd is not None:
        with record_wait("the barrier", range(current().size)):
            current().hvd.allreduce(tf.zeros([]), name="dtransformer.barrier")


def record_wait(collective: str, ranks: Iterable[int]) -> contextlib.AbstractContextManager:
    """Return a context manager that records a wait for ranks. See `ActivityTracker.record_wait`."""
    if not tf.executing_eagerly():  # Tracing a function sends nothing.
        activity.traces_collective()
        return contextlib.nullcontext()
    return activity.record_wait(collective, [rank for rank in ranks if rank != current().rank])


# The watchdog reads this rank's activity. These are methods of the `ActivityTracker`.
record_activity = activity.record_activity
record_compilation = activity.record_compilation
record_local_seconds = activity.record_local_seconds


def watchdog() -> Watchdog | None:
    """Return the watchdog of this rank, or `None`."""
    return current().watchdog


def data_shard() -> tuple[int, int]:
    """Return the `(index, count)` of this rank's mesh's shard of a global batch."""
    return current().topology.data_shard(current().rank)


def has_mesh_replicas() -> bool:
    """Return whether several meshes share every batch."""
    return mesh() is not None and data_shard()[1] > 1


def row_multiple() -> int:
    """Return a number that must divide the number of rows in every batch of a rank.

    It is the number of micro-batches in a pipeline, and 1 otherwise.
    """
    config = get_parallel_config()
    return config.micro_batch_num if config.placement.num_chunks > 1 else 1


def compiles_shapes() -> bool:
    """Return whether a new batch shape is traced or compiled again, so that few shapes are better.

    This is the case on a mesh and with several model chunks.
    """
    return mesh() is not None or placement().num_chunks > 1


def seed() -> int:
    """Return the seed of initial weights and dropout masks."""
    return current().seed


def set_seed(value: int) -> None:
    """Set the seed of initial weights and dropout masks.

    Args:
        value: Integer. At least 0, and identical on all ranks.
    """
    global _job
    check_int("seed", value, minimum=0)
    _job = dataclasses.replace(_job, seed=value)


def mesh():
    """Return the DTensor mesh of this rank, or `None` for a single device."""
    return current().mesh


def world_group() -> Group:
    """Return the `Group` of all ranks, in order. Before `init`, it contains only this process."""
    return current().groups.world_group()


def new_group(ranks: Iterable[int]) -> Group:
    """Return the `Group` of some ranks of the job.

    Every rank of the job must call this, including ranks outside the group, with the same ranks and
    in the same order of calls. A second call with the same ranks returns the same group.

    Args:
        ranks: Iterable of distinct integers. Their order is the order of the group.

    Raises:
        ValueError: If `ranks` is empty, contains a rank twice or an unknown rank, if ranks of the
            job pass different `ranks`, or if Horovod was started without
            HOROVOD_DYNAMIC_PROCESS_SETS=1. Every rank raises the error.
    """
    with tf.init_scope(), record_wait("new_group", range(current().size)):
        return current().groups.new(ranks)


def agreed_group(ranks: Iterable[int]) -> Group:
    """Return the `Group` of some ranks without a comparison between ranks.

    Every rank must make the same call.
    """
    return current().groups.agreed(ranks)


def known_group(ranks: Iterable[int]) -> Group | None:
    """Return the group of `ranks`, or `None` if no group of them exists in any order."""
    return current().groups.find(ranks)
