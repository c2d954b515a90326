"""Plan of attention over sharded sequences, computed without devices.

Between attention layers, shard r of c has positions r·s/c to (r + 1)·s/c - 1. In attention, its
queries are these positions, or every c-th position from r on, which balances the work under a
causal mask (Brandon et al., 2023, "Striped attention", arXiv 2311.09431, §3). With `"ulysses"`, a
shard has all positions of 1/c of the heads (Jacobs et al., 2023, arXiv 2309.14509, §3).
"""

import dataclasses
import math

Range = tuple[int, int]

# Size of the gathered keys and values above which "auto" receives them in rounds.
_MIN_RING_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class Segment:
    """Keys of a round with consecutive positions.

    Args:
        start: Integer. Index of the first key in the round.
        position: Integer. Position of the first key in the sequence.
        size: Integer. Number of keys.
    """

    start: int
    position: int
    size: int


@dataclasses.dataclass(frozen=True)
class Columns:
    """Keys whose scores are computed together.

    Args:
        start: Integer. Index of the first key in the round.
        end: Integer. Index after the last key in the round.
        position: Integer. Position of the first key if positions are consecutive, and otherwise
            `None`.
    """

    start: int
    end: int
    position: int | None


@dataclasses.dataclass(frozen=True)
class ContextPlan:
    """Division of attention over the shards of a sequence.

    Args:
        mode: `"ulysses"`, `"all_gather"` or `"ring"`.
        shards: Integer. Number c of shards.
        num_queries: Integer. Number s of query positions.
        num_keys: Integer. Number t of key positions.
        is_striped: Whether shard r has the queries r, r + c, r + 2·c, … Defaults to `False`.

    Raises:
        ValueError: If c does not divide the number of positions.

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
                    f"`context_parallel={self.shards}` must divide the positions of a sequence, got "
                    f"{length}. Pad batches to a multiple of it, here {longer}."
                )

    @property
    def has_all_positions(self) -> bool:
        """True if each shard has the queries and keys of all positions, for some heads."""
        return self.mode == "ulysses"

    @property
    def num_own_queries(self) -> int:
        """Number of queries of a shard for each of its heads."""
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
        """Index ranges of the keys that each shard sends in each round."""
        num_keys = self.num_keys // self.shards
        if self.mode != "ring":
            return [(0, num_keys)]
        num_rounds = min(self.shards, num_keys)
        ends = [num_keys * (i + 1) // num_rounds for i in range(num_rounds)]
        return list(zip([0, *ends[:-1]], ends))

    @property
    def rounds(self) -> list[list[Segment]]:
        """Segments of the keys of each round, ordered by shard."""
        num_keys = self.num_keys // self.shards
        rounds = []
        for first, last in self.round_parts:
            size = last - first
            segments = [Segment(r * size, r * num_keys + first, size) for r in range(self.shards)]
            if size == num_keys:  # The round has the full sequence.
                segments = [Segment(0, 0, self.num_keys)]
            rounds.append(segments)
        return rounds

    def rows(self, size: int) -> list[Range]:
        """Return the index ranges of a shard's queries in blocks of at most `size`."""
        total = self.num_own_queries
        return [(first, min(first + size, total)) for first in range(0, total, size)]

    def bounds(self, row: Range) -> Range:
        """Return the minimum and maximum position of a block of queries, over all shards."""
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
        """Return the keys of a round that a block of queries may see.

        Args:
            row: Index range of the block.
            segments: List of the segments of the round.
            causal: Whether queries see no later positions.
            window: Integer. Queries only see positions at a distance below `window`. `None` means
                no limit.
            size: Integer. Maximum number of keys whose scores are computed together.
            by_position: Whether the positions of each result must be consecutive. Defaults to
                `True`.
        """
        if not (causal or window or by_position):
            total = sum(segment.size for segment in segments)
            return [Columns(i, min(i + size, total), None) for i in range(0, total, size)]
        lowest, highest = self.bounds(row)
        first = -math.inf if window is None else lowest - window + 1
        last = math.inf if window is None else highest + window - 1
        if causal:
            last = min(last, highest)
        columns = []
        for segment in segments:
            start = max(segment.position, first)
            end = min(segment.position + segment.size, last + 1)
            for position in range(start, end, size) if start < end else ():
                place = segment.start + position - segment.position
                columns.append(Columns(place, place + min(size, end - position), position))
        return columns

    def visible_columns(
        self, causal: bool, window: int | None, sizes: tuple[int, int], by_position: bool = True
    ) -> list[list[list[Columns]]]:
        """Return the visible keys for each round and each block of queries.

        A block that sees no keys gets one key, so that its context becomes zeros.

        Args:
            causal: See `columns`.
            window: See `columns`.
            sizes: `(queries, keys)` tuple. Maximum size of a block.
            by_position: See `columns`.
        """
        rows = self.rows(sizes[0])
        visible = [
            [self.columns(row, x, causal, window, sizes[1], by_position) for row in rows]
            for x in self.rounds
        ]
        for i in range(len(rows)):
            if not any(columns[i] for columns in visible):
                visible[0][i] = [Columns(0, 1, self.rounds[0][0].position)]
        return visible

    def are_all_near(self, row: Range, columns: Columns, causal: bool, window: int | None) -> bool:
        """Return whether all queries of a block may see all keys of `columns`."""
        if columns.position is None:
            return True
        lowest, highest = self.bounds(row)
        first = columns.position
        last = columns.position + columns.end - columns.start - 1
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
    """Return the plan of an attention layer.

    Args:
        mode: `context_parallel_mode` of the config.
        shards: Integer. Number c of shards.
        queries: Shape `[b, n, s, d]` of the queries, with the heads of one device.
        keys: Shape `[b, m, t, d]` of the keys, with the heads of one device.
        causal: Whether queries see no later positions.
        has_bias: Whether scores have a bias by position, which striped queries do not support.
        item_bytes: Integer. Bytes per element. Defaults to `4`.

    Raises:
        ValueError: If c does not divide a sequence, or the heads with `"ulysses"`.
    """
    b, n, s, _ = queries
    m, t, d = keys[1:]
    if mode == "auto":
        bytes_of_keys = 2 * b * m * t * d * item_bytes
        mode = "ring" if bytes_of_keys >= _MIN_RING_BYTES else "all_gather"
        mode = "ulysses" if n % shards == m % shards == 0 else mode
    if mode == "ulysses":
        check_heads(n, m, shards)
    can_stripe = causal and s == t and s % shards**2 == 0 and not has_bias
    return ContextPlan(mode, shards, s, t, can_stripe and mode != "ulysses")


def check_heads(n: int, m: int, shards: int) -> None:
    """Check that heads can be divided over the shards of a sequence.

    Args:
        n: Integer. Number of query heads of a device.
        m: Integer. Number of key heads of a device.
        shards: Integer. Number c of shards.

    Raises:
        ValueError: If they cannot be divided.
    """
    if n % shards or (m % shards and shards % m):
        raise ValueError(
            f"`context_parallel_mode='ulysses'` divides heads over `context_parallel={shards}`, but "
            f"a device has {n} heads of queries and {m} of keys and values. Set "
            "`context_parallel_mode` to 'all_gather', 'ring' or 'auto'."
        )
