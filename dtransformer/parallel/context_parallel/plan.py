"""Plan of attention of sharded sequences, computed without devices.

Between attentions shard r of c has positions r·s/c to (r + 1)·s/c - 1. In attention its queries are
these, or every c-th position from r on, so that all shards have as much to do under a causal mask
(Brandon et al., 2023, "Striped attention", arXiv 2311.09431, §3); or, with `"ulysses"`, all
positions of 1/c of the heads (Jacobs et al., 2023, arXiv 2309.14509, §3).
"""

import dataclasses
import math

Range = tuple[int, int]

# From so many bytes of gathered keys and values on, "auto" has them come in rounds.
_MANY_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class Segment:
    """Keys of a round whose positions follow each other.

    Args:
        start: the place of the first in the round.
        position: the position of the first.
        size: how many there are.
    """

    start: int
    position: int
    size: int


@dataclasses.dataclass(frozen=True)
class Columns:
    """Keys that scores are computed of together.

    Args:
        start, end: their places in a round.
        position: the position of the first, where positions follow each other; else None.
    """

    start: int
    end: int
    position: int | None


@dataclasses.dataclass(frozen=True)
class ContextPlan:
    """How attention is divided over the shards of a sequence.

    Args:
        mode: `"ulysses"`, `"all_gather"` or `"ring"`.
        shards: number c of shards.
        num_queries, num_keys: numbers s and t of positions.
        is_striped: whether shard r has the queries r, r + c, r + 2·c, …

    Raises:
        ValueError: c does not divide a sequence.

    Example:

    >>> plan = ContextPlan("ring", 2, 8, 8, is_striped=True)
    >>> plan.positions(0), plan.positions(1)
    (range(0, 8, 2), range(1, 8, 2))
    >>> [[segment.position for segment in segments] for segments in plan.rounds]
    [[0, 4], [2, 6]]
    """

    mode: str
    shards: int
    num_queries: int
    num_keys: int
    is_striped: bool = False

    def __post_init__(self):
        for length in (self.num_queries, self.num_keys):
            if length % self.shards:
                longer = math.ceil(length / self.shards) * self.shards
                raise ValueError(
                    f"context_parallel={self.shards} must divide the positions of a sequence, got "
                    f"{length}: pad batches to a multiple of it, here {longer}"
                )

    @property
    def has_all_positions(self) -> bool:
        """Whether each shard has the queries and keys of all positions, of some heads."""
        return self.mode == "ulysses"

    @property
    def num_own_queries(self) -> int:
        """The number of queries that a shard has, of each of its heads."""
        return self.num_queries if self.has_all_positions else self.num_queries // self.shards

    def positions(self, shard: int) -> range:
        """Return the positions of a shard's queries, in order."""
        if self.has_all_positions:
            return range(self.num_queries)
        if self.is_striped:
            return range(shard, self.num_queries, self.shards)
        return range(shard * self.num_own_queries, (shard + 1) * self.num_own_queries)

    @property
    def round_parts(self) -> list[Range]:
        """Which of its keys each shard gives in each round, by their places in the shard."""
        own = self.num_keys // self.shards
        if self.mode != "ring":
            return [(0, own)]
        number = min(self.shards, own)
        ends = [own * (i + 1) // number for i in range(number)]
        return list(zip([0, *ends[:-1]], ends))

    @property
    def rounds(self) -> list[list[Segment]]:
        """The keys of each round: those of the first shard, then those of the second, …"""
        own = self.num_keys // self.shards
        rounds = []
        for first, last in self.round_parts:
            size = last - first
            segments = [Segment(r * size, r * own + first, size) for r in range(self.shards)]
            if size == own:  # the whole sequence
                segments = [Segment(0, 0, self.num_keys)]
            rounds.append(segments)
        return rounds

    def rows(self, size: int) -> list[Range]:
        """Return a shard's queries in blocks of at most `size`, by their places."""
        total = self.num_own_queries
        return [(first, min(first + size, total)) for first in range(0, total, size)]

    def bounds(self, row: Range) -> Range:
        """Return the lowest and the highest position of a block of queries, over all shards."""
        shards = [self.positions(shard) for shard in (0, self.shards - 1)]
        return shards[0][row[0]], shards[1][row[1] - 1]

    def columns(
        self,
        row: Range,
        segments: list[Segment],
        causal: bool,
        window: int | None,
        size: int,
        by_position: bool = True,
    ) -> list[Columns]:
        """Return the keys of a round of which a block of queries may see something.

        Args:
            row: the block, by places.
            segments: the round's.
            causal, window: see `is_near`.
            size: of how many keys scores are computed together at most.
            by_position: whether each has to have positions that follow each other.
        """
        if not (causal or window or by_position):
            total = sum(segment.size for segment in segments)
            return [Columns(i, min(i + size, total), None) for i in range(0, total, size)]
        lowest, highest = self.bounds(row)
        first = -math.inf if window is None else lowest - window + 1
        last = math.inf if window is None else highest + window - 1
        if causal:
            last = min(last, highest)
        found = []
        for segment in segments:
            start = max(segment.position, first)
            end = min(segment.position + segment.size, last + 1)
            for position in range(start, end, size) if start < end else ():
                place = segment.start + position - segment.position
                found.append(Columns(place, place + min(size, end - position), position))
        return found

    def seen(
        self, causal: bool, window: int | None, sizes: tuple[int, int], by_position: bool = True
    ) -> list[list[list[Columns]]]:
        """Return of each round, and block of queries, the keys of which something may be seen.

        A block that sees nothing has one key, so that it has a context of zeros.

        Args:
            causal, window, by_position: as of `columns`.
            sizes: most queries and keys of a block.
        """
        rows = self.rows(sizes[0])
        found = [
            [self.columns(row, x, causal, window, sizes[1], by_position) for row in rows]
            for x in self.rounds
        ]
        for number in range(len(rows)):
            if not any(of_round[number] for of_round in found):
                found[0][number] = [Columns(0, 1, self.rounds[0][0].position)]
        return found

    def are_all_near(self, row: Range, columns: Columns, causal: bool, window: int | None) -> bool:
        """Return whether all queries of a block may see all of some keys, by their positions."""
        if columns.position is None:
            return True
        lowest, highest = self.bounds(row)
        first, last = columns.position, columns.position + columns.end - columns.start - 1
        if causal and last > lowest:
            return False
        return window is None or (highest - first < window and (causal or last - lowest < window))


def make_plan(
    mode: str,
    shards: int,
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    causal: bool,
    has_bias: bool,
    item_bytes: int = 4,
) -> ContextPlan:
    """Return the plan of an attention.

    Args:
        mode: the config's `context_parallel_mode`.
        shards: number c of shards.
        queries: shape [b, n, s, d] of the queries, with the heads that a device has.
        keys: shape [b, m, t, d] of the keys, likewise.
        causal: whether a query may attend to no later position.
        has_bias: whether scores have a bias by positions, which stripes do not have.
        item_bytes: bytes of an element.

    Raises:
        ValueError: c does not divide a sequence, or the heads under `"ulysses"`.
    """
    b, n, s, _ = queries
    m, t, d = keys[1:]
    if mode == "auto":
        bytes_of_keys = 2 * b * m * t * d * item_bytes
        mode = "ring" if bytes_of_keys >= _MANY_BYTES else "all_gather"
        mode = "ulysses" if n % shards == m % shards == 0 else mode
    if mode == "ulysses":
        check_heads(n, m, shards)
    can_stripe = causal and s == t and s % shards**2 == 0 and not has_bias
    return ContextPlan(mode, shards, s, t, can_stripe and mode != "ulysses")


def check_heads(n: int, m: int, shards: int) -> None:
    """Check that heads can be divided over the shards of a sequence.

    Args:
        n, m: heads of queries, and of keys, on a device.
        shards: number c of shards.

    Raises:
        ValueError: they cannot.
    """
    if n % shards or (m % shards and shards % m):
        raise ValueError(
            f"context_parallel_mode='ulysses' divides heads over context_parallel={shards}, and a "
            f"device has {n} heads of queries and {m} of keys and values: set "
            "context_parallel_mode='all_gather', 'ring' or 'auto', which do not divide heads"
        )
