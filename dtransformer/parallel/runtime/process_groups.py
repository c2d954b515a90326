"""Groups of ranks: the members of a collective and their order.

A group is a Horovod process set with an order. Horovod sorts the ranks of a process set. A group
keeps the order of its argument, which is the order of concatenations and shards.
"""

import dataclasses
import json
import operator
import types
from collections.abc import Callable, Iterable

import numpy as np
import tensorflow as tf

# Ranks exchange small values as JSON. Nothing is pickled.


_END = b"\0"  # End of a text. JSON never contains this byte.


def exchange_json(value, all_gather: Callable[[tf.Tensor], tf.Tensor]) -> list:
    """Return the values of all ranks of a group, ordered by rank.

    Args:
        value: JSON value. Tuples come back as lists.
        all_gather: Function that concatenates the uint8 tensors `[n]` of all ranks.
    """
    data = tf.constant(np.frombuffer(json.dumps(value).encode() + _END, "uint8"))
    texts = all_gather(data).numpy().tobytes().split(_END)
    return [json.loads(text) for text in texts[:-1]]


@dataclasses.dataclass(frozen=True)
class Group:
    """Ranks of the job that communicate with each other, created by `new_group`.

    Args:
        ranks: Tuple of integers. Ranks in the job, in the order of the group.
        index: Integer. Position of this process in `ranks`, or `None` if it is not a member.
        process_set: Horovod process set of the same ranks, or `None` for a single rank.
        memory: Dict that `collectives.call` fills with the calls of this group.
    """

    ranks: tuple[int, ...]
    index: int | None
    process_set: object = dataclasses.field(default=None, compare=False, repr=False)
    memory: dict = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


class ProcessGroups:
    """Groups of a job. They are valid until the job ends, as are Horovod's process sets.

    Args:
        rank: Integer. Rank of this process.
        size: Integer. Number of ranks of the job.
        horovod: The module `horovod.tensorflow`, or `None` for a single process.
        before: `ProcessGroups` of the previous `init` if the job was not left since. Horovod keeps
            these process sets and cannot create them again.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        horovod: types.ModuleType | None = None,
        before: "ProcessGroups | None" = None,
    ):
        self._rank = rank
        self._size = size
        self._horovod = horovod
        self._groups = {}  # Maps ordered ranks to a Group.
        # Maps sorted ranks to a Horovod process set.
        self._process_sets = {} if before is None else before._process_sets

    @property
    def num_communicators(self) -> int:
        """Number of process sets with this rank. On GPUs, each has an NCCL communicator."""
        return sum(self._rank in ranks for ranks in self._process_sets)

    def world_group(self) -> Group:
        """Return the group of all ranks, in order."""
        return self.agreed(range(self._size))

    def new(self, ranks: Iterable[int]) -> Group:
        """Return the group of some ranks. See `job.new_group`."""
        try:
            ranks = tuple(ranks)
            ranks = tuple(map(operator.index, ranks))
        except TypeError:
            pass  # The check below reports invalid ranks once every rank has called.
        if self._horovod is not None:
            all_ranks = exchange_json(
                repr(ranks),
                lambda data: self._horovod.allgather(data, name="dtransformer.new_group"),
            )
            for rank, other_ranks in enumerate(all_ranks):
                if other_ranks != all_ranks[0]:
                    raise ValueError(
                        f"Ranks call `new_group` with different ranks: rank 0 with {all_ranks[0]}, "
                        f"rank {rank} with {other_ranks}. Every rank of the job must create every "
                        "group, in the same order."
                    )
        self._check(ranks)
        return self.agreed(ranks)

    def agreed(self, ranks: Iterable[int]) -> Group:
        """Return the group of some ranks without a comparison between ranks.

        Every rank must make the same call.
        """
        ranks = tuple(ranks)
        if ranks not in self._groups:
            index = ranks.index(self._rank) if self._rank in ranks else None
            self._groups[ranks] = Group(ranks, index, self._process_set(ranks))
        return self._groups[ranks]

    def find(self, ranks: Iterable[int]) -> Group | None:
        """Return the group of `ranks`, or `None` if no group of them exists in any order."""
        ranks = tuple(ranks)
        return self.agreed(ranks) if tuple(sorted(ranks)) in self._process_sets else None

    def _check(self, ranks):
        if not isinstance(ranks, tuple) or not ranks:
            raise ValueError(f"A group needs a list of at least one rank, got {ranks!r}.")
        for rank in ranks:
            if not isinstance(rank, int) or not 0 <= rank < self._size:
                members = f"the ranks 0 to {self._size - 1}" if self._size > 1 else "rank 0 alone"
                raise ValueError(
                    f"Cannot create a group of the ranks {ranks}: {rank!r} is not a rank of this "
                    f"job, which has {members}."
                )
        if len(set(ranks)) < len(ranks):
            raise ValueError(f"A group of the ranks {ranks} contains a rank twice. Name each once.")

    def _process_set(self, ranks):
        """Return the Horovod process set of these ranks, shared by all of their orders."""
        if self._horovod is None or len(ranks) == 1:
            return None
        key = tuple(sorted(ranks))
        if key not in self._process_sets:
            # Horovod already has a process set of all ranks and cannot create a second one.
            if len(ranks) == self._size:
                self._process_sets[key] = self._horovod.global_process_set
            else:
                self._process_sets[key] = self._horovod.add_process_set(list(key))
        return self._process_sets[key]
