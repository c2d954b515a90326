"""Groups of ranks: who takes part in a collective, and in which order.

A group is a Horovod process set with an order. Horovod keeps the ranks of a process
set sorted; a group keeps them as given, and its order fixes that of concatenations
and slices.
"""

import dataclasses
import operator
import os

import tensorflow as tf

from dtransformer.parallel import runtime


@dataclasses.dataclass(frozen=True)
class Group:
    """Ranks of the job that communicate with each other. `new_group` makes one.

    Args:
        ranks: tuple of the ranks' numbers in the job, in the group's order.
        index: this process' position in `ranks`; None where it is not among them.
        process_set: Horovod's set of the same ranks; None for a group of one.
        memory: what `wire` remembers of the calls in this group.
    """

    ranks: tuple
    index: int | None
    process_set: object = dataclasses.field(default=None, compare=False, repr=False)
    memory: dict = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @property
    def size(self):
        """The number of ranks."""
        return len(self.ranks)


_groups = {}  # ranks in their order -> Group
_process_sets = {}  # sorted ranks -> Horovod's process set


def whole_job():
    """Return the group of all ranks, in order; before `init` that is this process alone."""
    return _get(tuple(range(runtime.size())))


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
    try:
        ranks = tuple(ranks)
        ranks = tuple(map(operator.index, ranks))
    except TypeError:
        pass  # what came is refused below, once every rank is there
    hvd = runtime.horovod()
    if hvd is not None:
        with tf.init_scope():
            everyone = hvd.allgather_object(ranks, name="dtransformer.new_group")
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise ValueError(
                    f"ranks call new_group with different ranks: rank 0 with {everyone[0]!r}, "
                    f"rank {rank} with {theirs!r}; every rank of the job makes every group, "
                    "in the same order"
                )
    _check(ranks)
    return _get(ranks)


def agreed_group(ranks):
    """As `new_group`, where every rank is known to ask for the same: they do not compare."""
    return _get(tuple(ranks))


def known_group(ranks):
    """Return the group of `ranks` if a group of them was made, in any order; else None."""
    ranks = tuple(ranks)
    return _get(ranks) if tuple(sorted(ranks)) in _process_sets else None


def forget():
    """Forget every group: Horovod's process sets end with the job."""
    _groups.clear()
    _process_sets.clear()


def _check(ranks):
    size = runtime.size()
    if not isinstance(ranks, tuple) or not ranks:
        raise ValueError(f"a group needs a list of at least one rank, got {ranks!r}")
    for rank in ranks:
        if not isinstance(rank, int) or not 0 <= rank < size:
            raise ValueError(
                f"a group of the ranks {ranks}: {rank!r} is not a rank of this job, which has "
                + (f"the ranks 0 to {size - 1}" if size > 1 else "rank 0 alone")
            )
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"a group of the ranks {ranks} names a rank twice; name each once")


def _get(ranks):
    if ranks not in _groups:
        index = ranks.index(runtime.rank()) if runtime.rank() in ranks else None
        _groups[ranks] = Group(ranks, index, _process_set(ranks))
    return _groups[ranks]


def _process_set(ranks):
    """Return Horovod's process set of these ranks, one for all of their orders."""
    hvd = runtime.horovod()
    if hvd is None or len(ranks) == 1:
        return None
    key = tuple(sorted(ranks))
    if key not in _process_sets:
        if len(ranks) == runtime.size():  # Horovod refuses to make it a second time
            _process_sets[key] = hvd.global_process_set
        elif os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") != "1":
            raise RuntimeError(
                f"Horovod cannot make a group of the ranks {ranks} in a running job: set "
                "HOROVOD_DYNAMIC_PROCESS_SETS=1 before it starts, as dtransformer.init() does"
            )
        else:
            _process_sets[key] = hvd.add_process_set(list(key))
    return _process_sets[key]
