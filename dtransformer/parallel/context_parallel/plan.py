"""Plan of attention over sharded sequences, computed without devices.

Between attention layers, shard r of c has positions r·s/c to (r + 1)·s/c - 1. In attention, its
queries are these positions, or every c-th position from r on, which balances the work under a
causal mask (Brandon et al., 2023, "Striped attention", arXiv 2311.09431, §3). With `"ulysses"`, a
shard has all positions of 1/c of the heads (Jacobs et al., 2023, arXiv 2309.14509, §3). With
`"ulysses_ring"` and u Ulysses shards, a shard has c/u times as few positions of 1/u of the heads
(Fang and Zhao, 2024, "USP", arXiv 2405.07719, §3).
"""

import dataclasses
import math

from dtransformer.parallel.config.topology import divisors

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

    The shards form a grid. Shard r has the queries of part r // u of the positions, for part r mod u
    of the heads.

    Args:
        mode: `"ulysses"`, `"all_gather"`, `"ring"` or `"ulysses_ring"`.
        shards: Integer. Number c of shards.
        num_queries: Integer. Number s of query positions.
        num_keys: Integer. Number t of key positions.
        is_striped: Whether part i of p parts has the queries i, i + p, i + 2·p, … Required if there
            are several parts of both positions and heads. Defaults to `False`.
        ulysses_shards: Integer. Number u of parts of the heads with `"ulysses_ring"`. It is c with
            `"ulysses"`, and 1 with the other modes. Defaults to `1`.

    Raises:
        ValueError: If c does not divide the number of positions, or c²/u does not with
            `"ulysses_ring"`.

    Example:

    >>> plan = ContextPlan("ring", 2, 8, 8, is_striped=True)
    >>> list(plan.positions(0)), list(plan.positions(1))
    ([0, 2, 4, 6], [1, 3, 5, 7])
    >>> [[segment.position for segment in segments] for segments in plan.rounds]
    [[0, 4], [2, 6]]
    """

    mode: str
    shards: int
    num_queries: int
    num_keys: int
    is_striped: bool = False
    ulysses_shards: int = 1

    def __post_init__(self):
        for length in (self.num_queries, self.num_keys):
            if length % self.shards:
                longer = math.ceil(length / self.shards) * self.shards
                raise ValueError(
                    f"`context_parallel={self.shards}` must divide the positions of a sequence, got "
                    f"{length}. Pad batches to a multiple of it, here {longer}."
                )
        stripes = self.shards * self.position_parts
        if self.mode == "ulysses_ring" and self.num_queries % stripes:
            longer = math.ceil(self.num_queries / stripes) * stripes
            raise ValueError(
                f"`context_parallel_mode='ulysses_ring'` with `context_parallel={self.shards}` and "
                f"`ulysses_shards={self.head_parts}` needs sequences with a multiple of {stripes} "
                f"positions, got {self.num_queries}. Pad batches to {longer}, or set "
                "`context_parallel_mode` to 'ring'."
            )

    @property
    def head_parts(self) -> int:
        """Number u of parts of the heads."""
        return self.shards if self.mode == "ulysses" else self.ulysses_shards

    @property
    def position_parts(self) -> int:
        """Number of parts of the query positions, c/u."""
        return self.shards // self.head_parts

    @property
    def has_all_positions(self) -> bool:
        """True if each shard has the queries and keys of all positions, for some heads."""
        return self.position_parts == 1

    @property
    def num_local_queries(self) -> int:
        """Number of queries of a shard for each of its heads."""
        return self.num_queries // self.position_parts

    @property
    def stride(self) -> int:
        """Distance between consecutive queries of a shard."""
        return self.position_parts if self.is_striped else 1

    def positions(self, shard: int) -> range:
        """Return the positions of a shard's queries, in order."""
        part = shard // self.head_parts
        first = part if self.is_striped else part * self.num_local_queries
        return range(first, first + self.stride * self.num_local_queries, self.stride)

    @property
    def round_parts(self) -> list[Range]:
        """Index ranges of the keys that each shard sends in each round."""
        num_keys = self.num_keys // self.shards
        if self.mode not in ("ring", "ulysses_ring"):
            return [(0, num_keys)]
        num_rounds = min(self.position_parts, num_keys)
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
        total = self.num_local_queries
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
    ulysses_shards: int | None = None,
) -> ContextPlan:
    """Return the plan of an attention layer.

    Args:
        mode: `context_parallel_mode` of the config.
        shards: Integer. Number c of shards.
        queries: Shape `[b, n, s, d]` of the queries, with the heads of one device.
        keys: Shape `[b, m, t, d]` of the keys, with the heads of one device.
        causal: Whether queries see no later positions.
        has_bias: Whether scores have a bias by position. It is costly for striped queries, which
            only `"ulysses_ring"` then uses.
        item_bytes: Integer. Bytes per element. Defaults to `4`.
        ulysses_shards: `ulysses_shards` of the config. Defaults to `None`.

    Raises:
        ValueError: If a sequence or the heads cannot be divided.
    """
    b, n, s, _ = queries
    m, t, d = keys[1:]
    if mode == "auto":
        bytes_of_keys = 2 * b * m * t * d * item_bytes
        mode = "ring" if bytes_of_keys >= _MIN_RING_BYTES else "all_gather"
        mode = "ulysses" if n % shards == m % shards == 0 else mode
    head_parts = count_head_parts(mode, shards, n, m, ulysses_shards)
    if mode == "ulysses_ring":
        mode = {1: "ring", shards: "ulysses"}.get(head_parts, mode)
    can_stripe = causal and s == t and s % shards**2 == 0 and not has_bias
    is_striped = mode == "ulysses_ring" or (can_stripe and mode != "ulysses")
    return ContextPlan(mode, shards, s, t, is_striped, head_parts)


def count_head_parts(mode: str, shards: int, n: int, m: int, ulysses_shards: int | None) -> int:
    """Return the number u of parts into which a mode divides the heads.

    With `"ulysses_ring"` and `ulysses_shards=None`, u is the largest divisor of c below c that
    divides the query and the key heads.

    Args:
        mode: `context_parallel_mode` of the config.
        shards: Integer. Number c of shards.
        n: Integer. Number of query heads of a device.
        m: Integer. Number of key heads of a device.
        ulysses_shards: `ulysses_shards` of the config, or `None`.

    Raises:
        ValueError: If u does not divide the heads.
    """
    if mode not in ("ulysses", "ulysses_ring"):
        return 1
    if mode == "ulysses_ring" and ulysses_shards is None:
        parts = [u for u in divisors(math.gcd(shards, n, m)) if u < shards]
        return max(parts, default=1)
    degree = "context_parallel" if mode == "ulysses" else "ulysses_shards"
    u = shards if mode == "ulysses" else ulysses_shards
    if n % u or (m % u and u % m):
        fix = "`context_parallel_mode` to 'all_gather', 'ring' or 'auto'"
        if mode == "ulysses_ring":
            fix = "`ulysses_shards` to a divisor of these numbers, or to None"
        raise ValueError(
            f"`context_parallel_mode={mode!r}` divides heads over `{degree}={u}`, but a device has "
            f"{n} heads of queries and {m} of keys and values. Set {fix}."
        )
    return u
