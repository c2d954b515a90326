"""Groups of ranks: who takes part in a collective, and in which order.

A group is a Horovod process set with an order. Horovod keeps the ranks of a process
set sorted; a group keeps them as given, and its order fixes that of concatenations
and shards.
"""

import dataclasses
import json
import operator
import types
from collections.abc import Callable, Iterable

import numpy as np
import tensorflow as tf

# Small values of ranks as JSON texts, which an all-gather carries: nothing is pickled.


_END = b"\0"  # of a text: JSON has none


def exchange_json(value, all_gather: Callable[[tf.Tensor], tf.Tensor]) -> list:
    """Return the values of all ranks of a group, in the order of their numbers.

    Args:
        value: what JSON can say; tuples come back as lists.
        all_gather: a function of a uint8 tensor [n] that returns those of all ranks, one
            after the other.
    """
    own = tf.constant(np.frombuffer(json.dumps(value).encode() + _END, "uint8"))
    texts = all_gather(own).numpy().tobytes().split(_END)
    return [json.loads(text) for text in texts[:-1]]


@dataclasses.dataclass(frozen=True)
class Group:
    """Ranks of the job that communicate with each other. `new_group` makes one.

    Args:
        ranks: tuple of the ranks' numbers in the job, in the group's order.
        index: this process' position in `ranks`; None where it is not among them.
        process_set: Horovod's set of the same ranks; None for a group of one.
        memory: what `collectives.call` remembers of the calls in this group.
    """

    ranks: tuple[int, ...]
    index: int | None
    process_set: object = dataclasses.field(default=None, compare=False, repr=False)
    memory: dict = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)


class ProcessGroups:
    """The groups of a job. They end with it, as Horovod's process sets do.

    Args:
        rank: this process' number in the job.
        size: number of ranks of the job.
        horovod: the module `horovod.tensorflow`; None where the process runs alone.
        before: the `ProcessGroups` of a job that is joined anew without having been left:
            Horovod has their process sets still, and makes none twice.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        horovod: types.ModuleType | None = None,
        before: "ProcessGroups | None" = None,
    ):
        self._rank, self._size, self._horovod = rank, size, horovod
        self._groups = {}  # ranks in their order -> Group
        # Sorted ranks -> Horovod's process set.
        self._process_sets = {} if before is None else before._process_sets

    @property
    def num_communicators(self) -> int:
        """The number of process sets that this rank is in: on GPUs NCCL has a communicator for each."""
        return sum(self._rank in ranks for ranks in self._process_sets)

    def whole_job(self) -> Group:
        """Return the group of all ranks, in order."""
        return self.agreed(range(self._size))

    def new(self, ranks: Iterable[int]) -> Group:
        """Return the group of some ranks; see `job.new_group`."""
        try:
            ranks = tuple(ranks)
            ranks = tuple(map(operator.index, ranks))
        except TypeError:
            pass  # what came is refused below, once every rank is there
        if self._horovod is not None:
            everyone = exchange_json(
                repr(ranks), lambda own: self._horovod.allgather(own, name="dtransformer.new_group")
            )
            for rank, theirs in enumerate(everyone):
                if theirs != everyone[0]:
                    raise ValueError(
                        f"ranks call new_group with different ranks: rank 0 with {everyone[0]}, "
                        f"rank {rank} with {theirs}; every rank of the job makes every group, "
                        "in the same order"
                    )
        self._check(ranks)
        return self.agreed(ranks)

    def agreed(self, ranks: Iterable[int]) -> Group:
        """As `new`, where every rank is known to ask for the same: they do not compare."""
        ranks = tuple(ranks)
        if ranks not in self._groups:
            index = ranks.index(self._rank) if self._rank in ranks else None
            self._groups[ranks] = Group(ranks, index, self._process_set(ranks))
        return self._groups[ranks]

    def own(self, group_of_rank: list) -> Group:
        """Make every group of the job's ranks; return this rank's.

        Args:
            group_of_rank: for each rank a tuple of the ranks of its group.
        """
        made = {ranks: self.agreed(ranks) for ranks in dict.fromkeys(group_of_rank)}
        return made[group_of_rank[self._rank]]

    def known(self, ranks: Iterable[int]) -> Group | None:
        """Return the group of `ranks` if a group of them was made, in any order; else None."""
        ranks = tuple(ranks)
        return self.agreed(ranks) if tuple(sorted(ranks)) in self._process_sets else None

    def _check(self, ranks):
        if not isinstance(ranks, tuple) or not ranks:
            raise ValueError(f"a group needs a list of at least one rank, got {ranks!r}")
        for rank in ranks:
            if not isinstance(rank, int) or not 0 <= rank < self._size:
                has = f"the ranks 0 to {self._size - 1}" if self._size > 1 else "rank 0 alone"
                raise ValueError(
                    f"a group of the ranks {ranks}: {rank!r} is not a rank of this job, which "
                    f"has {has}"
                )
        if len(set(ranks)) < len(ranks):
            raise ValueError(f"a group of the ranks {ranks} names a rank twice; name each once")

    def _process_set(self, ranks):
        """Return Horovod's process set of these ranks, one for all of their orders."""
        if self._horovod is None or len(ranks) == 1:
            return None
        key = tuple(sorted(ranks))
        if key not in self._process_sets:
            if len(ranks) == self._size:  # Horovod refuses to make it a second time
                self._process_sets[key] = self._horovod.global_process_set
            else:
                self._process_sets[key] = self._horovod.add_process_set(list(key))
        return self._process_sets[key]
