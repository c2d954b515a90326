"""State of the job: this rank, the mesh, the groups of ranks; `dtransformer.init` sets it."""

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
    meshes: frozenset[int] = frozenset()  # how many ranks each of this process' has had
    gates: StopBarriers = dataclasses.field(default_factory=StopBarriers)
    watchdog: Watchdog | None = None


_job = Job()
_alone = contextvars.ContextVar("dtransformer_alone", default=None)
activity = ActivityTracker()
waits_before_leaving = []


def current() -> Job:
    """Return the `Job` as it is now, for the thread that asks."""
    return _alone.get() or _job


def become(job: Job) -> None:
    """Take another `Job` for this process; for `dtransformer.init` and `shutdown`."""
    global _job
    _job = job


def before_leaving(wait: Callable) -> None:
    """Let `shutdown` first call a function that waits for what needs the other ranks."""
    if wait not in waits_before_leaving:
        waits_before_leaving.append(wait)


def is_initialized() -> bool:
    """Return whether `init` was called."""
    return current().is_joined


def rank() -> int:
    """Return this process' number in the job, from 0."""
    return current().rank


def size() -> int:
    """Return the number of processes of the job."""
    return current().size


def local_rank() -> int:
    """Return this process' number on its host, from 0."""
    return current().local_rank


def is_chief() -> bool:
    """Return whether this is rank 0, the one that prints and writes."""
    return current().rank == 0


has_open_line = False  # Whether a progress bar stands on the terminal's last line.


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
    """Return the job's `Topology`."""
    return current().topology


def horovod() -> types.ModuleType | None:
    """Return the module `horovod.tensorflow`, or None where the process runs alone."""
    return current().hvd


def model_parallel_group() -> Group:
    """Return the `Group` of the ranks that compute together with this one, on one mesh."""
    return current().model_parallel_group or whole_job()


def data_parallel_group() -> Group:
    """Return the `Group` of the ranks that hold the same shards of the weights."""
    return current().data_parallel_group or whole_job()


def pipeline_group() -> Group:
    """Return the `Group` of the ranks that hold the stages of one copy of the network."""
    return current().pipeline_group or agreed_group([rank()])


def stage() -> tuple[int, int]:
    """Return (index, number): this rank's pipeline stage, and how many there are."""
    return current().topology.stage_of(current().rank), current().topology.stage


def placement() -> Placement:
    """Return the `Placement` of the network's model chunks on the pipeline's stages."""
    return current().placement


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside of the `with` block this thread is a job of its own, whose layers have full weights."""
    token = _alone.set(Job(seed=seed(), is_joined=is_initialized()))
    try:
        yield
    finally:
        _alone.reset(token)


def barrier() -> None:
    """Wait until every rank is here."""
    if current().hvd is not None:
        with waiting("the barrier", range(current().size)):
            current().hvd.allreduce(tf.zeros([]), name="dtransformer.barrier")


def waiting(collective: str, ranks: Iterable[int]) -> contextlib.AbstractContextManager:
    """Say that a `with` block waits for ranks in a collective; see `ActivityTracker.waiting`."""
    if not tf.executing_eagerly():  # nothing is sent while a function is traced
        activity.traces_collective()
        return contextlib.nullcontext()
    return activity.waiting(collective, [rank for rank in ranks if rank != current().rank])


# What this rank does, for the watchdog: methods of the `ActivityTracker`.
doing, compiles, computed_for = activity.doing, activity.compiles, activity.computed_for


def watchdog() -> Watchdog | None:
    """Return the watchdog of this rank; None without."""
    return current().watchdog


def data_shard() -> tuple[int, int]:
    """Return (index, count): which share of every global batch this rank, and its mesh, takes."""
    return current().topology.data_shard(current().rank)


def rows_multiple_of() -> int:
    """Return what has to divide the number of rows of every batch of a rank."""
    config = get_parallel_config()
    return config.micro_batch_num if config.placement.num_chunks > 1 else 1


def compiles_shapes() -> bool:
    """Return whether each shape of a batch is traced or compiled anew, so that few are better."""
    return mesh() is not None or placement().num_chunks > 1


def seed() -> int:
    """Return the seed that initial weights and dropout masks are derived from."""
    return current().seed


def set_seed(value: int) -> None:
    """Set the seed that dropout masks, and with their paths initial weights, are derived from.

    Args:
        value: an int of at least 0, the same on every rank.
    """
    global _job
    check_int("seed", value, least=0)
    _job = dataclasses.replace(_job, seed=value)


def mesh():
    """Return the DTensor mesh of this rank; None where it is one device."""
    return current().mesh


def whole_job() -> Group:
    """Return the `Group` of all ranks, in order; before `init` that is this process alone."""
    return current().groups.whole_job()


def new_group(ranks: Iterable[int]) -> Group:
    """Return the `Group` of some ranks of the job.

    Every rank of the job calls it, also the ranks that are not in the group, with the
    same ranks and in the same order of calls. A second call with the same ranks returns
    the same group.

    Args:
        ranks: iterable of ints, without repetition. Their order is the group's.

    Raises:
        ValueError: on every rank: `ranks` is empty, names a rank twice or one that the
            job does not have, or ranks of the job called with different `ranks`; or Horovod was
            started without HOROVOD_DYNAMIC_PROCESS_SETS=1.
    """
    with tf.init_scope(), waiting("new_group", range(current().size)):
        return current().groups.new(ranks)


def agreed_group(ranks: Iterable[int]) -> Group:
    """As `new_group`, where every rank is known to ask for the same: they do not compare."""
    return current().groups.agreed(ranks)


def known_group(ranks: Iterable[int]) -> Group | None:
    """Return the group of `ranks` if a group of them was made, in any order; else None."""
    return current().groups.known(ranks)
